"""Finds the inputs whose memory the backward pass reads: no write may come between a call and its backward pass."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import fx

from shardlib.core.aten.op_traits import is_view
from shardlib.core.aten.schemas import get_argument
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of

# In training batch normalization only writes to these; torch's formula for its gradient has them all the same.
_STATISTICS = {"running_mean", "running_var"}
_ARGUMENTS = {*_STATISTICS, "train"}


def find_saved_inputs(graph: fx.Graph, leaves: Sequence[int], gradients: int) -> tuple[int, ...]:
    """Returns the leaves whose memory the backward pass reads, directly or through views. Torch saves the same ones.

    `leaves` are those of the graph's inputs (-1: a cotangent), and the last `gradients` results are gradients. An op is
    in the backward pass if it depends on a cotangent, or if autograd computes it for no result of the call.
    """
    results: Any = graph.output_node().args[0]
    own = _needed(results[:-gradients])
    memory: dict[fx.Node, int] = {}
    late: set[fx.Node] = set()
    read: set[int] = set()
    inputs = iter(leaves)
    for node in graph.nodes:
        if node.op == "placeholder":
            leaf = next(inputs)
            if leaf < 0:
                late.add(node)
            else:
                memory[node] = leaf
        elif node.op == "call_function":
            first = node.args[0] if node.args else None
            if first in memory and (node.target is operator.getitem or is_view(node.target)):
                memory[node] = memory[first]
                continue
            if not late.isdisjoint(node.all_input_nodes):
                late.add(node)
            if node in late or (node.meta.get("backward") and node not in own):
                read |= {memory[x] for x in _values(node) if x in memory}
    return tuple(sorted(read))


def _needed(results: Sequence[Any]) -> set[fx.Node]:
    """Returns all nodes that these depend on, and these."""
    needed: set[fx.Node] = set()
    open_ = [x for x in results if isinstance(x, fx.Node)]
    while open_:
        if (node := open_.pop()) not in needed:
            needed.add(node)
            open_ += node.all_input_nodes
    return needed


def _values(node: fx.Node) -> list[fx.Node]:
    names = _names(node.target) & _ARGUMENTS
    if not names & _STATISTICS or ("train" in names and not get_argument(node, "train")):
        return node.all_input_nodes
    unread = [get_argument(node, name) for name in names & _STATISTICS]
    return [x for x in node.all_input_nodes if all(x is not y for y in unread)]


@cache
def _names(target: Any) -> frozenset[str]:
    return frozenset(a.name for a in schema_of(target).arguments) if isinstance(target, OpOverload) else frozenset()
