"""Parses the report of the CUDA assembler about each kernel, `ptxas -v`, in the logs of units."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

_STARTS = re.compile(r"Compiling entry function '(?P<name>\S+)' for '(?P<card>\S+)'")
_STACK = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill")
_USED = re.compile(r"Used (?P<registers>\d+) registers")
_SHARED = re.compile(r"(?P<shared>\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on one kind of card; all sizes in bytes per thread, `shared` (static) per block."""

    name: str
    card: str
    registers: int
    stack: int
    spills: int
    shared: int

    def __str__(self) -> str:
        sizes = f"{self.card:8} {self.registers:4} registers, {self.stack} stack, {self.spills} spills"
        return f"{sizes}, {self.shared} shared: {self.name}" if self.shared else f"{sizes}: {self.name}"


def parse_kernels(log: str) -> list[Kernel]:
    """Parses the kernels of a log, in order; stack and spills include the functions that a kernel calls."""
    starts = list(_STARTS.finditer(log))
    ends = [*(start.start() for start in starts), len(log)][1:]
    names = _demangle([start["name"] for start in starts])
    parsed = []
    for start, end, name in zip(starts, ends, names, strict=True):
        report = log[start.end() : end]
        frames = list(_STACK.finditer(report))
        used, shared = _USED.search(report), _SHARED.search(report)
        parsed.append(
            Kernel(
                name=name,
                card=start["card"],
                registers=int(used["registers"]) if used else 0,
                stack=sum(int(frame["stack"]) for frame in frames),
                spills=sum(int(frame["stores"]) + int(frame["loads"]) for frame in frames),
                shared=int(shared["shared"]) if shared else 0,
            )
        )
    return parsed


def _demangle(names: list[str]) -> list[str]:
    """Demangles C++ names and removes their arguments, if binutils' c++filt is installed."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=False)
    plain = [line.replace("(anonymous namespace)::", "").removeprefix("void ") for line in done.stdout.splitlines()]
    return [re.sub(r"\((?!int\)|bool\)).*", "", line) for line in plain] if len(plain) == len(names) else names
