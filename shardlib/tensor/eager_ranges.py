"""Names ops on ShardedTensors outside `jit` for `torch.profiler`, which would call each of them PythonSubclass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from shardlib.core.source_lines import format_path_line, user_line
from shardlib.core.torch_internals.torch_private import PROFILER as PROFILER
from shardlib.core.torch_internals.torch_private import PROFILING as PROFILING
from shardlib.core.torch_internals.torch_private import running_node


def run_in_profiler_range(op: Any, label: str, run: Callable[..., Any], *args: Any) -> Any:
    """Runs `run(*args)` in a range named like `aten.addmm.default on ShardedTensors in Linear at train.py:12`."""
    line = user_line(sys._getframe(1))
    where = (
        "" if line is None else f"{', backward at' if running_node() is not None else ' at'} {format_path_line(line)}"
    )
    with profiler.record_function(f"{op} {label}{_running_module()}{where}"):
        return run(*args)


def _running_module() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(m := frame.f_locals.get("self"), torch.nn.Module):
            return f" in {type(m).__name__}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
