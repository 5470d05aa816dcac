"""Compiles shardlib's own kernels: on first use, or now by `python -m shardlib.build [host|cuda|all]`.

Libraries and objects stay in a cache folder of the user (`SHARDLIB_CACHE`, else `XDG_CACHE_HOME/shardlib`, else
`~/.cache/shardlib`), under names with a digest of sources, flags, compiler and torch; the folder may be deleted at any
time. Processes that need a library at the same time wait for the first one. If a build fails, the reason is a value:
ops print it and run on torch. `SHARDLIB_BUILD=0` turns building off; libraries in the cache are loaded.
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
from shardlib.build.build_recipe import Missing, Recipe, Unit, make_recipe

NAMES = ("host", "cuda")
PATIENCE = 600.0  # seconds for which a process waits for another one's build
_KILLED = "the compiler was ended by signal"
# Failures that do not depend on the sources: the next process tries again.
_TRANSIENT = re.compile(
    rf"{_KILLED}|signal terminated program|internal compiler error: (Killed|Terminated)|No space left on device"
    "|[Oo]ut of memory|virtual memory exhausted|Cannot allocate memory|changed while it was compiled"
)
_CPU = "# CPU seconds: "  # the last line of every unit's log


@dataclass(frozen=True, slots=True)
class Built:
    """A library that can be loaded; `seconds` is the time of its build, None if it was in the cache."""

    path: Path
    seconds: float | None = None


def get_library(name: str) -> Built | Missing:
    """Returns the compiled library "host" or "cuda", built if it is not in the cache, or the reason why there is none.

    The result is cached for this process. A failure is also kept in the folder, until sources, flags, compiler or torch
    change, or `python -m shardlib.build` tries again.
    """
    with _locks[name]:
        if name not in _answers:
            wanted = make_recipe(name)
            if isinstance(wanted, Missing):
                _answers[name] = wanted
            elif os.environ.get("SHARDLIB_BUILD") == "0":
                return look_up(wanted) or Missing("SHARDLIB_BUILD=0, and none is built")
            else:
                _answers[name] = build_or_load(wanted)
        return _answers[name]


def rebuild(name: str, unfit: Built) -> Built | Missing:
    """Builds a library again that does not load."""
    build_cache.discard(unfit.path)
    with _locks[name]:
        _answers.pop(name, None)
    return get_library(name)


_answers: dict[str, Built | Missing] = {}
_locks = {name: threading.Lock() for name in NAMES}


def build_or_load(wanted: Recipe, *, again: bool = False, patience: float = PATIENCE) -> Built | Missing:
    """Looks the library up in the cache, or builds it there. `again` retries a build that failed before."""
    try:
        if cached := look_up(wanted, failures=not again):
            return cached
        home = build_cache.writable_folder()
        if isinstance(home, Missing):
            return home
        with build_cache.hold_lock(home / f"{wanted.name}.lock", patience) as refused:
            return refused or _cached(wanted, home, not again) or _build(wanted, home)
    except OSError as error:
        return Missing(f"cannot build the {wanted.name} kernels: {error}")


def look_up(wanted: Recipe, *, failures: bool = True) -> Built | Missing | None:
    """Returns the library or a failure in the cache, or that there is no compiler; None if only a build can tell."""
    folder = build_cache.folder()
    if not isinstance(folder, Missing) and (cached := _cached(wanted, folder, failures)):
        return cached
    return wanted.tool if isinstance(wanted.tool, Missing) else None


def _cached(wanted: Recipe, folder: Path, failures: bool) -> Built | Missing | None:
    """Looks the library up in one folder; without a compiler, accepts the library of any compiler."""
    if not build_cache.is_trusted(folder):
        return None
    if isinstance(wanted.tool, Missing):
        paths = [
            path for path in sorted(folder.glob(f"{wanted.name}-{wanted.key}-*.so")) if build_cache.is_intact(path)
        ]
        return Built(paths[-1]) if paths else None
    target = _target(wanted, folder)
    if build_cache.is_intact(target):
        return Built(target)
    failed = target.with_suffix(".failed")
    if failures:
        with contextlib.suppress(OSError):  # there is none
            return Missing(build_cache.read(failed).decode(), target.with_suffix(".log"))
    return None


def _target(wanted: Recipe, folder: Path) -> Path:
    return folder / f"{wanted.name}-{wanted.key}-{wanted.tool}.so"


def _build(wanted: Recipe, folder: Path) -> Built | Missing:
    """Compiles units without an object, links, and moves the library to its place."""
    n = len(wanted.units)
    _say(f"shardlib: building {wanted.name} kernels ({n} file{'s' * (n > 1)}, once) ...")
    start = time.monotonic()
    for left in folder.glob(f"building-{wanted.name}-*"):  # of a process that died, since this process has the lock
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"building-{wanted.name}-", dir=folder))
    try:
        objects = folder / "objects"
        build_cache.make_subfolder(objects)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            logs = list(pool.map(lambda unit: _compile(unit, objects, scratch), wanted.units))
        failed = [unit.source.name for unit, (ok, _) in zip(wanted.units, logs, strict=True) if not ok]
        text = "".join(log for _, log in logs)
        if not failed:
            command = [*wanted.link, *(str(object_of(unit, objects)) for unit in wanted.units)]
            linked = scratch / "library.so"
            ok, log = _run([*command, "-o", str(linked), *wanted.libraries])
            text += log
            failed = [] if ok else ["the library (linking)"]
        target = _target(wanted, folder)
        _put(text, target.with_suffix(".log"), scratch)
        seconds = time.monotonic() - start
        if failed:
            _say(f" failed after {seconds:.1f} s\n")
            missing = Missing(
                _explain_failure(wanted, failed, text, target.with_suffix(".log")), target.with_suffix(".log")
            )
            if not _TRANSIENT.search(text):
                _put(missing.reason, target.with_suffix(".failed"), scratch)
            return missing
        build_cache.seal(target, linked)
        target.with_suffix(".failed").unlink(missing_ok=True)
        _say(f" {seconds:.1f} s\n")
        return Built(target, seconds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def object_of(unit: Unit, objects: Path) -> Path:
    """Returns the path of a unit's object; its log has the same name."""
    return objects / f"{unit.source.stem}-{unit.key}.o"


def _compile(unit: Unit, objects: Path, scratch: Path) -> tuple[bool, str]:
    """Compiles a unit unless its object exists; returns success and the compiler's log."""
    target = object_of(unit, objects)
    if build_cache.is_intact(target) and target.with_suffix(".log").exists():
        return True, target.with_suffix(".log").read_text()
    compiled = scratch / target.name
    ok, log = _run([*unit.command, "-c", str(unit.source), "-o", str(compiled)])
    if unit.changed():  # so the object may be of either text
        return False, f"{log}{unit.source}: error: changed while it was compiled\n"
    if ok:
        _put(log, target.with_suffix(".log"), scratch)
        build_cache.seal(target, compiled)
    return ok, log


def _run(command: list[str]) -> tuple[bool, str]:
    """Runs a compiler; returns success and its log, which ends in the CPU time of it and its child processes."""
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
        output = file.read()
    if process.returncode < 0:
        output += f"error: {_KILLED} {-process.returncode}\n"
    log = f"$ {' '.join(command)}\n{output.rstrip()}\n{_CPU}{usage.ru_utime + usage.ru_stime:.2f}\n"
    return process.returncode == 0, log


def _put(text: str, target: Path, scratch: Path) -> None:
    part = scratch / target.name
    part.write_text(text)
    build_cache.place(part, target)


def _explain_failure(wanted: Recipe, failed: list[str], text: str, log: Path) -> str:
    compiler = Path(wanted.link[0]).name
    errors = [line.strip() for line in text.splitlines() if re.search(r"\berror\b|undefined reference|fatal", line)]
    reasons = "; ".join(errors[:3]) or "it gave no reason"
    advice = f"once that is mended: python -m shardlib.build {wanted.name}"
    return f"{compiler} could not make {', '.join(failed)}: {reasons} (all of it is in {log}; {advice})"


def main(arguments: list[str]) -> int:
    """Builds, or looks up (`--check`), and prints the libraries; returns the number of missing ones."""
    parser = argparse.ArgumentParser("python -m shardlib.build", description="Compile shardlib's own kernels now.")
    parser.add_argument("name", nargs="?", choices=(*NAMES, "all"), default="all")
    parser.add_argument("--check", action="store_true", help="build nothing, only say what is there")
    parser.add_argument("--verbose", action="store_true", help="print every command and all that the compilers said")
    options = parser.parse_args(arguments)
    return sum(_report(name, options) for name in (NAMES if options.name == "all" else (options.name,)))


def _report(name: str, options: argparse.Namespace) -> bool:
    wanted = make_recipe(name)
    answer: Built | Missing
    if isinstance(wanted, Missing):
        answer = wanted
    else:
        answer = (look_up(wanted) or Missing("not built yet")) if options.check else build_or_load(wanted, again=True)
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
            print(
                f"  {unit.source.name}: {cpu_seconds(text):.1f} CPU-s", *ptxas_report.parse_kernels(text), sep="\n    "
            )
            if options.verbose:
                print(text, end="")
    return False


def cpu_seconds(log: str) -> float:
    """Sums the CPU time of the compilations in a log."""
    return sum(float(line.removeprefix(_CPU)) for line in log.splitlines() if line.startswith(_CPU))
