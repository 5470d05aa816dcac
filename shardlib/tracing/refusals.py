"""What cannot be traced, on the user's line and in his words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from shardlib.errors import ShardingError
from shardlib.tensors.tensor import typeof
from shardlib.tracing.lines import error_line

_VALUE = (
    "Python runs once, on shapes; the values of tensors are known only when the program runs",
    "use torch.where(condition, a, b) or tensor arithmetic, or pass a Python number as an argument",
)
_SHAPE = (
    "every shape is known before the program runs",
    "keep the full shape and mask it: torch.where, masked_fill, topk",
)
_LEAF = (
    "inputs of a traced function are not written to",
    "write x = x + 1 instead of x += 1, and return the new value",
)
_DEVICES = (
    "all tensors that one op reads are on one device",
    "make it where the arguments are: torch.arange(n, device=x.device), module.to(x.device)",
)
_TEXTS: tuple[tuple[type[Exception], str, str, tuple[str, str]], ...] = (
    (TypeError, "integer tensors of a single element", "needs the value of a tensor as an int", _VALUE),
    (TypeError, "unsupported format string passed to FakeTensor", "prints the value of a tensor", _VALUE),
    (RuntimeError, "its data is not allocated yet", "needs the value of a tensor", _VALUE),
    (RuntimeError, "Tensor that doesn't have storage", "needs the value of a tensor", _VALUE),
    (RuntimeError, "tensors to be on the same device", "reads tensors on two devices at once", _DEVICES),
    (RuntimeError, "found two different devices", "reads tensors on two devices at once", _DEVICES),
    (RuntimeError, ".numpy() is not supported", "turns a tensor into a numpy array", _VALUE),
    (
        RuntimeError,
        "leaf Variable that requires grad is being used in an in-place",
        "writes to an input in place",
        _LEAF,
    ),
)


def refusal(error: Exception, tracer: Any) -> ShardingError | None:
    """The error that explains, on the user's line, why a function cannot be traced; None for any other error."""
    if isinstance(error, DataDependentOutputException):
        what, (rule, remedy) = f"needs the value of {_last_operand(tracer)}", _VALUE
    elif isinstance(error, DynamicOutputShapeException):
        what, (rule, remedy) = f"makes a shape that depends on values, by {error.func}", _SHAPE
    else:
        for kind, text, meaning, advice in _TEXTS:
            if isinstance(error, kind) and text in str(error):
                what, (rule, remedy) = meaning, advice
                break
        else:
            return None
    return ShardingError(f"the traced function {what}", [str(error_line(error))], rule=rule, remedy=remedy)


def refuse_ghost(x: torch.Tensor, line: Any) -> NoReturn:
    """Raise the error for a value of an earlier trace, which somebody kept."""
    raise ShardingError(
        "the traced function reads a tensor that an earlier trace left behind",
        [f"{typeof(x)}, read at {line}"],
        rule="what is computed while a function is traced has no values",
        remedy="clear the cache that holds it (cache_clear()), and fill it outside jitted functions",
    )


def refuse_subclasses(leaves: Iterable[tuple[str, Any]]) -> None:
    """Refuse tensors of classes that nobody here knows: what stands for them in a trace has none of their methods."""
    wrong = [
        f"{name} is a {type(x).__module__}.{type(x).__qualname__}"
        for name, x in leaves
        if isinstance(x, torch.Tensor) and type(x).__module__.partition(".")[0] not in ("torch", "shardlib")
    ]
    if wrong:
        raise ShardingError(
            "the traced function reads tensors of classes of their own",
            wrong,
            rule="a program is over plain tensors, parameters and ShardedTensors",
            remedy="pass x.as_subclass(torch.Tensor), and put what the class adds into functions",
        )


def refuse_unseen(x: torch.Tensor, line: Any) -> NoReturn:
    """Raise the error for a parameter that no look at variables and objects has found: its gradient would be lost."""
    raise ShardingError(
        "the traced function reads a tensor that requires a gradient, from where jit does not look",
        [f"{typeof(x)}, read at {line}"],
        rule="gradients go to arguments, and to what variables, modules, objects and short containers hold",
        remedy="make it an argument of the function, or detach() it",
    )


def _last_operand(tracer: Any) -> str:
    """The tensor that the op traced last reads: `gt (bool[])`."""
    last = next(reversed(tracer.graph.nodes))
    source = next(iter(last.all_input_nodes), None)
    val = source.meta.get("val") if source is not None else None
    if not isinstance(val, torch.Tensor):
        return "a tensor"
    return f"{source} ({str(val.dtype).removeprefix('torch.')}{list(val.shape)})"
