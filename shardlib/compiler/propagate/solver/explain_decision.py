"""Explains why a unit takes a mesh axis in one of its dims: the estimated seconds of every alternative."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.solver.domains import SlotAxes, Variable
from shardlib.compiler.propagate.solver.estimate import Choices
from shardlib.compiler.propagate.solver.problem import Choice, slot_index
from shardlib.compiler.propagate.solver.search import TIE, Search
from shardlib.compiler.propagate.solver.value_records import UnitClass


@dataclass(frozen=True)
class Decision:
    """Why a unit class gives `axis` to `winner`: estimated seconds of all that it touches for every alternative."""

    axis: str
    winner: str
    alternatives: tuple[tuple[str, float, Choice], ...]  # the sharded dim, seconds, the first slot
    units: int

    def __str__(self) -> str:
        others = ", ".join(f"{name}: {s * 1e6:.1f} us" for name, s, _ in self.alternatives)
        return f"{self.axis} -> {self.winner} ({others}; {self.units} alike)"


def explain_decision(search: Search, member: Op | Value, name: str) -> Decision | None:
    """Returns why the unit of a member uses, or does not use, mesh axis `name`; None if it has no choice."""
    variable = _variable(search, member)
    if variable is None or not search.candidates(variable[0], name):
        return None
    unit_class, a = variable[0], search.problem.mesh.axis_names.index(name)
    rows = tuple(
        (takers, search.estimate.cost(variable, choices, search.weights), first)
        for takers, first, choices in _options(search, variable, name)
    )
    winner = _takers(search, unit_class, name, search.choices[unit_class][a], search.slot_axes(member))
    return Decision(name, winner, rows, search.problem.alike[unit_class])


def sent_bytes(search: Search, member: Op | Value, name: str) -> tuple[float, ...]:
    """Returns the bytes that a device sends for the unit class of a member, for each alternative of its decision."""
    variable = _variable(search, member)
    if variable is None:
        return ()
    return tuple(search.counting.messages(variable, choices) for _, _, choices in _options(search, variable, name))


def _options(search: Search, variable: Variable, name: str) -> Iterator[tuple[str, Choice, Choices]]:
    """Yields the dims that an alternative shards, its first slot, and all choices with it; other axes stay."""
    unit_class, a = variable[0], search.problem.mesh.axis_names.index(name)
    seen: set[SlotAxes] = set()
    for alternative in _alternatives(search, unit_class, name):
        choices = list(search.choices)
        for k in variable:
            choices[k] = (*choices[k][:a], alternative, *choices[k][a + 1 :])
        axes = search.estimate.slot_axes(unit_class, choices[unit_class])
        if axes not in seen:
            seen.add(axes)
            yield (
                _takers(search, unit_class, name, alternative, axes), tuple(map(slot_index, alternative[:1])), choices
            )  # fmt: skip


def near_tie(search: Search, member: Op | Value, name: str) -> tuple[str, float] | None:
    """Returns the best other dim that mesh axis `name` could shard in the unit of a member, with the program's seconds.

    All other units decide anew. None if the program would take markedly longer.
    """
    variable, a = _variable(search, member), search.problem.mesh.axis_names.index(name)
    if variable is None:
        return None
    unit_class, mine, limit = variable[0], search.choices, search.seconds * TIE
    winner = _takers(search, unit_class, name, mine[unit_class][a], search.slot_axes(member))
    others = search.domains(v for v in search.variables() if v != variable)
    seconds_of: dict[str, float] = {}
    for choice in search.domain(variable).orders:
        takers = _takers(search, unit_class, name, choice[a], search.estimate.slot_axes(unit_class, choice))
        rest = (*choice[:a], *choice[a + 1 :]) == (*mine[unit_class][:a], *mine[unit_class][a + 1 :])
        if rest and takers != winner:
            search.choices = [choice if k in variable else now for k, now in enumerate(mine)]
            search.improve(others)
            seconds_of[takers] = min(search.seconds, seconds_of.get(takers, math.inf))
            search.choices = mine
    near = [(seconds, takers) for takers, seconds in seconds_of.items() if seconds <= limit]
    return (min(near)[1], min(near)[0]) if near else None


def _variable(search: Search, member: Op | Value) -> Variable | None:
    """Returns the unit classes that choose together with a member's class."""
    unit_class = search.problem.class_of.get(search.problem.units.unit[member])
    return None if unit_class is None else next(v for v in search.variables() if unit_class in v)


def _alternatives(search: Search, unit_class: UnitClass, name: str) -> list[Choice]:
    """Returns choices with every slot first, and the unused axis; for attention, with every two slots first."""
    slots = search.candidates(unit_class, name)
    if search.problem.members[unit_class][0].alone:
        orders = [(i, j, *(k for k in slots if k not in (i, j))) for i, j in itertools.permutations(slots, 2)]
        return orders or [tuple(slots)]
    return [*((i, *(j for j in slots if j != i)) for i in slots), ()]


def _takers(search: Search, unit_class: UnitClass, name: str, choice: Choice, axes: Sequence[Sequence[object]]) -> str:
    """Names the dims that the axis shards: the first slot; for attention, all slots that get a part of it."""
    problem = search.problem
    leaders, unit = problem.leaders[unit_class], problem.members[unit_class][0]
    slots = tuple(map(slot_index, choice))
    atoms = problem.atoms[name]
    takers = tuple(i for i in slots if any(a in atoms for a in axes[i])) if unit.alone else slots[:1]
    names = []
    for slot in takers:
        if slot in unit.follows:
            names.append(_role_name(search, unit_class, leaders[slot]))
        elif slot in leaders:
            around = _role_name(search, unit_class, slot)
            names.append(f"{_role_name(search, unit_class, leaders[slot])}, with {around} passed round")
        elif all(leaders.get(i) != slot for i in takers):
            names.append(_role_name(search, unit_class, slot))
    return " and ".join(names) or "nothing"


def _role_name(search: Search, unit_class: UnitClass, slot: int) -> str:
    role = search.problem.slots[unit_class][slot]
    return role.name or f"a dim of {role.size}"
