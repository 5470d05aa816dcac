"""Marks inputs that the backward pass gathers again, rather than keeping them gathered from the forward pass on."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Literal, get_args

import torch

from shardlib.compiler.graph.ir import Graph, Op, Value, viewed
from shardlib.core.aten.op_traits import is_view

Regather = Literal["auto", "always", "never"]
WAYS: tuple[str, ...] = get_args(Regather)


def mark_regathered(graph: Graph, way: Regather, annotated: Collection[Value]) -> None:
    """Marks such inputs with their views and casts: all, none, or (auto) the `annotated` and those of checkpoints."""
    if way == "never" or not any(op.backward for op in graph.ops):
        return
    again = set(graph.inputs) if way == "always" else {*annotated, *_read_twice(graph)}
    for value in graph.values() if again else ():
        value.again = not value.constant and origin(value) in again


def origin(value: Value) -> Value:
    """Returns the value behind views, slices, casts and pointwise ops of one operand, which are cheap to repeat."""
    while (op := value.op) is not None and len(op.operands) == 1 and not op.constrains and not op.manual:
        (operand,) = op.operands
        tags = getattr(op.target, "tags", ())
        is_cast = operand.shape == value.shape and operand.dtype != value.dtype and value.dtype.is_floating_point
        by_element = is_cast or torch.Tag.pointwise in tags
        if torch.Tag.nondeterministic_seeded in tags or not (by_element or is_view(op.target)):
            break
        value = operand
    return value


def _read_twice(graph: Graph) -> Iterator[Value]:
    """Yields the inputs of ops that the backward pass repeats, as checkpoints do.

    The last op inside a checkpoint is not repeated, but its operands are recomputed, so its inputs count, too.
    """
    forward: dict[Hashable, Op] = {}
    first: dict[Value, Value] = {}
    for op in graph.ops:
        operands = tuple(first.get(x, x) for x in op.operands)
        key = op.call.key, operands
        if not op.backward:
            forward.setdefault(key, op)
        elif (before := forward.get(key)) is not None:
            first |= {x: y for x, y in zip(op.results, before.results, strict=True) if x is not None and y is not None}
    twice = {x for x in first.values() if x.op is not None and not x.op.transparent and not x.constant}
    for op in forward.values() if twice else ():
        if any(x is not None and viewed(x) in twice for x in (*op.operands, *op.results)):
            yield from (x for x in map(origin, op.operands) if x.op is None)
