"""Messages that arithmetic hides: weights that are gathered ahead of who reads them, gradients that are reduced behind.

Nobody waits for these, as long as there is enough arithmetic in front of a reader, or behind what made a sum. On a
machine whose devices compute while messages fly, they cost what is left of them: a program takes its arithmetic, what
is waited for, and of all other messages those that take longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.graph.regather import origin
from shardlib.compiler.propagate.solver.problem import work
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.reshard import Prices


def hidden(graph: Graph, mesh: Mesh) -> frozenset[Value]:
    """The values whose messages arithmetic may hide: of inputs that are gathered for every pass anew (`regather`), and
    of their gradients; where the mesh names a machine, of all inputs."""
    prices = Prices.for_mesh(mesh)
    ahead = {v for v in graph.values() if _is_given(v) and (v.again or mesh.machine is not None)}
    if not ahead or not prices.machine.device.overlaps:
        return frozenset()
    begins, now = dict[Op, float](), 0.0
    for op in graph.ops:
        begins[op] = now
        if op.rule is not None and not (op.constant or op.transparent):
            now += work(op, prices) * op.times / mesh.size
    return frozenset((*_ahead(ahead, begins, prices), *_behind(graph, begins, now, prices)))


def _is_given(value: Value) -> bool:
    return not value.constant and origin(value).op is None


def _ahead(values: Collection[Value], begins: dict[Op, float], prices: Prices) -> Iterator[Value]:
    """Yields the values whose bytes take no longer than the arithmetic in front of their first reader."""
    for value in values:
        first = min((begins[op] for op, _ in value.readers), default=0.0)
        if value.nbytes / prices.fastest <= first:
            yield value


def _behind(graph: Graph, begins: dict[Op, float], end: float, prices: Prices) -> Iterator[Value]:
    """The gradients that nobody reads before the backward pass is over, whose bytes take no longer than what is left of
    it; element by element they may become others."""
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
    """Returns whether an op makes of each element one of a gradient that nobody reads before the backward pass is
    over."""
    by_element = torch.Tag.pointwise in getattr(op.target, "tags", ()) or op.transparent
    return by_element and all(r in late for r in op.results)
