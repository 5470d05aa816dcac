"""Supports stand-ins of numpy arrays among the arguments of a traced function, where torch expects arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from shardlib.core.aten.schemas import find_written_nodes
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import error_line, line_at
from shardlib.core.torch_internals.numpy_bridge import find_arrays


@contextmanager
def accept_stand_ins() -> Iterator[None]:
    """Makes `torch.from_numpy` return an array's stand-in, which is a tensor already, inside the context."""
    original = torch.from_numpy

    def from_numpy(ndarray: Any) -> Tensor:
        return ndarray if isinstance(ndarray, Tensor) else original(ndarray)

    torch.from_numpy = from_numpy
    try:
        yield
    finally:
        torch.from_numpy = original


def refuse_writes(gm: fx.GraphModule, held: Iterable[Any]) -> None:
    """Refuses writes to numpy arrays in the closed-over objects `held`: tracing copied them."""
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.lift_fresh_copy.default)
    written = find_written_nodes(gm.graph) if copies else {}
    arrays = find_arrays(held) if written else []
    numpy: Any = sys.modules.get("numpy")
    wrong = [
        f"at {node.meta['line']}"
        for node in copies
        if node in written and node.args[0].op == "get_attr"
        for constant in [getattr(gm, str(node.args[0].target))]
        if any(numpy.shares_memory(x, constant.detach().numpy()) for x in arrays)
    ]
    if wrong:
        raise ShardingError(
            "the traced function writes to a numpy array that it closes over",
            wrong,
            rule="an array that is closed over is a constant; an array among the arguments is read and written",
            remedy="pass the array as an argument, or clone() the tensor first",
        )


def explain_array_use(error: Exception, frames: Sequence[FrameType]) -> ShardingError | None:
    """Returns the error for a tensor that code uses like an array; None for any other error."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    line = error_line(error)
    inside = next((i for i, frame in enumerate(frames) if _is_of_numpy_on_tensors(frame)), 0)
    if isinstance(error, AttributeError) and isinstance(error.obj, Tensor) and hasattr(numpy.ndarray, str(error.name)):
        use = f"reads .{error.name} of a tensor, as of an array"
    elif isinstance(error, TypeError) and inside:
        use, caller = "gives a tensor to a function of numpy", frames[inside - 1]
        line = line_at(caller.f_code, caller.f_lineno)
    elif isinstance(error, TypeError) and "expected np.ndarray (got FakeTensor)" in str(error):
        use = "gives a tensor to from_numpy"
    else:
        return None
    return ShardingError(
        f"the traced function {use}",
        [str(line)],
        rule="numpy's arrays among the arguments are tensors inside jit: Python runs once, on shapes",
        remedy="use torch's functions and x.to(dtype); or call numpy outside, and pass what it returns",
    )


def _is_of_numpy_on_tensors(frame: FrameType) -> bool:
    own = str(frame.f_globals.get("__name__")).partition(".")[0] == "numpy"
    return own and any(isinstance(x, Tensor) for x in frame.f_locals.values())
