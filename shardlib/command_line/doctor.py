"""`shardlib doctor`: checks this installation, line by line, with a remedy for each fault.

Whatever may hang or crash runs in a process of its own with a timeout. A warning is something without which programs
run, but slower or in fewer ways.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from shardlib.command_line.finding import FAULT, OK, PREFIX, WARNING, Finding

TESTS = "shardlib.command_line.self_test"
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# What is checked, in which process, and the seconds until it counts as hanging: the first compiles, when it must.
PROCESSES: Sequence[tuple[str, tuple[str, ...], tuple[str, ...], float]] = (
    ("compiler", ("-m", TESTS), ("compiler", "shared-memory"), 600.0),
    ("GPU", ("-m", TESTS), ("gpu", "kernels"), 900.0),
    ("virtual devices", ("-m", TESTS), ("virtual",), 120.0),
    ("ranks", (*LAUNCH, "-m", TESTS), ("ranks",), 180.0),
)
OPTIONAL = {"transformers": "shardlib plan --model needs it"}  # packages that shardlib runs without, and their use
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)[^;]*>=(?P<oldest>[\d.]+)")  # torch>=2.11; extra == "peer"
_LINES = 12  # of the end of a failed process's output


def add_to(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="check this installation",
        description="Checks versions, compiler, shared memory, GPUs, kernels, and a training step on virtual devices "
        "and on two processes. The exit status is 1 if there is a fault.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints a line for every check; returns 1 if one is a fault."""
    faults = 0
    for finding in check_all():
        print(*format_finding(finding), sep="\n", flush=True)
        faults += finding.level == FAULT
    print(f"{faults} fault{'s' * (faults != 1)}")
    return int(faults > 0)


def format_finding(finding: Finding) -> list[str]:
    """Returns the lines of a finding.

    Example:
        >>> print(*format_finding(Finding("numpy", "fault", "1.20 is too old", "pip install 'numpy>=1.26'")), sep="\\n")
        fault    numpy               1.20 is too old
                                     remedy: pip install 'numpy>=1.26'
    """
    first, *more = finding.text.splitlines() or [""]
    lines = [(finding.level, first), *(("", line) for line in more)]
    lines += [("", f"remedy: {finding.remedy}")] if finding.remedy else []
    return [f"{level:<9}{finding.name if level else '':<20}{text}".rstrip() for level, text in lines]


def check_all() -> Iterator[Finding]:
    """Yields all findings, the quick ones first."""
    version = platform.python_version()
    fits = sys.version_info >= (3, 11)
    yield Finding("python", OK if fits else FAULT, f"{version} on {sys.platform}", "" if fits else "use Python 3.11")
    yield from check_packages("shardlib")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("CPUs", OK, f"{cores} for this process")
    for name, launcher, tests, seconds in PROCESSES:
        yield from run_tests(name, (*launcher, *tests), seconds)


def check_packages(distribution: str) -> Iterator[Finding]:
    """Compares installed versions with those that the metadata of `distribution` requires.

    A package that shardlib needs is there, or else this module could not be imported.
    """
    try:
        requirements = importlib.metadata.requires(distribution) or ()
    except importlib.metadata.PackageNotFoundError:
        text = "it is not installed, so the versions of its packages are not checked"
        yield Finding(distribution, WARNING, text, "pip install -e . in the folder of its pyproject.toml")
        return
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is not None and (match["name"] in OPTIONAL or ";" not in requirement):
            yield check_package(match["name"], match["oldest"])


def check_package(name: str, oldest: str) -> Finding:
    """Compares the installed version of a package with the oldest one that shardlib runs with."""
    remedy = f"pip install '{name}>={oldest}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, WARNING, f"it is not installed; {OPTIONAL[name]}", remedy)
    if _numbers(version) < _numbers(oldest):
        return Finding(name, WARNING if name in OPTIONAL else FAULT, f"{version} is older than {oldest}", remedy)
    return Finding(name, OK, version)


def run_tests(name: str, arguments: Sequence[str], seconds: float) -> list[Finding]:
    """Runs a module of Python in a process of its own, and returns the findings that it prints.

    If it fails or takes longer than `seconds`, it is ended with all processes that it started, and that is the finding.
    """
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            remedy = "run it by hand and look where it waits: " + " ".join(["python", *arguments])
            return [Finding(name, FAULT, f"no result after {seconds:.0f} s; the test was ended", remedy)]
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
    results = [line.removeprefix(PREFIX) for line in out.splitlines() if line.startswith(PREFIX)]
    if process.returncode or not results:
        end = "\n".join(err.splitlines()[-_LINES:])
        text = f"the test ended with status {process.returncode}\n{end}"
        return [Finding(name, FAULT, text, "mend what the last line says: " + " ".join(["python", *arguments]))]
    return [Finding(**fields) for fields in json.loads(results[-1])]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
