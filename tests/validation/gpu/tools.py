"""The parts that start other programs: what machine this is, the compiler, compute-sanitizer, pytest."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardlib.build import library as builder
from shardlib.build import ptxas_report
from shardlib.build.build_recipe import Missing, Recipe, make_recipe
from tests.validation.gpu import report
from tests.validation.gpu.figures import LIBRARY_BYTES, TOOLS, of_part
from tests.validation.gpu.records import Outcome, Recorder

ROOT = Path(__file__).resolve().parents[3]
CPU_TESTS = (
    "tests/repository/test_public.py", "tests/sharding/test_spec.py", "tests/sharding/test_layout.py",
    "tests/compiler/plan/test_plan.py", "tests/jit/test_jit.py",
    "tests/ops/test_backend_choice.py", "tests/build/test_build.py",
    "tests/ops/random/test_random_op.py", "tests/ops/attention/test_attention_parts.py",
)  # fmt: skip


def environment(run: Recorder) -> None:
    """The facts above the table."""
    if run.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        run.fact("GPU", card.name)
        size = f"{card.total_memory / 2**30:.0f} GiB, {card.multi_processor_count} SMs"
        run.fact("card", f"sm_{card.major}{card.minor}, {size}, L2 {card.L2_cache_size >> 20} MiB")
        query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
        run.fact("driver, clocks", _said(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]))
    else:
        run.fact("GPU", "none: a rehearsal, no figure counts")
    run.fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    run.fact("nvcc", _said([_tool("nvcc") or "nvcc", "--version"], pick=r"release .*"))
    run.fact("Python, system", f"{platform.python_version()}, {platform.release()}")
    wanted = make_recipe("cuda")
    run.fact(report.DIGEST, wanted.key if isinstance(wanted, Recipe) else str(wanted))


def identity(device: str) -> str:
    """Of what machine and sources records are: those of others do not count."""
    wanted = make_recipe("cuda")
    card = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    return f"{card}, torch {torch.__version__}, cuda/ {wanted.key[:12] if isinstance(wanted, Recipe) else wanted}"


def build(run: Recorder) -> None:
    """The CUDA library, made by `python -m shardlib.build cuda`: its size, and what every kernel needs."""
    (figure,) = of_part("build")
    wanted = make_recipe("cuda")
    if isinstance(wanted, Missing):
        return run.note(figure, False, f"not built: {wanted}")
    start = time.monotonic()
    code, said = _run([sys.executable, "-m", "shardlib.build", "cuda", *([] if run.device == "cuda" else ["--check"])])
    seconds = time.monotonic() - start
    print(said)
    built = builder.look_up(wanted)
    if code or built is None or isinstance(built, Missing):
        return run.note(figure, False, f"not built: {built or said[-200:]}")
    objects = built.path.parent / "objects"
    logs = [builder.object_of(unit, objects).with_suffix(".log") for unit in wanted.units]
    found = [kernel for log in logs if log.exists() for kernel in ptxas_report.parse_kernels(log.read_text())]
    spills, size = sum(kernel.spills + kernel.stack for kernel in found), built.path.stat().st_size
    text = f"{len(found)} kernels in {seconds:.0f} s, {size / 1e6:.1f} MB, {spills} bytes spilled or on the stack"
    return run.note(figure, spills == 0 and size <= LIBRARY_BYTES, text)


# --- compute-sanitizer ------------------------------------------------------------------------------------------------


def sanitizer(run: Recorder) -> None:
    """Small cases of all kernels under compute-sanitizer; racecheck watches shared memory, so attention alone."""
    tool = "true" if run.device != "cuda" else _tool("compute-sanitizer")
    if tool is None:
        return run.absent(of_part("sanitizer"), "there is no compute-sanitizer on PATH or beside nvcc")
    runs = [("attention", tool) for tool in TOOLS] + [("collectives", tool) for tool in ("memcheck", "synccheck")]
    for what, kind in runs:
        command = [tool, "--tool", kind, "--error-exitcode", "9"] if run.device == "cuda" else []
        command += [sys.executable, "-m", "tests.validation.gpu.sanitized", what, run.device]
        figure = f"compute-sanitizer {kind}: {what}"
        if run.device == "cuda" or kind == "memcheck":
            run.attempt(figure, "", functools.partial(_sanitized, command), seconds=100)
    return None


def _sanitized(command: Sequence[str]) -> Outcome:
    code, said = _run(command, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, seconds=95)
    print(said[-6000:])
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", said)
    ran = re.search(r"ran (\d+ cases)", said)
    if "Device not supported" in said:
        return Outcome(None, "compute-sanitizer does not support this device")
    if ran is None and summary is None:
        raise RuntimeError(
            f"exit status {code}: {said.strip().splitlines()[-1] if said.strip() else 'it said nothing'}"
        )
    first = re.search(r"=+ ((?:Error|Invalid|Warning|Race|Barrier|Program hit|Divergent)[^\n]*)", said)
    text = f"{summary.group(1) if summary else 'no summary'}; {ran.group(1) if ran else 'the program did not end'}"
    clean = summary.group(1).startswith("0 ") if summary else command[0] == sys.executable  # no tool: a rehearsal
    return Outcome(
        code == 0 and ran is not None and clean, text + (f"; first: {first.group(1)}" if first and code else "")
    )


# --- pytest -----------------------------------------------------------------------------------------------------------


def gpu_tests(run: Recorder) -> None:
    """All tests marked gpu."""
    (figure,) = of_part("gpu tests")
    which = ["-m", "gpu", *gpu_files()] if run.device == "cuda" else ["tests/ops/test_backend_choice.py"]
    run.attempt(figure, "", functools.partial(_pytest, which, {}), seconds=170)


def gpu_files() -> list[str]:
    """The files that hold such tests: the others may import what only notebooks, or other libraries' tests, need."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(f.relative_to(ROOT))
        for f in files
        if re.search(r"^(pytestmark = |@)pytest\.mark\.gpu$", f.read_text(), re.M)
    ]


def cpu_tests(run: Recorder) -> None:
    """Some tests that need no GPU, on the torch that is here."""
    (figure,) = of_part("cpu tests")
    where = CPU_TESTS if run.device == "cuda" else CPU_TESTS[:1]
    run.attempt(figure, "", functools.partial(_pytest, where, {"CUDA_VISIBLE_DEVICES": ""}), seconds=170)


def _pytest(arguments: Sequence[str], environment: Mapping[str, str]) -> Outcome:
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:benchmark", "-rf", "--tb=short"]
    options += ["--disable-warnings", *(["-n", "6"] if importlib.util.find_spec("xdist") else [])]
    code, said = _run([sys.executable, "-m", "pytest", *options, *arguments], environment, seconds=165)
    print(said[-12000:])
    lines = [line for line in said.splitlines() if line.strip()]
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", lines[-1]) if lines else []
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    text = f"torch {torch.__version__}: {', '.join(counts) or f'exit status {code}'}"
    return Outcome(code == 0, text + "".join(f"; {name}" for name in failed[:3]))


# --- programs ---------------------------------------------------------------------------------------------------------


def _run(
    command: Sequence[str], more: Mapping[str, str] | None = None, seconds: float | None = None
) -> tuple[int, str]:
    """Exit status and output; a program that runs too long is an error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(more or {})}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds,
            text=True, errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode(errors="replace")[-6000:])
        raise RuntimeError(f"{Path(command[0]).name} did not end within {seconds:.0f} s") from error
    return done.returncode, done.stdout


def _said(command: Sequence[str], pick: str = r"\S.*") -> str:
    try:
        code, said = _run(command, seconds=20)
    except (OSError, RuntimeError) as error:
        return f"unknown ({error})"
    found = re.search(pick, said)
    return found.group(0).strip() if found and code == 0 else "unknown"


def _tool(name: str) -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [None, *(str(Path(home, "bin")) for home in homes if home)]
    return next((found for place in places if (found := shutil.which(name, path=place))), None)
