"""The domains of the search: the ways in which each variable can be sharded."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.propagation import Propagation
from shardlib.compiler.propagate.solver.bucket_elimination import Numbers
from shardlib.compiler.propagate.solver.problem import Choice, Order, Problem, Role, slot_index
from shardlib.compiler.propagate.solver.value_records import UnitClass
from shardlib.sharding.mesh.axis import Axis, group_size

_LISTED, _MANY, _ORDERS = 5_000, 100, 150  # limits on the orders of a unit class's slots

SlotAxes = tuple[tuple[Axis, ...], ...]  # the axes on every slot
Variable = tuple[UnitClass, ...]  # unit classes that take one choice together


@dataclass(frozen=True, eq=False)
class Domain:
    """The choices of a variable."""

    orders: tuple[Order, ...]

    @cached_property
    def places(self) -> Numbers:
        """Returns the numbers of all choices."""
        return np.arange(len(self.orders))

    @cached_property
    def number(self) -> Mapping[Order, int]:
        return {order: n for n, order in enumerate(self.orders)}


Offer = tuple[DimFactor, str]  # a family of factors, and a mesh axis
Offers = frozenset[Offer]


class Domains:
    """The domains of all variables of a problem, by the axes that are offered to dims.

    `contested` are the mesh axes that several dims of a unit request, though only one can take them; `grouping` those
    that shard groups of rows. Uncontested requests are granted; a contested axis may stay unused.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        rivals = {name: self._rivals(name) for name in problem.atoms}
        disputed = {name for name, roles in rivals.items() if roles} | set(_contradicted(problem))
        self.contested = disputed | {a.name for roles in rivals.values() for role in roles for a in role.requests}
        self.grouping = set(_grouping(problem.propagation)) - self.contested
        self._memo: dict[object, Domain] = {}
        self._axes_memo: dict[tuple[UnitClass, Order], SlotAxes] = {}

    def slot_axes(self, unit_class: UnitClass, choice: Order) -> SlotAxes:
        """Returns the axes on every slot of a unit class under a choice, whose entries are in mesh order."""
        key = (unit_class, choice)
        if (memo := self._axes_memo.get(key)) is not None:
            return memo
        roles = self.problem.slots[unit_class]
        axes: list[list[Axis]] = [[] for _ in roles]
        siblings = self.problem.siblings[unit_class]
        for name, order in zip(self.problem.mesh.axis_names, choice, strict=True):
            atoms = self.problem.atoms[name]
            offered = {~slot for slot in order if slot < 0}
            if order and self._takes_minor(roles[slot_index(order[0])], order[0] < 0, atoms):
                atoms = atoms[::-1]
            for atom in atoms:
                for slot in map(slot_index, order):
                    both = {slot, self.problem.leaders[unit_class].get(slot, slot)}
                    fit = {
                        i
                        for i in both | siblings[slot]
                        if (i in offered or atom in roles[i].requests)
                        and roles[i].size >= group_size(axes[i]) * atom.size
                    }
                    if both <= fit:
                        for i in fit:
                            axes[i].append(atom)
                        break
        requested = [role.requests for role in roles]
        result = tuple(
            tuple(sorted(mine, key=lambda a: order.index(a) if a in order else len(order)))
            for order, mine in zip(requested, axes, strict=True)
        )
        self._axes_memo[key] = result
        return result

    @staticmethod
    def _takes_minor(role: Role, offered: bool, atoms: Sequence[Axis]) -> bool:
        """Returns whether a slot without room for all of an axis takes its minor part, for one exchange at a time."""
        alone = offered and role.size < group_size(atoms) and not {*atoms} & {*role.requests}
        return bool({*role.lent} & {*atoms}) or alone

    def candidates(self, unit_class: UnitClass, name: str, offers: Offers) -> list[int]:
        """Returns the slots that may take a mesh axis; ~s for a slot s to which it is offered."""
        problem, dim_factors = self.problem, self.problem.members[unit_class][0].slots
        slots = problem.candidates[unit_class].get(name, [])
        if not offers:
            return slots
        atoms, roles = problem.atoms[name], problem.slots[unit_class]
        able = {s for s, dim_factor in enumerate(dim_factors) if (problem.families[dim_factor], name) in offers}
        able |= {s for s, lender in problem.members[unit_class][0].lends.items() if lender in able}
        offered = [s for s in sorted(able) if not {*atoms} <= {*roles[s].requests}]
        requesting = {*slots, *offered}
        offered = [s for s in offered if problem.leaders[unit_class].get(s, s) in requesting]
        return [*(s for s in slots if s not in offered), *(~s for s in offered)]

    def choices_of(self, variable: Variable, offers: Offers) -> Domain:
        """Returns a choice for each sharding of a variable: some order of its slots on every mesh axis.

        Of an order only those slots count that take a part of the axis, and the first. If there are many orders, only
        those that shard a dim's factors major first are kept, then only their first slots.
        """
        unit_class, problem = variable[0], self.problem
        slots = {name: tuple(self.candidates(unit_class, name, offers)) for name in problem.atoms}
        idle = tuple(all(self._may_idle(k, name, slots[name], offers) for k in variable) for name in problem.atoms)
        key = unit_class, tuple(slots.values()), idle
        if (domain := self._memo.get(key)) is None:
            domain = self._memo[key] = Domain(tuple(self._ways(unit_class, slots, idle)))
        return domain

    def _ways(self, unit_class: UnitClass, slots: Mapping[str, Sequence[int]], idle: Sequence[bool]) -> Iterable[Order]:
        slot_axes = self.slot_axes
        nothing: Order = tuple(() for _ in slots)
        ways: dict[object, Order] = {slot_axes(unit_class, nothing): nothing}
        for a, (name, some) in enumerate(slots.items()):
            longest = min(len(some), len(self.problem.atoms[name]) + 1)
            while longest > 2 and math.perm(len(some), longest) > _LISTED:
                longest -= 1
            heads = [*itertools.permutations(some, longest)]
            if len(ways) * len(heads) > _MANY:
                heads = [head for head in heads if self._one_after_another(unit_class, head)] or heads
            while longest > 2 and len(ways) * len(heads) > _ORDERS:
                longest -= 1
                heads = [*dict.fromkeys(head[:longest] for head in heads)]
            orders: list[Choice] = [(*head, *(s for s in some if s not in head)) for head in heads]
            if some and idle[a]:
                orders.append(())
            tried = [(*choice[:a], order, *choice[a + 1 :]) for choice in ways.values() for order in orders]
            ways = {}
            for way in tried:
                ways.setdefault(slot_axes(unit_class, way), way)
        return ways.values()

    def _one_after_another(self, unit_class: UnitClass, slots: Sequence[int]) -> bool:
        """Returns whether slots that are factors of one dim come from the major to the minor one, without a gap.

        Factors that two tensors hold in opposite orders come in slot order.
        """
        factors, ordered = self.problem.members[unit_class][0].slots, self.problem.ordered
        places = [*map(slot_index, slots)]
        for i, j in itertools.combinations(places, 2):
            if (factors[j], factors[i]) in ordered and (j < i or (factors[i], factors[j]) not in ordered):
                return False
        return all(ordered.get((factors[i], factors[j]), True) for i, j in itertools.pairwise(places))

    def _may_idle(self, unit_class: UnitClass, name: str, slots: Sequence[int], offers: Offers) -> bool:
        """Returns whether a unit class may leave an axis unused.

        Attention on a sharded sequence may not: the whole sequence may not fit on a device.
        """
        unit = self.problem.members[unit_class][0]
        if not {*unit.ring.values(), *unit.lends.values()}.isdisjoint(map(slot_index, slots)):
            return False
        is_grouping = name in self.grouping and not any(op.owns and op.owns.begins for op in unit.ops)
        offered = all(s < 0 for s in slots)
        contested = name in self.contested or any((dim_factor, name) in offers for dim_factor in self.problem.doubled)
        return is_grouping or offered or contested or not unit.gathers.isdisjoint(slots)

    def _rivals(self, name: str) -> list[Role]:
        """Returns the roles that compete for the axis in some unit, in the order of their first appearance.

        The two dims of a matrix times its own transpose have one role, and compete, too.
        """
        rivals: dict[Role, None] = {}
        problem = self.problem
        for members, slots, candidates in zip(problem.members, problem.slots, problem.candidates, strict=True):
            requesting = candidates.get(name, ())
            twice = [i for i, n in Counter(members[0].slots[i] for i in requesting).items() if n > 1]
            rivals |= dict.fromkeys(slots[i] for i in requesting) if len(requesting) > 1 else {}
            rivals |= dict.fromkeys(slots[i] for i in requesting if members[0].slots[i] in twice)
        return list(rivals)


def _contradicted(problem: Problem) -> Iterator[str]:
    """Yields the mesh axes that some annotation leaves out of a factor which requests them elsewhere."""
    propagation, graph = problem.propagation, problem.graph
    fixed = [(value, factor_axes) for value, (factor_axes, _) in propagation.pinned_values.items()]
    for i, (factor_axes, _) in propagation.outputs.items():
        fixed.append((propagation.pin_twins.get(i, graph.outputs[i]), factor_axes))
    for value, factor_axes in fixed:
        for dim_factor, axes in zip(propagation.dim_factors(value), factor_axes, strict=True):
            yield from (
                request.axis.name
                for request in propagation.requests.get(dim_factor, ())
                if request.axis not in axes and not request.offered
            )


def _grouping(propagation: Propagation) -> Iterator[str]:
    """Yields the mesh axes that shard groups of rows: only grouped products need them, so other ops may stay whole."""
    for dim_factor in (x for owners in propagation.group_factors.values() for x in owners):
        yield from (request.axis.name for request in propagation.requests.get(dim_factor, ()))
