"""Values of a trace that depend on no input: whoever asks for one gets it, as each call would make it again.

`nn.Transformer` compares its mask with a causal one, and takes a faster way if they are alike. A mask that the function
makes itself, of sizes alone, is the same in every call, so that its program may be for the answer. A program that only
its reader uses may be for that of the arguments at hand, too (`by_example`).
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
from shardlib.core.torch_private import FakeTensor, OpOverload, pytree, schema_of, without_modes

_EQUAL = torch.ops.aten.equal.default
_ASKS = (torch.ops.aten._local_scalar_dense.default, _EQUAL)
_FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_LARGE = 1 << 26  # elements of what is worked out for an answer
_by_example: ContextVar[bool] = ContextVar("shardlib_by_example", default=False)


@contextmanager
def by_example() -> Iterator[None]:
    """While on, a traced function that asks is told what holds of the arguments that it is traced with."""
    token = _by_example.set(True)
    try:
        yield
    finally:
        _by_example.reset(token)


def examples(inputs: Iterable[tuple[Tensor, Any]]) -> tuple[tuple[Tensor, Tensor], ...]:
    """Of what stands for arguments, and those, what may be looked at: nothing is held for anybody else."""
    if not _by_example.get():
        return ()
    return tuple((x, of) for x, of in inputs if type(of) in (Tensor, Parameter) and of.device.type != "meta")


def answer(op: Any, args: Any, tracer: Any) -> Any:
    """What `op` says of values of no input but the tracer's examples; None where it asks for none, or they do."""
    if op not in _ASKS or not all(type(x) is FakeTensor and has_proxy_slot(x, tracer) for x in args):
        return None
    asked = [get_proxy_slot(x, tracer).proxy.node for x in args]
    with without_modes():
        given = {get_proxy_slot(x, tracer).proxy.node: of.detach() for x, of in tracer.examples}
        values = _replayed(tracer, asked, given)
        return None if values is None else op(*values)


def is_known(x: Tensor) -> bool:
    """Whether whoever asks for the values of a tensor gets them: no trace runs, or it has them."""
    mode: Any = get_proxy_mode()
    return mode is None or answer(_EQUAL, (x, x), mode.tracer) is not None


def _replayed(tracer: Any, asked: list[fx.Node], given: Mapping[fx.Node, Tensor]) -> list[Tensor] | None:
    """The values of nodes, made again by all that they are made of; None if that is an input that is not given, a draw,
    or too large."""
    needed: set[fx.Node] = set()
    todo = list(asked)
    while todo:
        while todo:
            if (node := todo.pop()) not in needed:
                if node not in given and not _is_constant(node):
                    return None
                needed.add(node)
                todo += node.all_input_nodes
        for node in tracer.graph.nodes:  # what shows their memory, and writes to it
            touches = not needed.isdisjoint(_written(node) if _is_quiet(node) else node.all_input_nodes)
            if touches and node not in needed:
                todo.append(node)
    if sum(x.numel() for node in needed for x in traced_values(node)) > _LARGE:
        return None
    known: dict[fx.Node, Any] = {}
    for node in tracer.graph.nodes:
        if node in needed:
            known[node] = given[node].clone() if node in given else _run(tracer, node, known)
    return [known[node] for node in asked]


def _written(node: fx.Node) -> list[fx.Node]:
    """The operands that a node writes to."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return []
    named = zip((a.name for a in schema_of(node.target).arguments), node.args, strict=False)
    operands = {**dict(named), **node.kwargs}
    into = [operands.get(a.name) for a in schema_of(node.target).arguments if a.alias_info and a.alias_info.is_write]
    return [x for x in pytree.tree_leaves(into) if isinstance(x, fx.Node)]


def is_literal(node: fx.Node) -> bool:
    """Whether a `get_attr` is what `torch.tensor` makes, and not a tensor that somebody may write to."""
    return all(user.target in _FRESH for user in node.users)


def _is_constant(node: fx.Node) -> bool:
    """Whether it makes the same of the same operands in every call."""
    if node.op == "get_attr":
        return is_literal(node)
    return node.target is operator.getitem or is_deterministic(node.target)


def _is_of_torch(node: fx.Node) -> bool:
    """Whether its schema says all that it does."""
    named = schema_of(node.target).name if isinstance(node.target, OpOverload) else ""
    return named.startswith(("aten::", "prims::")) or node.target is operator.getitem


def _is_quiet(node: fx.Node) -> bool:
    """Whether its results have memory of their own, and its schema says what it writes."""
    op = node.target
    return isinstance(op, OpOverload) and _is_of_torch(node) and not (is_view(op) or may_return_view(op))


def _run(tracer: Any, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(tracer.root, str(node.target)).clone()
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
    op: Any = node.target
    return op(*args, **kwargs)
