"""Finds messages that arithmetic hides: weights gathered ahead of their readers, gradients reduced later.

No op waits for these if there is enough arithmetic in front of the reader, or behind the gradient's producer. If
devices compute while they communicate, a program takes its arithmetic, its exposed messages, and the part of the hidden
messages that takes longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.graph.regather import origin
from shardlib.compiler.propagate.solver.problem import estimate_work
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.reshard import Prices


def find_hidden_values(graph: Graph, mesh: Mesh) -> frozenset[Value]:
    """Returns the values whose messages arithmetic may hide.

    These are inputs that every pass gathers again (`regather`), and their gradients; with a named machine, all inputs.
    """
    prices = Prices.for_mesh(mesh)
    ahead = {v for v in graph.values() if _is_input(v) and (v.again or mesh.machine is not None)}
    if not ahead or not prices.machine.device.overlaps:
        return frozenset()
    begins, now = dict[Op, float](), 0.0
    for op in graph.ops:
        begins[op] = now
        if op.rule is not None and not (op.constant or op.transparent):
            now += estimate_work(op, prices) * op.times / mesh.size
    return frozenset((*_ahead(ahead, begins, prices), *_behind(graph, begins, now, prices)))


def _is_input(value: Value) -> bool:
    return not value.constant and origin(value).op is None


def _ahead(values: Collection[Value], begins: dict[Op, float], prices: Prices) -> Iterator[Value]:
    """Yields the values whose bytes take no longer than the arithmetic in front of their first reader."""
    for value in values:
        first = min((begins[op] for op, _ in value.readers), default=0.0)
        if value.nbytes / prices.fastest <= first:
            yield value


def _behind(graph: Graph, begins: dict[Op, float], end: float, prices: Prices) -> Iterator[Value]:
    """Yields the gradients that no op of the backward pass reads, and that take no longer than the rest of this pass.

    Ops by element may lie between a gradient and the end of the pass.
    """
    over = max((begins[op] for op in graph.ops if op.backward), default=end)
    late: set[Value] = set()
    for op in reversed(graph.ops):
        for value in op.results:
            if value is None or value.constant or not op.backward:
                continue
            if all(not reader.backward or _passes(reader, late) for reader, _ in value.readers):
                late.add(value)
                if value.nbytes / prices.fastest <= over - begins[op]:
                    yield value


def _passes(op: Op, late: Collection[Value]) -> bool:
    """Returns whether an op works by element, and all its results are gradients that are read late."""
    by_element = torch.Tag.pointwise in getattr(op.target, "tags", ()) or op.transparent
    return by_element and all(r in late for r in op.results)
