"""A second look: ops of one unit may part where their neighbours differ.

Units make the search small, but a unit whose one end is wanted whole and whose other end is wanted in pieces has to do
with one choice. So every op starts again from its unit's choice, alone; what then improves the estimate stays, and ops
of a unit that still agree stay together.
"""

from __future__ import annotations

from collections import defaultdict

from shardlib.graph import Graph, Op, Value
from shardlib.meshes.mesh import Mesh
from shardlib.propagate.decide import Decider
from shardlib.propagate.estimate import Order
from shardlib.propagate.flood import Flood
from shardlib.propagate.units import Unit

_WORTH = 1e-3  # the share of the estimated time for which units are taken apart


def refine(graph: Graph, flood: Flood, mesh: Mesh, decider: Decider) -> Decider:
    """`decider`, or a better one whose units are parts of its units."""
    if not decider.contested:
        return decider
    place = _places(decider)
    apart = decider.units.apart(lambda member: place[member])
    whole = {member: unit for unit, members in _members(decider).items() for member in members}
    fine = Decider(graph, flood, apart, mesh, lambda unit: decider.order(whole[_first(unit)]))
    if fine.seconds > decider.seconds * (1 - _WORTH):
        return decider

    def choice(member: Op | Value) -> Order:
        return fine.order(apart.unit[member])

    parts = decider.units.apart(lambda member: (decider.problem.kind[whole[member]], choice(member)))
    return Decider(graph, flood, parts, mesh, lambda unit: choice(_first(unit)))


def _first(unit: Unit) -> Op | Value:
    return unit.ops[0] if unit.ops else unit.values[0]


def _members(decider: Decider) -> dict[Unit, list[Op | Value]]:
    """The members of every unit that has something to decide, in program order."""
    members: dict[Unit, list[Op | Value]] = defaultdict(list)
    for member, unit in decider.units.unit.items():
        if unit in decider.problem.kind:
            members[unit].append(member)
    return members


def _places(decider: Decider) -> dict[Op | Value, object]:
    """For every member, which of its unit's members it is: layers that are alike decide alike."""
    places: dict[Op | Value, object] = {}
    shapes: dict[int, object] = {}
    for unit, members in _members(decider).items():
        kind = decider.problem.kind[unit]
        shape = [m.target if isinstance(m, Op) else None for m in members]
        alike = shapes.setdefault(kind, shape) == shape
        for i, member in enumerate(members):
            places[member] = (kind, i) if alike else (unit, i)
    return places
