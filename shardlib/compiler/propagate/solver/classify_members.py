"""Classifies members of units: equal ones decide alike, however many there are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.decision_units import DecisionUnit
from shardlib.compiler.propagate.solver.value_records import UnitClass

Member = Op | Value


def classify_members(
    units: Mapping[Member, DecisionUnit], unit_classes: Mapping[DecisionUnit, UnitClass], looks: Mapping[Member, int]
) -> dict[Member, object]:
    """Returns each member's place in its unit; members with equal places decide alike.

    Units of one class have their members in the same order, so the n-th members of all of them are alike. A unit that
    goes through all layers has the same ops over and over: its members are alike if they look the same.
    """
    members: dict[DecisionUnit, list[Member]] = defaultdict(list)
    for member, unit in units.items():
        members[unit].append(member)
    count = Counter(unit_classes.values())
    places: dict[Member, object] = {}
    shapes: dict[UnitClass, object] = {}
    for unit, mine in members.items():
        unit_class = unit_classes.get(unit)
        shape = [m.target if isinstance(m, Op) else None for m in mine]
        if len(mine) == 1 or unit_class is None:
            places |= dict.fromkeys(mine, (unit_class, 0))
        elif shapes.setdefault(unit_class, shape) == shape and count[unit_class] > 1:
            places |= {member: (unit_class, i) for i, member in enumerate(mine)}
        else:
            places |= {member: (unit, looks[member]) for member in mine}
    return places


def color_members(graph: Graph, rounds: int) -> dict[Member, int]:
    """Numbers every op and value by itself and its neighbors within `rounds` steps: color refinement."""
    around: dict[Member, tuple[Sequence[Member], Sequence[Member]]] = {}
    own: dict[Member, object] = {}
    for value in graph.values():
        around[value] = [value.op] if value.op else (), [op for op, _ in value.readers]
        own[value] = value.shape, value.dtype
    for op in graph.ops:
        around[op] = op.operands, [v for v in op.results if v is not None]
        own[op] = op.target, op.line and op.line.untagged, op.backward
    number = {member: i for i, member in enumerate(own)}
    neighbors = [([number[y] for y in around[x][0]], [number[y] for y in around[x][1]]) for x in own]
    colors: dict[object, int] = {}
    looks = [colors.setdefault(y, len(colors)) for y in own.values()]
    for _ in range(rounds):
        before, colors = len(colors), {}
        color_of, number_of = looks.__getitem__, colors.setdefault
        looks = [
            number_of((mine, tuple(map(color_of, to)), tuple(sorted(map(color_of, fro)))), len(colors))
            for mine, (to, fro) in zip(looks, neighbors, strict=True)
        ]
        if len(colors) == before:  # another round would change nothing
            break
    return dict(zip(own, looks, strict=True))
