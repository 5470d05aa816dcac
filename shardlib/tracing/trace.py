"""Trace: a user's function -> one functional graph of ATen ops, with the user's line on every node.

The function runs once, on fake tensors. Python runs as it is written: its ints, floats and flags become constants of
the graph. Attention is caught whole, before torch picks a kernel for some device; in-place writes are rewritten after.
"""

from __future__ import annotations

import gc
import inspect
import operator
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from shardlib.errors import ShardingError
from shardlib.random.draw import one_program
from shardlib.rules.batchnorm import native_batch_norm
from shardlib.rules.table import DECOMPOSITIONS as RULES_DECOMPOSITIONS
from shardlib.strided import refuse_others
from shardlib.tracing.capture import DECOMPOSITIONS, AttentionCapture
from shardlib.tracing.composites import Composites
from shardlib.tracing.first_order import first_order
from shardlib.tracing.functionalise import functionalise
from shardlib.tracing.lines import Line, LineRecorder, error_line


@dataclass(frozen=True)
class Traced:
    """One traced function: a functional graph, and how its values map to the function's arguments and results.

    `graph` takes the tensor leaves of `(args, kwargs)` in order, named `input_names`, and returns the leaves of the
    result; those that are no tensors stand in its output node as they are.
    """

    graph: fx.GraphModule
    name: str
    input_names: tuple[str, ...]
    input_leaves: tuple[int, ...]  # for every placeholder, which leaf of `in_tree` it is
    input_paths: tuple[Any, ...]  # and its pytree path in `(args, kwargs)`
    in_tree: pytree.TreeSpec
    output_names: tuple[str, ...]
    out_tree: pytree.TreeSpec
    static: Collection[int | str] = ()

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.graph.graph.nodes if n.op == "placeholder")

    @property
    def outputs(self) -> tuple[Any, ...]:
        """A node for every tensor leaf of the result, the constant itself for every other leaf."""
        return tuple(self.graph.graph.output_node().args[0])  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph op by op on real tensors: the oracle for every later stage."""
        leaves = flatten_call(args, kwargs, self.static).leaves
        flat = fx.Interpreter(self.graph).run(*(leaves[i] for i in self.input_leaves), enable_io_processing=False)
        return pytree.tree_unflatten(list(flat), self.out_tree)


@dataclass(frozen=True)
class Static:
    """An argument that is kept whole and never looked into."""

    value: Any


@dataclass(frozen=True)
class FlatCall:
    """The leaves of one call's arguments, and the path to each."""

    leaves: tuple[Any, ...]
    paths: tuple[Any, ...]
    tree: pytree.TreeSpec


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any], static: Collection[int | str] = ()) -> FlatCall:
    """The leaves of a call; an argument whose position or name is in `static` is one leaf, wrapped in `Static`."""
    wrapped = tuple(Static(a) if i in static else a for i, a in enumerate(args))
    named = {k: Static(a) if k in static else a for k, a in kwargs.items()}
    paths, tree = pytree.tree_flatten_with_path((wrapped, named))
    return FlatCall(tuple(leaf for _, leaf in paths), tuple(path for path, _ in paths), tree)


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf becomes an input of the graph: a tensor, or whatever has a tensor's shape, dtype and device."""
    return isinstance(leaf, torch.Tensor) or (
        isinstance(getattr(leaf, "dtype", None), torch.dtype) and hasattr(leaf, "shape") and hasattr(leaf, "device")
    )


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    static: Collection[int | str] = (),
    device: torch.device | str | None = None,
) -> Traced:
    """Trace `fn(*args, **kwargs)`.

    Tensor leaves of the arguments (real, meta, fake or sharded: only shape, dtype, device and `requires_grad` are read)
    become inputs; every other leaf is a constant, and so is every argument whose position or name is in `static`. Real
    tensors that `fn` closes over become constants. `device` overrides where inputs are thought to live.

    Raises ShardingError, with the user's line, when `fn` needs the value of a tensor, when a result's shape depends on
    values, and when `fn` writes to an input in place.

    Example:
        >>> traced = trace(lambda x, n: {"y": x.sin() * n}, (torch.empty(3, device="meta"), 2.0))
        >>> traced.input_names, traced.output_names
        (('x',), ("['y']",))
        >>> traced(torch.zeros(3), 2.0)["y"]
        tensor([0., 0., 0.])
    """
    call = flatten_call(args, kwargs or {}, static)
    where = tuple(i for i, leaf in enumerate(call.leaves) if is_tensor(leaf))
    names = tuple(_input_names(fn, [call.paths[i] for i in where]))
    tensors = [call.leaves[i] for i in where]
    refuse_others("the traced function", zip(names, tensors, strict=True))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    lines = LineRecorder(_definition(fn))
    result: list[Any] = []  # what fn returned, as (paths and leaves, tree)

    def flat(*inputs: torch.Tensor) -> list[torch.Tensor]:
        tracer = _recorded(lines)
        leaves = list(call.leaves)
        for i, x in zip(where, inputs, strict=True):
            leaves[i] = x
        a, k = pytree.tree_unflatten([x.value if isinstance(x, Static) else x for x in leaves], call.tree)
        try:
            result.extend(pytree.tree_flatten_with_path(fn(*a, **k)))
        except Exception as error:
            if refusal := _refusal(error, tracer):
                raise refusal from error
            raise
        return [leaf for _, leaf in result[0] if isinstance(leaf, torch.Tensor)]

    with _tracing(), mode, _use_lazy_graph_module(True):  # nobody needs the graph as Python source
        inputs = [_fake(x, device, tensors) for x in tensors]
        gm = make_fx(flat, _DECOMPOSITIONS, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)

    out_paths, out_tree = result
    with mode:
        _finish(gm, names, [leaf for _, leaf in out_paths], lines.fallback, mode)
        functionalise(gm, names)
    out_names = tuple(pytree.keystr(path) for path, _ in out_paths)
    return Traced(
        gm,
        lines.fallback.function,
        names,
        where,
        tuple(call.paths[i] for i in where),
        call.tree,
        out_names,
        out_tree,
        static,
    )


_LOCK = threading.RLock()  # torch's tracing state is global


@contextmanager
def _tracing() -> Iterator[None]:
    with _LOCK, torch.backends.cudnn.flags(enabled=False):  # one graph, whatever device it is for
        before, collects = torch.compiler._is_compiling_flag, gc.isenabled()
        gc.disable()  # nothing made here is garbage yet, and looking for some took a quarter of the time
        # Model libraries read this flag before they look at the values of masks and positions.
        torch.compiler._is_compiling_flag = True
        try:
            with AttentionCapture(), Composites(), first_order(), one_program(traced=True):
                yield
        finally:
            torch.compiler._is_compiling_flag = before
            if collects:
                gc.enable()


def _fake(x: Any, device: torch.device | str | None, among: Sequence[Any]) -> torch.Tensor:
    if device is None:
        real = (t.device for t in among if t.device.type != "meta")
        device = x.device if x.device.type != "meta" else next(real, torch.device("cpu"))
    requires_grad = bool(getattr(x, "requires_grad", False))
    return torch.empty(tuple(x.shape), dtype=x.dtype, device=device, requires_grad=requires_grad)


def _recorded(lines: LineRecorder) -> Any:
    """The running tracer, changed to give every node that it makes a line."""
    mode = get_proxy_mode()
    assert mode is not None, "make_fx runs the function under its proxy mode"
    tracer: Any = mode.tracer
    create = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = create(*args, **kwargs)
        lines.record(node)
        return node

    tracer.create_node = create_node
    return tracer


def _finish(gm: fx.GraphModule, names: Sequence[str], leaves: Sequence[Any], line: Line, mode: FakeTensorMode) -> None:
    """Name the inputs as the user does, put constants among the outputs, fill in what has no line."""
    graph = gm.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders, names, strict=True):
        node._rename(re.sub(r"\W+", "_", name).strip("_") or "x")
    output = graph.output_node()
    returned = iter(output.args[0])  # type: ignore[arg-type]
    output.args = (tuple(next(returned) if isinstance(x, torch.Tensor) else x for x in leaves),)
    refuse_others("the traced function", ((f"the result of {n.target}", x) for n in graph.nodes for x in _values(n)))
    for node in graph.nodes:
        node.meta.setdefault("line", line)
        node.meta.setdefault("val", None)  # a gradient that nobody asked for
        if node.target is torch.ops.aten._to_copy.default and not isinstance(node.args[0], fx.Node):
            made = node.meta["val"]  # under vmap, a Python number that meets a tensor changes its dtype alone
            node.target = torch.ops.aten.scalar_tensor.default
            node.kwargs = {"dtype": made.dtype, "device": made.device}
        if node.op == "get_attr" and node.meta.get("val") is None:
            node.meta["val"] = mode.from_tensor(operator.attrgetter(str(node.target))(gm))


def _values(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves(node.meta.get("val")) if node.op == "call_function" else []


def _definition(fn: Callable[..., Any]) -> Line:
    inner = inspect.unwrap(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    inner = getattr(inner, "__func__", inner)
    code = getattr(inner, "__code__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    if code is None:
        return Line("", 0, name, "")
    return Line(code.co_filename, code.co_firstlineno, name, "")


def _input_names(fn: Callable[..., Any], paths: Sequence[Any]) -> Iterator[str]:
    """`params['wq']`, `x`, `rest[0]`: leaves named by the function's own parameters."""
    try:
        parameters = list(inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values())
    except (ValueError, TypeError):  # a builtin
        parameters = []
    kinds = inspect.Parameter
    plain = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), "args")
    for path in paths:
        group, first, *tail = path
        if group.idx == 1:
            head = str(first.key)
        else:
            head = plain[first.idx] if first.idx < len(plain) else f"{rest}[{first.idx - len(plain)}]"
        yield head + pytree.keystr(tuple(tail))


# --- what cannot be traced --------------------------------------------------------------------------------------------

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
_TEXTS: tuple[tuple[type[Exception], str, str, tuple[str, str]], ...] = (
    (TypeError, "integer tensors of a single element", "needs the value of a tensor as an int", _VALUE),
    (TypeError, "unsupported format string passed to FakeTensor", "prints the value of a tensor", _VALUE),
    (RuntimeError, "its data is not allocated yet", "needs the value of a tensor", _VALUE),
    (RuntimeError, "Tensor that doesn't have storage", "needs the value of a tensor", _VALUE),
    (RuntimeError, ".numpy() is not supported", "turns a tensor into a numpy array", _VALUE),
    (
        RuntimeError,
        "leaf Variable that requires grad is being used in an in-place",
        "writes to an input in place",
        _LEAF,
    ),
)


def _refusal(error: Exception, tracer: Any) -> ShardingError | None:
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


def _last_operand(tracer: Any) -> str:
    """The tensor that the op traced last reads: `gt (bool[])`."""
    last = next(reversed(tracer.graph.nodes))
    source = next(iter(last.all_input_nodes), None)
    val = source.meta.get("val") if source is not None else None
    if not isinstance(val, torch.Tensor):
        return "a tensor"
    return f"{source} ({str(val.dtype).removeprefix('torch.')}{list(val.shape)})"


# --- decompositions ---------------------------------------------------------------------------------------------------


def _batch_norm_out(*args: Any, out: Any, save_mean: Any, save_invstd: Any) -> tuple[Any, Any, Any]:
    for buffer, value in zip((out, save_mean, save_invstd), native_batch_norm(*args), strict=True):
        buffer.copy_(value)
    return out, save_mean, save_invstd


def _as_strided_copy(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    return x.as_strided(size, stride, storage_offset).clone()


def _as_strided_scatter(x: Any, src: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    out = x.clone()
    out.as_strided(size, stride, storage_offset).copy_(src)
    return out


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_batch_norm.out: _batch_norm_out,
    torch.ops.aten.as_strided_copy.default: _as_strided_copy,
    torch.ops.aten.as_strided_scatter.default: _as_strided_scatter,
    **DECOMPOSITIONS,
    **RULES_DECOMPOSITIONS,
}
