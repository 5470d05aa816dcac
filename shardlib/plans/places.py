"""Where a source line is, as plans and reasons print it: without what differs from machine to machine."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch

from shardlib.tracing.lines import Line

_ROOTS = sorted({str(Path(torch.__path__[0]).parent), sysconfig.get_paths()["purelib"]}, key=len, reverse=True)


def spot(line: Line | None) -> str:
    """`w1.py:106`: the same in whatever folder a process runs."""
    return "the results" if line is None or not line.file else f"{Path(line.file).name}:{line.lineno}"


def place(line: Line | None) -> str:
    """`tests/models/w1.py:106`: relative to the installed libraries, or to the folder that the program runs in."""
    if line is None or not line.file:
        return "the results"  # what moves where no op stands: an argument that is returned elsewhere
    path = line.file
    for root in (*_ROOTS, str(Path.cwd())):
        if path.startswith(root + os.sep):
            path = path[len(root) + 1 :]
            break
    return f"{path}:{line.lineno}"
