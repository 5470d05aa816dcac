"""Compares two traces: if they give one program, the decisions about one hold for the other.

A function that is traced again, because of a setting that its first call makes or an object that was recreated, often
has the same graph.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardlib.compiler.graph.ir import Graph
from shardlib.compiler.program.steps import Var
from shardlib.core.torch_internals.strided_only import as_bytes
from shardlib.frontend.guards.value_kinds import PLAIN
from shardlib.frontend.side_effects.mutation_outputs import is_value
from shardlib.frontend.traced_graph import TracedFunction
from shardlib.sharding.placement import FixedLayout

FixedAt = Mapping[int, FixedLayout]  # by position


def is_same_program(
    a: TracedFunction, b: TracedFunction, graphs: tuple[Graph, Graph], inputs: tuple[FixedAt, FixedAt]
) -> bool:
    """True if two simplified traces, with their graphs and fixed inputs, give one program.

    They may differ in the objects that a call reads and writes.
    """
    return (
        inputs[0] == inputs[1]
        and _facts(a) == _facts(b)
        and [v.again for v in graphs[0].values()] == [v.again for v in graphs[1].values()]
        and _is_same_graph(a.graph, b.graph)
    )


def is_placed_alike(after: FixedAt, before: FixedAt, outputs: Sequence[Any]) -> bool:
    """True if the outputs of a program that was compiled with layouts `before` satisfy the layouts `after`.

    An output that was free before may happen to have the layout that is now fixed.
    """
    for i in after.keys() | before.keys():
        now, var = after.get(i), outputs[i]
        if now == before.get(i):
            continue
        if now is None or i in before or now.spec is not None or any(now.open):
            return False
        if not isinstance(var, Var) or var.layout != now.layout or var.host:
            return False
    return True


def _facts(x: TracedFunction) -> tuple[Any, ...]:
    """Returns everything that stages read of a trace but its graph; leaves of the call become input positions."""
    after, at = x.after, {leaf: i for i, leaf in enumerate(x.input_leaves) if leaf >= 0}
    written = after.grads, after.written, after.data, after.gradients
    pairs = [[(at.get(leaf), i) for leaf, i in outputs] for outputs in written]
    takes = [(at.get(leaf), kind, at.get(other)) for leaf, kind, other in after.takes]
    back = after.cotangents, after.within, after.reached, after.leaves, after.refused
    inputs = x.name, x.input_names, x.input_paths, [leaf < 0 for leaf in x.input_leaves], x.static
    return *inputs, x.result_names, x.strides, x.same, pairs, takes, back


def _is_same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    if len(a.graph.nodes) != len(b.graph.nodes):
        return False
    for x, y in zip(a.graph.nodes, b.graph.nodes, strict=True):
        if x.op == "output" and not _are_results(x.args, y.args):
            return False
        if (x.op, x.name) != (y.op, y.name) or not _is_like((x.args, dict(x.kwargs)), (y.args, dict(y.kwargs))):
            return False
        if x.op == "get_attr":
            if not _is_same_constant(*(operator.attrgetter(str(node.target))(gm) for node, gm in ((x, a), (y, b)))):
                return False
        elif x.target != y.target:
            return False
        if not _is_like(*({k: z for k, z in node.meta.items() if k not in _NOTES} for node in (x, y))):
            return False
    return True


def _are_results(a: Any, b: Any) -> bool:
    """True if results that are no tensors are equal; other objects must be identical."""
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(_are_results, a, b))
    return a is b or isinstance(a, fx.Node | torch.Tensor) or (type(a) is type(b) and (type(a) in PLAIN or is_value(a)))


def _is_same_constant(a: Any, b: Any) -> bool:
    if a is b:
        return True
    plain = type(a) is torch.Tensor and type(b) is torch.Tensor and not a.is_meta and a.numel() <= _LARGE
    return plain and _form(a) == _form(b) and torch.equal(as_bytes(a), as_bytes(b))  # -0.0 is another zero


def _is_like(a: Any, b: Any) -> bool:
    """True if two arguments, or notes on nodes, are equal; nodes are compared by name, tensors by form."""
    kind = type(a)
    if kind is not type(b):
        return False
    if isinstance(a, fx.Node):
        return bool(a.name == b.name)
    if isinstance(a, torch.Tensor):
        return _form(a) == _form(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_like(x, b[k]) for k, x in a.items())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_is_like, a, b))
    if isinstance(a, slice):
        return _is_like((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return repr(a) == repr(b) if kind is float or kind is complex else bool(a == b)


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


_NOTES = frozenset({"eager_input_vals", "tensor_meta"})  # torch's own, which no stage reads
_LARGE = 1 << 20  # elements of a constant; larger ones are not compared
