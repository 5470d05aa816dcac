"""Explains why a function cannot be traced, with the user's line and names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx

from shardlib.core.errors import ShardingError, ValueNeededError
from shardlib.core.source_lines import error_line, user_line
from shardlib.core.torch_internals.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from shardlib.frontend.hazards.user_errors import find_failed_call, frames_of
from shardlib.frontend.retarget_device import can_trace_on
from shardlib.tensor.sharded_tensor import typeof

_ONCE = "Python runs once, on shapes; the values of tensors are known only when the program runs"
_LEAVE = (
    "compute with the tensor itself; for a log, return it and read it outside: float(step(x)), or "
    'sl.debug_print("{}", x)'
)
_DECIDE = (
    "torch.where(condition, a, b) for an if; for an assert or a stop, return the condition and test it outside; "
    "or pass what decides as a Python number or flag"
)
_COUNT = (
    "pass a size or a number of steps as a Python number; where a tensor says the place, x.narrow(dim, start, length), "
    "x.index_select(dim, i) and x.index_copy_(dim, i, value) take it"
)
# What the user called, as torch names it -> what to do instead.
_INSTEAD = {
    **dict.fromkeys(("__bool__", "__contains__", "equal", "allclose", "is_nonzero"), _DECIDE),
    **dict.fromkeys(("item", "__float__", "__int__", "__complex__", "tolist", "numpy", "__array__"), _LEAVE),
    "__format__": 'sl.debug_print("{}", x) prints when the program runs',
    "__index__": _COUNT,
}
_OPTIM = str(Path(torch.optim.__file__).parent)
_STEP = "call opt.step() behind the jitted function, which leaves .grad"
_CLOSURE = "call opt.step(closure) outside of jit; the closure may call a jitted function, which leaves .grad"
_VALUE = (_ONCE, "")
_SHAPES = {
    "__getitem__": "x.where(mask, 0) and sums over it for x[mask]; x[mask] = value works as it is",
    "bincount": "torch.nn.functional.one_hot(x, n).sum(0), or zeros(n).scatter_add(0, x, weights), where n is known",
    **dict.fromkeys(("unique", "unique_consecutive"), "x.sort() and compare neighbors: y[1:] != y[:-1]"),
    "repeat_interleave": "say how many: repeat_interleave(x, n, output_size=total)",
}
_MASK = "keep the full shape and mask it: torch.where(mask, x, 0), masked_fill, topk"
_LEAF = (
    "what a call is given is a leaf inside, and autograd forbids writes in place to a leaf that requires a gradient",
    "make a new tensor of it, h = h + x instead of h += x; an optimizer's update goes under torch.no_grad()",
)
_DEVICES = (
    "all tensors that one op reads are on one device",
    "make it where the arguments are: torch.arange(n, device=x.device), module.to(x.device)",
)
_ELSEWHERE = (
    "a program lives on the devices of its mesh, wherever its function is traced",
    'leave .cuda() and .to("cuda") out of the function; Mesh(..., device="cuda") says where it runs',
)
_SWAP = (
    "an argument stays the tensor that it is; a program writes values",
    "exchange the names, x, y = y, x, or the values: before = x.clone(); x.copy_(y); y.copy_(before)",
)
_QUANTIZED = (
    "a program's values are plain numbers; a quantized tensor is read by dequantize() alone",
    "call x.dequantize() at once; or torch.fake_quantize_per_tensor_affine(x, scale, zero, low, high), or "
    "fake_quantize_per_channel_affine, which gives the numbers; quantize results outside",
)
COLLECTIVES = (
    "a jitted function is a program for one device: its tensors are whole, and shardlib writes the collectives",
    "leave them out (x.sum() is the whole sum), or write per-device code in a shard_map: sl.psum",
)
SHAPES = (
    "an op of your own says what shapes it returns: they are known before the program runs",
    "@op.register_fake, a function of the same arguments: lambda x: torch.empty_like(x)",
)
_TEXTS: tuple[tuple[type[Exception], str, str, tuple[str, str]], ...] = (
    (TypeError, "integer tensors of a single element", "needs the value of a tensor as an int", (_ONCE, _COUNT)),
    (TypeError, "unsupported format string passed to FakeTensor", "prints the value of a tensor", _VALUE),
    (RuntimeError, "vmap over calling .item()", "needs the value of a tensor", _VALUE),
    (RuntimeError, "its data is not allocated yet", "needs the value of a tensor", _VALUE),
    (RuntimeError, "Tensor that doesn't have storage", "needs the value of a tensor", _VALUE),
    (RuntimeError, "tensors to be on the same device", "reads tensors on two devices at once", _DEVICES),
    (RuntimeError, "found two different devices", "reads tensors on two devices at once", _DEVICES),
    (RuntimeError, "not linked with support for", "asks for a device that is not here", _ELSEWHERE),
    (RuntimeError, "NVIDIA driver", "asks for a device that is not here", _ELSEWHERE),
    (AssertionError, "not compiled with CUDA", "asks for a device that is not here", _ELSEWHERE),
    (RuntimeError, ".numpy() is not supported", "turns a tensor into a numpy array", (_ONCE, _LEAVE)),
    (RuntimeError, "torch.distributed.nn.functional.", "calls collectives of torch.distributed", COLLECTIVES),
    (RuntimeError, "Cannot swap t", "exchanges what two tensors are (swap_tensors)", _SWAP),
    (RuntimeError, "quantized nyi in meta tensors", "makes a quantized tensor", _QUANTIZED),
    (RuntimeError, "no fake impl registered", "calls an op that does not say its shapes", SHAPES),
    (
        RuntimeError,
        "leaf Variable that requires grad is being used in an in-place",
        "writes in place to a leaf that requires a gradient",
        _LEAF,
    ),
)


def explain_refusal(error: Exception, tracer: Any, names: Mapping[int, str]) -> ShardingError | None:
    """Returns the error that explains why a function cannot be traced; None if `error` has another cause.

    `names` are those of the traced function's inputs, by their ids.
    """
    name, operands = find_failed_call(error, names)
    if isinstance(error, DataDependentOutputException):
        named = [(x, label) for label, x in operands if label]
        smallest = min(named, key=lambda operand: operand[0].numel(), default=None)
        description = f"{smallest[1]} ({_kind(smallest[0])})" if smallest else None
        action, (rule, remedy) = f"needs the value of {description or _last_operand(tracer)}", _VALUE
    elif isinstance(error, DynamicOutputShapeException):
        by = "x[mask]" if name == "__getitem__" else name or error.func
        action, rule = f"makes a shape that depends on values, by {by}", "every shape is known before the program runs"
        remedy = _SHAPES.get(name, _MASK)
    else:
        for kind, text, meaning, advice in _TEXTS:
            if isinstance(error, kind) and text in str(error):
                action, (rule, remedy) = meaning, advice
                break
        else:
            return None
    line = error_line(error) or user_line(sys._getframe(1))  # the error may not have reached the user's line
    if deciding := [frame for frame in frames_of(error) if frame.f_code.co_filename.startswith(_OPTIM)]:
        methods = ((f.f_code.co_name, f.f_locals.get("self")) for f in deciding)
        method, optimizer = next(((name, x) for name, x in methods if hasattr(type(x), name)), ("step", None))
        remedy = f"call {method}() behind the jitted function"
        if method == "step":
            remedy = _CLOSURE if isinstance(optimizer, torch.optim.LBFGS) else _STEP
    remedy = remedy or _INSTEAD.get(name, _COUNT)
    needs_values = rule == _ONCE or isinstance(error, DynamicOutputShapeException)
    kind = ValueNeededError if needs_values else ShardingError
    return kind(f"the traced function {action}", [str(line)], rule=rule, remedy=remedy)


def _kind(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def refuse_ghost(x: FakeTensor, line: Any, mode: Any) -> NoReturn:
    """Raises the error for a value of an earlier trace, or of the body of a scan, that code kept."""
    if x.fake_mode is mode:
        raise ShardingError(
            "the traced function reads a tensor that the body of scan left behind",
            [f"{typeof(x)}, read at {line}"],
            rule="a body runs once, for every step: its values leave it as the carry, or as y",
            remedy="return it: `return h, y`; scan gives back the ys of all steps, stacked",
        )
    raise ShardingError(
        "the traced function reads a tensor that an earlier trace left behind",
        [f"{typeof(x)}, read at {line}"],
        rule="what is computed while a function is traced has no values",
        remedy="clear the cache that holds it (cache_clear()), and fill it outside jitted functions",
    )


def refuse_absent(graph: fx.Graph, device_of_mesh: torch.device | None) -> None:
    """Refuses devices that are neither present nor the mesh's."""
    for node in graph.nodes:
        device = node.kwargs.get("device") if node.op == "call_function" else None
        supported = ("meta", device_of_mesh and device_of_mesh.type)
        if isinstance(device, torch.device) and not can_trace_on(device) and device.type not in supported:
            rule, remedy = _ELSEWHERE
            problem = f"the traced function asks for a device that is not here, {device}"
            raise ShardingError(problem, [str(node.meta["line"])], rule=rule, remedy=remedy)


def refuse_quantized(graph: fx.Graph) -> None:
    """Refuses quantized tensors that an op other than `dequantize` reads: torch's fakes are plain tensors."""
    quantized = [x for x in graph.nodes if getattr(x.target, "__name__", "").startswith("quantize_per_")]
    wrong = [x for x in quantized if any(user.target is not torch.ops.aten.dequantize.self for user in x.users)]
    if wrong:
        rule, remedy = _QUANTIZED
        problem = "the traced function makes a quantized tensor"
        raise ShardingError(problem, [str(x.meta["line"]) for x in wrong], rule=rule, remedy=remedy)


def refuse_subclasses(leaves: Iterable[tuple[str, Any]]) -> None:
    """Refuses tensors of unknown classes: their stand-ins in a trace have none of their methods."""
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
    """Raises the error for a parameter that is in no known variable or object: its gradient would be lost."""
    raise ShardingError(
        "the traced function reads a tensor that requires a gradient, from where jit does not look",
        [f"{typeof(x)}, read at {line}"],
        rule="gradients go to arguments, and to what variables, modules, objects and short containers hold",
        remedy="make it an argument of the function, or detach() it",
    )


def _last_operand(tracer: Any) -> str:
    """Returns the operand of the last traced op: `gt (bool[])`."""
    last = next(iter(reversed(tracer.graph.nodes)))
    source = next(iter(last.all_input_nodes), None)
    val = source.meta.get("val") if source is not None else None
    return f"{source} ({_kind(val)})" if isinstance(val, torch.Tensor) else "a tensor"
