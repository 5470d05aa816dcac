"""A second look: ops of one unit may part where their neighbours differ.

Units make the search small, but a unit whose one end is wanted whole and whose other end is wanted in pieces has to do
with one choice. So every op starts again from its unit's choice, alone; what then improves the estimate stays, and ops
of a unit that still agree stay together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.decision_units import Unit
from shardlib.compiler.propagate.propagation import Flood
from shardlib.compiler.propagate.solver.cost import Order
from shardlib.compiler.propagate.solver.search import Decider
from shardlib.sharding.mesh.mesh import Mesh

DEEP = 128  # ops: in larger programs it is not asked what else would send less, which takes as long as all else
_DEAREST = 12.0  # times what bytes take may be lost where ops part to spare them
_AROUND = 6  # steps, from ops to values and from values to ops
_WORTH = 1e-3  # the share of the estimated time for which units are taken apart, unless less is sent


def refine(graph: Graph, flood: Flood, mesh: Mesh, decider: Decider) -> Decider:
    """`decider`, or a better one whose units are parts of its units."""
    if not (decider.contested or decider.offered or decider.grouping or flood.turned):
        return decider
    fine = alone(graph, flood, mesh, decider)
    (work, sent), (fine_work, fine_sent) = (d.estimate.parts(d.choices) for d in (decider, fine))
    slower = fine_work + fine_sent - work - sent
    if slower > 0 or (fine_sent >= sent and slower > -_WORTH * decider.seconds):
        return decider

    return _together(graph, flood, mesh, decider, fine)


def spared(graph: Graph, flood: Flood, mesh: Mesh, decider: Decider) -> Decider:
    """`decider`, or one that sends fewer bytes and takes hardly longer, with units that are parts of its units."""
    limit = decider.limit
    decider.spare(limit)
    fine = alone(graph, flood, mesh, decider, improve=False) if graph.size <= DEEP else decider
    if fine is decider:
        return decider
    fine.spare(limit, _DEAREST)
    (work, sent), (fine_work, fine_sent) = (d.estimate.parts(d.choices) for d in (decider, fine))
    fewer = fine_sent < sent and fine_work <= work  # nothing is done twice for it
    return _together(graph, flood, mesh, decider, fine) if fewer else decider


def _together(graph: Graph, flood: Flood, mesh: Mesh, decider: Decider, fine: Decider) -> Decider:
    """The choices of `fine`, in units of `decider` apart where they differ."""

    def choice(member: Op | Value) -> Order:
        return fine.order(fine.units.unit[member])

    whole = decider.units.unit
    parts = decider.units.apart(lambda member: (decider.problem.kind[whole[member]], choice(member)))
    return Decider(graph, flood, parts, mesh, lambda unit: choice(_first(unit)), improve=False)


def alone(graph: Graph, flood: Flood, mesh: Mesh, decider: Decider, *, improve: bool = True) -> Decider:
    """Every op decides alone, or with those that are alike: what improves from where `decider` is."""
    if not (decider.contested or decider.offered or flood.turned):
        return decider
    place, whole = _places(decider, graph), decider.units.unit
    apart = decider.units.apart(lambda member: place[member])
    return Decider(graph, flood, apart, mesh, lambda unit: decider.order(whole[_first(unit)]), improve=improve)


def _first(unit: Unit) -> Op | Value:
    return unit.ops[0] if unit.ops else unit.values[0]


def _members(decider: Decider) -> dict[Unit, list[Op | Value]]:
    """The members of every unit that has something to decide, in program order."""
    members: dict[Unit, list[Op | Value]] = defaultdict(list)
    for member, unit in decider.units.unit.items():
        if unit in decider.problem.kind:
            members[unit].append(member)
    return members


def _places(decider: Decider, graph: Graph) -> dict[Op | Value, object]:
    """For every member, which of its unit's members it is: layers that are alike decide alike.

    Where units are, the first of one is the first of the other. A unit that goes through all layers has the same ops
    over and over: those are one whose neighbours look the same, some steps around.
    """
    places: dict[Op | Value, object] = {}
    shapes: dict[int, object] = {}
    looks = _looks(decider, graph)
    for unit, members in _members(decider).items():
        kind = decider.problem.kind[unit]
        shape = [m.target if isinstance(m, Op) else None for m in members]
        alike = shapes.setdefault(kind, shape) == shape and len(decider.problem.members[kind]) > 1
        for i, member in enumerate(members):
            places[member] = (kind, i) if alike else (unit, looks[member])
    return places


def _looks(decider: Decider, graph: Graph) -> dict[Op | Value, int]:
    """What every op and value looks like, with what is around it: colour refinement, for some rounds."""
    around: dict[Op | Value, tuple[Sequence[Op | Value], Sequence[Op | Value]]] = {}
    what: dict[Op | Value, object] = {}
    for value in graph.values():
        around[value] = [value.op] if value.op else (), [op for op, _ in value.readers]
        what[value] = value.shape, value.dtype
    for op in graph.ops:
        around[op] = op.operands, [v for v in op.results if v is not None]
        what[op] = op.target, op.line
    kind = {x: decider.problem.kind.get(unit) for x, unit in decider.units.unit.items()}
    number = {x: i for i, x in enumerate(what)}
    beside = [([number[y] for y in around[x][0]], [number[y] for y in around[x][1]]) for x in what]
    known: dict[object, int] = {}
    looks = [known.setdefault((y, kind.get(x)), len(known)) for x, y in what.items()]
    for _ in range(_AROUND):
        before, known = len(known), {}
        look, colour = looks.__getitem__, known.setdefault
        looks = [
            colour((mine, tuple(map(look, to)), tuple(sorted(map(look, fro)))), len(known))
            for mine, (to, fro) in zip(looks, beside, strict=True)
        ]
        if len(known) == before:  # it stays so
            break
    return dict(zip(what, looks, strict=True))
