"""Answers queries of values that depend on no input: every call would compute the same ones.

`nn.Transformer` compares its mask with a causal one, and is faster if they are equal. A mask that the function makes
from sizes alone is the same in every call, so the program may rely on the answer. A plan that nothing runs may also
rely on the values of the arguments (`answer_by_example`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, has_proxy_slot
from torch.nn import Parameter

from shardlib.core.aten.op_traits import is_deterministic, is_view, may_return_view
from shardlib.core.aten.schemas import traced_values
from shardlib.core.torch_internals.torch_private import FakeTensor, OpOverload, pytree, schema_of, without_modes

_EQUAL = torch.ops.aten.equal.default
_ASKS = (torch.ops.aten._local_scalar_dense.default, _EQUAL)
_FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_LARGE = 1 << 26  # elements that are computed for an answer
_by_example: ContextVar[bool] = ContextVar("shardlib_by_example", default=False)


@contextmanager
def answer_by_example() -> Iterator[None]:
    """Answers a traced function's queries from the values of its arguments, inside the context."""
    token = _by_example.set(True)
    try:
        yield
    finally:
        _by_example.reset(token)


def find_examples(inputs: Iterable[tuple[Tensor, Any]]) -> tuple[tuple[Tensor, Tensor], ...]:
    """Returns the pairs of stand-in and argument whose values may answer queries; none outside `answer_by_example`."""
    if not _by_example.get():
        return ()
    kinds = (Tensor, Parameter)
    return tuple((x, real) for x, real in inputs if type(real) in kinds and real.device.type != "meta")


def answer_query(op: Any, args: Any, tracer: Any) -> Any:
    """Returns the result of `op` if it reads values that depend on constants and examples alone; else None."""
    if op not in _ASKS or not all(type(x) is FakeTensor and has_proxy_slot(x, tracer) for x in args):
        return None
    nodes = [get_proxy_slot(x, tracer).proxy.node for x in args]
    with without_modes():
        examples = {get_proxy_slot(x, tracer).proxy.node: real.detach() for x, real in tracer.examples}
        values = _replay(tracer, nodes, examples)
        return None if values is None else op(*values)


def has_known_values(x: Tensor) -> bool:
    """Returns whether the values of a tensor can be read: no trace runs, or the trace can compute them."""
    mode: Any = get_proxy_mode()
    return mode is None or answer_query(_EQUAL, (x, x), mode.tracer) is not None


def _replay(tracer: Any, nodes: list[fx.Node], examples: Mapping[fx.Node, Tensor]) -> list[Tensor] | None:
    """Computes the values of nodes; None if they depend on an input without example or on a draw, or are too large."""
    needed: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        while todo:
            if (node := todo.pop()) not in needed:
                if node not in examples and not _is_constant(node):
                    return None
                needed.add(node)
                todo += node.all_input_nodes
        for node in tracer.graph.nodes:  # views of the needed nodes, and writes to them
            touches = not needed.isdisjoint(_written(node) if _is_quiet(node) else node.all_input_nodes)
            if touches and node not in needed:
                todo.append(node)
    if sum(x.numel() for node in needed for x in traced_values(node)) > _LARGE:
        return None
    values: dict[fx.Node, Any] = {}
    for node in tracer.graph.nodes:
        if node in needed:
            values[node] = examples[node].clone() if node in examples else _run(tracer, node, values)
    return [values[node] for node in nodes]


def _written(node: fx.Node) -> list[fx.Node]:
    """Returns the operands that a node writes to."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return []
    named = zip((a.name for a in schema_of(node.target).arguments), node.args, strict=False)
    operands = {**dict(named), **node.kwargs}
    into = [operands.get(a.name) for a in schema_of(node.target).arguments if a.alias_info and a.alias_info.is_write]
    return [x for x in pytree.tree_leaves(into) if isinstance(x, fx.Node)]


def is_literal(node: fx.Node) -> bool:
    """Returns whether a `get_attr` comes from `torch.tensor`; other code may write to other tensors."""
    return all(user.target in _FRESH for user in node.users)


def _is_constant(node: fx.Node) -> bool:
    """Returns whether equal operands give equal results in every call."""
    if node.op == "get_attr":
        return is_literal(node)
    return node.target is operator.getitem or is_deterministic(node.target)


def _is_of_torch(node: fx.Node) -> bool:
    """Returns whether the schema of a node's op describes all its effects."""
    named = schema_of(node.target).name if isinstance(node.target, OpOverload) else ""
    return named.startswith(("aten::", "prims::")) or node.target is operator.getitem


def _is_quiet(node: fx.Node) -> bool:
    """Returns whether a node's results have memory of their own, and its schema describes its writes."""
    op = node.target
    return isinstance(op, OpOverload) and _is_of_torch(node) and not (is_view(op) or may_return_view(op))


def _run(tracer: Any, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(tracer.root, str(node.target)).clone()
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    op: Any = node.target
    return op(*args, **kwargs)
