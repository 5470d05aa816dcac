"""Adapts the tracer of `make_fx`: every node gets the user's line, and the graph the user's names."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardlib.core.context import is_tracing
from shardlib.core.source_lines import Line, LineRecorder, is_mark, modules
from shardlib.core.torch_internals.private_names import Slot
from shardlib.core.torch_internals.strided_only import is_strided, refuse_unstrided
from shardlib.core.torch_internals.torch_private import (
    FX_IS_TRACING,
    FX_TRACE,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    pytree,
    rename,
    schema_of,
)
from shardlib.frontend.guards.number_inputs import to_scalar
from shardlib.frontend.hazards.collectives import refuse_collective
from shardlib.frontend.hazards.constant_values import answer_query, find_examples
from shardlib.frontend.hazards.unsupported import refuse_ghost, refuse_unseen
from shardlib.frontend.op_meta_cache import OpMetaCache

_DEVICE = torch.ops.prim.device.default
_ZERO_TENSOR = torch.ops.aten._efficientzerotensor.default
_CALL = Slot("torch.nn.Module.__call__")
_call, _trace_of_fx = _CALL.value, FX_TRACE.value


@contextmanager
def intercept_module_calls() -> Iterator[None]:
    """Shows calls of modules to `make_fx`, and nothing else of them, inside the context.

    Torch also replaces `__getattr__` of modules, for tracers that record parameters, and looks for functions to wrap.
    Each such change goes through all classes of modules in the process.
    """

    def trace(tracer: Any, root: Any, concrete_args: Any = None) -> fx.Graph:
        if not is_tracing() or not isinstance(root, types.FunctionType):
            fx_graph: fx.Graph = _trace_of_fx(tracer, root, concrete_args)
            return fx_graph
        tracer.root, tracer.graph, tracer.tensor_attrs = torch.nn.Module(), fx.Graph(tracer_cls=type(tracer)), {}

        @functools.wraps(_call)
        def call(m: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return tracer.call_module(m, functools.partial(_call, m), args, kwargs)

        run, args = tracer.create_args_for_root(root, False, concrete_args)
        with FX_IS_TRACING.holding(True), _CALL.holding(call):
            tracer.create_node("output", "output", (tracer.create_arg(run(*args)),), {})
        tracer.submodule_paths = None
        graph: fx.Graph = tracer.graph
        return graph

    with FX_TRACE.holding(trace):
        yield


def instrument_tracer(lines: LineRecorder, inputs: Sequence[tuple[torch.Tensor, Any]] = ()) -> Any:
    """Returns the running tracer, changed to give every node a line, and to bypass function modes.

    `inputs` are stand-ins with the caller's arguments, whose values may answer a query. Function modes stay on in
    autograd's engine, and would otherwise see all that the tracer reads of tensors.
    """
    mode: Any = get_proxy_mode()
    assert mode is not None, "make_fx runs the function under its proxy mode"
    tracer: Any = mode.tracer

    def write(target: Any, args: Any, kwargs: Any, name: str | None = None) -> fx.Node:
        """Creates a node directly: the classes of tracers would collect facts that only Inductor reads."""
        node: fx.Node = tracer.graph.create_node("call_function", target, args, kwargs, name)
        lines.record(node)
        return node

    dispatch, repeated = mode.__torch_dispatch__, OpMetaCache(tracer, write)
    tracer.examples = find_examples(inputs)

    def dispatch_unseen(mode: Any, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # the engine asks for it at every turn
        if getattr(op, "namespace", "") == "c10d":
            refuse_collective(str(op), sys._getframe(1))
        with torch.DisableTorchFunction():
            if (value := answer_query(op, args, tracer)) is not None:
                return value
            return repeated(op, args, kwargs or {}, lambda: dispatch(op, kinds, args, kwargs or {}))

    mode.__torch_dispatch__ = types.MethodType(dispatch_unseen, mode)
    create = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = create(*args, **kwargs)
        lines.record(node)
        return node

    tracer.create_node = create_node
    tracer.call_module = call_in_module
    # Torch would search the graph for unread symbolic sizes: here all sizes are numbers.
    tracer.graph.eliminate_dead_code = lambda *args, **kwargs: False
    return tracer


def release_constants(tracer: Any) -> None:
    """Drops a finished tracer's references to constants; the graph module keeps those that it reads.

    A tracer is part of a reference cycle, so it would keep them until garbage is collected.
    """
    tracer.root, tracer.tensor_attrs, tracer.examples = torch.nn.Module(), {}, ()


def call_in_module(m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a module, whose nodes get its path."""
    token = modules.set(modules.get().entered(m))
    try:
        return forward(*args, **kwargs)
    finally:
        modules.reset(token)


def call_in_own_module(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function; nodes of a module's method get paths that begin at that module."""
    method = inspect.unwrap(fn, stop=inspect.ismethod)
    module = method.__self__ if inspect.ismethod(method) else None
    return call_in_module(module, fn, args, kwargs) if isinstance(module, torch.nn.Module) else fn(*args, **kwargs)


def finish_graph(
    gm: fx.GraphModule,
    names: Sequence[str],
    leaves: Sequence[Any],
    line: Line,
    mode: FakeTensorMode,
    *,
    differentiable: bool,
) -> None:
    """Names the inputs as the user does, adds constant outputs, and gives a line to nodes without one."""
    graph = gm.graph
    vars(graph).pop("eliminate_dead_code", None)
    for mark in reversed([n for n in graph.nodes if is_mark(n)]):
        graph.erase_node(mark)  # their names are in the lines of the nodes between them
    for node in reversed([n for n in graph.nodes if "val" not in n.meta and not n.users]):
        if isinstance(node.target, OpOverload) and schema_of(node.target).returns:
            graph.erase_node(node)  # torch refused the call, and the user's code caught the error
    _move_inputs_first(graph)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders, names, strict=True):
        rename(node, re.sub(r"\W+", "_", name).strip("_") or "x")
    output = graph.output_node()
    returned = iter(output.args[0])  # type: ignore[arg-type]
    output.args = (tuple(next(returned) if isinstance(x, torch.Tensor) else to_scalar(x) for x in leaves),)
    values = [(n, x) for n in graph.nodes for x in _values(n)]
    if not all(map(is_strided, {id(x): x for _, x in values}.values())):  # equal nodes share one value
        refuse_unstrided("the traced function", ((f"the result of {n.target}", x) for n, x in values))
    for node in graph.nodes:
        node.meta.setdefault("line", line)
        node.meta.setdefault("val", None)  # a gradient that is not requested
        if node.target is torch.ops.aten._to_copy.default and not isinstance(node.args[0], fx.Node):
            value = node.meta["val"]  # under vmap, a Python number that meets a tensor changes its dtype alone
            node.target = torch.ops.aten.scalar_tensor.default
            node.kwargs = {"dtype": value.dtype, "device": value.device}
        if node.target is _ZERO_TENSOR:  # zeros of a program have memory
            node.target = torch.ops.aten.zeros.default
        if node.op == "get_attr":
            constant = operator.attrgetter(str(node.target))(gm)
            if isinstance(constant, FakeTensor):
                refuse_ghost(constant, node.meta["line"], mode)
            if constant.requires_grad and differentiable and torch.is_grad_enabled():
                refuse_unseen(constant, node.meta["line"])
            if node.meta.get("val") is None:
                node.meta["val"] = mode.from_tensor(constant)


def _move_inputs_first(graph: fx.Graph) -> None:
    """Moves inputs that were found while the function ran in front of all ops."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        first.prepend(node)


def _values(node: fx.Node) -> list[torch.Tensor]:
    val = node.meta.get("val") if node.op == "call_function" else None
    return [x for x in pytree.tree_leaves(val) if isinstance(x, torch.Tensor)]
