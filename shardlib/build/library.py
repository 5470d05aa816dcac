"""Compile shardlib's own kernels: on first use, or now by `python -m shardlib.build [host|cuda|all]`.

Libraries and objects stay in a cache folder of the user (`SHARDLIB_CACHE`, else `XDG_CACHE_HOME/shardlib`, else
`~/.cache/shardlib`), under names that hold a digest of sources, flags, compiler and torch; the folder may be deleted at
any time. Processes that want a library at the same time wait for the first. Where one cannot be made, the reason is a
value: ops print it and run on torch. `SHARDLIB_BUILD=0` turns building off; what is there is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardlib.build import build_cache, ptxas_report
from shardlib.build.build_recipe import Missing, Recipe, Unit, recipe

NAMES = ("host", "cuda")
PATIENCE = 600.0  # seconds for which a process waits for another one's build
_KILLED = "the compiler was ended by signal"
# What says nothing about the sources: the next process tries again.
_PASSING = re.compile(
    rf"{_KILLED}|signal terminated program|internal compiler error: (Killed|Terminated)|No space left on device"
    "|[Oo]ut of memory|virtual memory exhausted|Cannot allocate memory|changed while it was compiled"
)
_CPU = "# CPU seconds: "  # the last line of every unit's log


@dataclass(frozen=True, slots=True)
class Built:
    """A library that can be loaded; `seconds` is what making it took just now, None when it was there."""

    path: Path
    seconds: float | None = None


def library(name: str) -> Built | Missing:
    """The compiled library "host" or "cuda", built if it is not in the cache, or the reason why there is none.

    The answer is kept for this process, and a failure in the cache too: it is tried again when sources, flags, compiler
    or torch change, or by `python -m shardlib.build`.
    """
    with _locks[name]:
        if name not in _answers:
            wanted = recipe(name)
            if isinstance(wanted, Missing):
                _answers[name] = wanted
            elif os.environ.get("SHARDLIB_BUILD") == "0":
                return look(wanted) or Missing("SHARDLIB_BUILD=0, and none is built")
            else:
                _answers[name] = make(wanted)
        return _answers[name]


def again(name: str, unfit: Built) -> Built | Missing:
    """The library, built once more since this one does not load."""
    build_cache.discard(unfit.path)
    with _locks[name]:
        _answers.pop(name, None)
    return library(name)


_answers: dict[str, Built | Missing] = {}
_locks = {name: threading.Lock() for name in NAMES}


def make(wanted: Recipe, *, again: bool = False, patience: float = PATIENCE) -> Built | Missing:
    """Look the library up in the cache, or build it there. `again` tries once more what failed before."""
    try:
        if found := look(wanted, failures=not again):
            return found
        home = build_cache.writable()
        if isinstance(home, Missing):
            return home
        with build_cache.only_one(home / f"{wanted.name}.lock", patience) as refused:
            return refused or _cached(wanted, home, not again) or _build(wanted, home)
    except OSError as error:
        return Missing(f"cannot build the {wanted.name} kernels: {error}")


def look(wanted: Recipe, *, failures: bool = True) -> Built | Missing | None:
    """What is known without building: the library, why it failed before, that there is no compiler, or nothing."""
    folder = build_cache.folder()
    if not isinstance(folder, Missing) and (cached := _cached(wanted, folder, failures)):
        return cached
    return wanted.tool if isinstance(wanted.tool, Missing) else None


def _cached(wanted: Recipe, folder: Path, failures: bool) -> Built | Missing | None:
    """What one folder holds. Without a compiler, a library that any compiler made of these sources will do."""
    if not build_cache.trusted(folder):
        return None
    if isinstance(wanted.tool, Missing):
        made = [path for path in sorted(folder.glob(f"{wanted.name}-{wanted.key}-*.so")) if build_cache.sound(path)]
        return Built(made[-1]) if made else None
    target = _target(wanted, folder)
    if build_cache.sound(target):
        return Built(target)
    failed = target.with_suffix(".failed")
    if failures:
        with contextlib.suppress(OSError):  # there is none
            return Missing(build_cache.read(failed).decode(), target.with_suffix(".log"))
    return None


def _target(wanted: Recipe, folder: Path) -> Path:
    return folder / f"{wanted.name}-{wanted.key}-{wanted.tool}.so"


def _build(wanted: Recipe, folder: Path) -> Built | Missing:
    """Compile what has no object yet, link, and only then give the library its name."""
    n = len(wanted.units)
    _say(f"shardlib: building {wanted.name} kernels ({n} file{'s' * (n > 1)}, once) ...")
    start = time.monotonic()
    for left in folder.glob(f"building-{wanted.name}-*"):  # by a process that died, since the lock is ours now
        shutil.rmtree(left, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f"building-{wanted.name}-", dir=folder))
    try:
        objects = folder / "objects"
        build_cache.make_inside(objects)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            logs = list(pool.map(lambda unit: _compile(unit, objects, aside), wanted.units))
        failed = [unit.source.name for unit, (ok, _) in zip(wanted.units, logs, strict=True) if not ok]
        text = "".join(log for _, log in logs)
        if not failed:
            command = [*wanted.link, *(str(object_of(unit, objects)) for unit in wanted.units)]
            made = aside / "library.so"
            ok, log = _run([*command, "-o", str(made), *wanted.libraries])
            text += log
            failed = [] if ok else ["the library (linking)"]
        target = _target(wanted, folder)
        _put(text, target.with_suffix(".log"), aside)
        seconds = time.monotonic() - start
        if failed:
            _say(f" failed after {seconds:.1f} s\n")
            missing = Missing(_why(wanted, failed, text, target.with_suffix(".log")), target.with_suffix(".log"))
            if not _PASSING.search(text):
                _put(missing.reason, target.with_suffix(".failed"), aside)
            return missing
        build_cache.seal(target, made)
        target.with_suffix(".failed").unlink(missing_ok=True)
        _say(f" {seconds:.1f} s\n")
        return Built(target, seconds)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def object_of(unit: Unit, objects: Path) -> Path:
    """Where a unit's object is kept; its log stands beside it."""
    return objects / f"{unit.source.stem}-{unit.key}.o"


def _compile(unit: Unit, objects: Path, aside: Path) -> tuple[bool, str]:
    """Make a unit's object unless it is there; what the compiler said, either way."""
    target = object_of(unit, objects)
    if build_cache.sound(target) and target.with_suffix(".log").exists():
        return True, target.with_suffix(".log").read_text()
    made = aside / target.name
    ok, log = _run([*unit.command, "-c", str(unit.source), "-o", str(made)])
    if unit.changed():  # so nobody knows of which text the object is
        return False, f"{log}{unit.source}: error: changed while it was compiled\n"
    if ok:
        _put(log, target.with_suffix(".log"), aside)
        build_cache.seal(target, made)
    return ok, log


def _run(command: list[str]) -> tuple[bool, str]:
    """Run a compiler: whether it succeeded, and its log, which ends in the CPU time that it and its parts took."""
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        try:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "LC_ALL": "C"}
            )
        except OSError as error:
            return False, f"$ {' '.join(command)}\nerror: {error}\n"
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        file.seek(0)
        said = file.read()
    if process.returncode < 0:
        said += f"error: {_KILLED} {-process.returncode}\n"
    log = f"$ {' '.join(command)}\n{said.rstrip()}\n{_CPU}{usage.ru_utime + usage.ru_stime:.2f}\n"
    return process.returncode == 0, log


def _put(text: str, target: Path, aside: Path) -> None:
    part = aside / target.name
    part.write_text(text)
    build_cache.place(part, target)


def _why(wanted: Recipe, failed: list[str], text: str, log: Path) -> str:
    compiler = Path(wanted.link[0]).name
    errors = [line.strip() for line in text.splitlines() if re.search(r"\berror\b|undefined reference|fatal", line)]
    said = "; ".join(errors[:3]) or "it gave no reason"
    again = f"once that is mended: python -m shardlib.build {wanted.name}"
    return f"{compiler} could not make {', '.join(failed)}: {said} (all of it is in {log}; {again})"


def command(arguments: list[str]) -> int:
    """Build, or look (`--check`), and print what is there; the number of libraries that are not."""
    parser = argparse.ArgumentParser("python -m shardlib.build", description="Compile shardlib's own kernels now.")
    parser.add_argument("name", nargs="?", choices=(*NAMES, "all"), default="all")
    parser.add_argument("--check", action="store_true", help="build nothing, only say what is there")
    parser.add_argument("--verbose", action="store_true", help="print every command and all that the compilers said")
    options = parser.parse_args(arguments)
    return sum(_report(name, options) for name in (NAMES if options.name == "all" else (options.name,)))


def _report(name: str, options: argparse.Namespace) -> bool:
    wanted = recipe(name)
    answer: Built | Missing
    if isinstance(wanted, Missing):
        answer = wanted
    else:
        answer = (look(wanted) or Missing("not built yet")) if options.check else make(wanted, again=True)
    if isinstance(wanted, Missing) or isinstance(answer, Missing):
        print(f"{name}: none: {answer}")
        if options.verbose and isinstance(answer, Missing) and answer.log:
            print(answer.log.read_text(), end="")
        return True
    when = "was there" if answer.seconds is None else f"built in {answer.seconds:.1f} s"
    print(f"{name}: {when}, {answer.path.stat().st_size / 1e6:.2f} MB: {answer.path}")
    for unit in wanted.units:
        log = object_of(unit, answer.path.parent / "objects").with_suffix(".log")
        if log.exists():
            text = log.read_text()
            print(f"  {unit.source.name}: {cpu_seconds(text):.1f} CPU-s", *ptxas_report.kernels(text), sep="\n    ")
            if options.verbose:
                print(text, end="")
    return False


def cpu_seconds(log: str) -> float:
    """What the compilations of a log took, theirs and their parts' time on all CPUs."""
    return sum(float(line.removeprefix(_CPU)) for line in log.splitlines() if line.startswith(_CPU))
