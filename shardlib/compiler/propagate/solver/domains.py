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
from shardlib.compiler.propagate.solver.edges import Kind
from shardlib.compiler.propagate.solver.problem import Choice, Order, Problem, Role
from shardlib.sharding.mesh.axis import Axis, group_size

_LISTED, _MANY, _ORDERS = 5_000, 100, 150  # orders of the slots of a kind

Cuts = tuple[tuple[Axis, ...], ...]  # the axes on every slot
Variable = tuple[Kind, ...]  # kinds that take one choice together


@dataclass(frozen=True, eq=False)
class Domain:
    """The choices of a variable."""

    orders: tuple[Order, ...]

    @cached_property
    def places(self) -> Numbers:
        """The numbers of all choices."""
        return np.arange(len(self.orders))

    @cached_property
    def number(self) -> Mapping[Order, int]:
        return {order: n for n, order in enumerate(self.orders)}


Offer = tuple[DimFactor, str]  # a family of leaves, and a mesh axis
Offers = frozenset[Offer]


class Domains:
    """The domains of all variables of a problem, by the axes that are offered to dims.

    `contested` are the mesh axes that several dims want of which one can take them, `grouping` those that shard groups
    of rows. Where nothing contradicts annotations they are followed; where something does, an axis may stay unused.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        rivals = {name: self._rivals(name) for name in problem.atoms}
        disputed = {name for name, roles in rivals.items() if roles} | set(_contradicted(problem))
        self.contested = disputed | {a.name for roles in rivals.values() for role in roles for a in role.requests}
        self.grouping = set(_grouping(problem.propagation)) - self.contested
        self._memo: dict[object, Domain] = {}
        self._cut_memo: dict[tuple[Kind, Order], Cuts] = {}

    def cut(self, kind: Kind, choice: Order) -> Cuts:
        """Returns the axes on every slot of a kind under `choice`, which has one entry per mesh axis, in mesh order."""
        key = (kind, choice)
        if (known := self._cut_memo.get(key)) is not None:
            return known
        roles = self.problem.slots[kind]
        axes: list[list[Axis]] = [[] for _ in roles]
        beside = self.problem.beside[kind]
        for name, order in zip(self.problem.mesh.axis_names, choice, strict=True):
            atoms = self.problem.atoms[name]
            offered = {~slot for slot in order if slot < 0}
            if order and self._takes_minor(roles[max(order[0], ~order[0])], order[0] < 0, atoms):
                atoms = atoms[::-1]
            for atom in atoms:
                for slot in (max(s, ~s) for s in order):
                    both = {slot, self.problem.rounds[kind].get(slot, slot)}
                    fit = {
                        i
                        for i in both | beside[slot]
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
        self._cut_memo[key] = result
        return result

    @staticmethod
    def _takes_minor(role: Role, offered: bool, atoms: Sequence[Axis]) -> bool:
        """Returns whether a slot that may not have all of an axis takes its minor part: only that can be exchanged at
        once."""
        alone = offered and role.size < group_size(atoms) and not {*atoms} & {*role.requests}
        return bool({*role.lent} & {*atoms}) or alone

    def candidates(self, kind: Kind, name: str, offers: Offers) -> list[int]:
        """The slots that may take a mesh axis; ~s for a slot s to which it is offered."""
        problem, leaves = self.problem, self.problem.members[kind][0].slots
        slots = problem.candidates[kind].get(name, [])
        if not offers:
            return slots
        atoms, roles = problem.atoms[name], problem.slots[kind]
        able = {s for s, leaf in enumerate(leaves) if (problem.families[leaf], name) in offers}
        able |= {s for s, lender in problem.members[kind][0].lends.items() if lender in able}
        offered = [s for s in sorted(able) if not {*atoms} <= {*roles[s].requests}]
        wanting = {*slots, *offered}
        offered = [s for s in offered if problem.rounds[kind].get(s, s) in wanting]
        return [*(s for s in slots if s not in offered), *(~s for s in offered)]

    def of(self, variable: Variable, offers: Offers) -> Domain:
        """A choice for each way in which a variable can be sharded: some order of its slots on every mesh axis.

        Of an order only those count that take a part of the axis, and the first. Where there are many orders, those
        remain that cut the leaves of a dim one after another, and of these fewer slots count, down to two.
        """
        kind, problem = variable[0], self.problem
        slots = {name: tuple(self.candidates(kind, name, offers)) for name in problem.atoms}
        idle = tuple(all(self._may_idle(k, name, slots[name], offers) for k in variable) for name in problem.atoms)
        key = kind, tuple(slots.values()), idle
        if (domain := self._memo.get(key)) is None:
            domain = self._memo[key] = Domain(tuple(self._ways(kind, slots, idle)))
        return domain

    def _ways(self, kind: Kind, slots: Mapping[str, Sequence[int]], idle: Sequence[bool]) -> Iterable[Order]:
        cut = self.cut
        nothing: Order = tuple(() for _ in slots)
        ways: dict[object, Order] = {cut(kind, nothing): nothing}
        for a, (name, some) in enumerate(slots.items()):
            longest = min(len(some), len(self.problem.atoms[name]) + 1)
            while longest > 2 and math.perm(len(some), longest) > _LISTED:
                longest -= 1
            heads = [*itertools.permutations(some, longest)]
            if len(ways) * len(heads) > _MANY:
                heads = [head for head in heads if self._one_after_another(kind, head)] or heads
            while longest > 2 and len(ways) * len(heads) > _ORDERS:
                longest -= 1
                heads = [*dict.fromkeys(head[:longest] for head in heads)]
            orders: list[Choice] = [(*head, *(s for s in some if s not in head)) for head in heads]
            if some and idle[a]:
                orders.append(())
            tried = [(*choice[:a], order, *choice[a + 1 :]) for choice in ways.values() for order in orders]
            ways = {}
            for way in tried:
                ways.setdefault(cut(kind, way), way)
        return ways.values()

    def _one_after_another(self, kind: Kind, slots: Sequence[int]) -> bool:
        """Returns whether slots that are leaves of one dim come from the major to the minor one, and without a gap.

        Leaves that one tensor has in one order and another in the other come in the order of their slots.
        """
        of, ordered = self.problem.members[kind][0].slots, self.problem.ordered
        places = [max(s, ~s) for s in slots]
        for i, j in itertools.combinations(places, 2):
            if (of[j], of[i]) in ordered and (j < i or (of[i], of[j]) not in ordered):
                return False
        return all(ordered.get((of[i], of[j]), True) for i, j in itertools.pairwise(places))

    def _may_idle(self, kind: Kind, name: str, slots: Sequence[int], offers: Offers) -> bool:
        """Returns whether a kind may leave an axis unused. Attention on a sharded sequence never does: the whole
        sequence may not fit on a device."""
        unit = self.problem.members[kind][0]
        if not {*unit.rounds.values(), *unit.lends.values()}.isdisjoint(max(s, ~s) for s in slots):
            return False
        beside = name in self.grouping and not any(op.owns and op.owns.begins for op in unit.ops)
        offered = all(s < 0 for s in slots)
        contested = name in self.contested or any((leaf, name) in offers for leaf in self.problem.doubled)
        return beside or offered or contested or not unit.spares.isdisjoint(slots)

    def _rivals(self, name: str) -> list[Role]:
        """The roles that compete for the axis in some unit, in the order of their first appearance; also one that two
        dims have (a matrix times itself, turned round), of which one can take it."""
        rivals: dict[Role, None] = {}
        problem = self.problem
        for members, slots, candidates in zip(problem.members, problem.slots, problem.candidates, strict=True):
            wanting = candidates.get(name, ())
            twice = [i for i, n in Counter(members[0].slots[i] for i in wanting).items() if n > 1]
            rivals |= dict.fromkeys(slots[i] for i in wanting) if len(wanting) > 1 else {}
            rivals |= dict.fromkeys(slots[i] for i in wanting if members[0].slots[i] in twice)
        return list(rivals)


def _contradicted(problem: Problem) -> Iterator[str]:
    """Yields the mesh axes that some annotation leaves out of a factor which requests them elsewhere."""
    propagation, graph = problem.propagation, problem.graph
    fixed = [(value, cut) for value, (cut, _) in propagation.fixed.items()]
    fixed += [(propagation.apart.get(i, graph.outputs[i]), cut) for i, (cut, _) in propagation.outputs.items()]
    for value, cut in fixed:
        for leaf, axes in zip(propagation.leaves(value), cut, strict=True):
            yield from (w.axis.name for w in propagation.requests.get(leaf, ()) if w.axis not in axes and not w.offered)


def _grouping(propagation: Propagation) -> Iterator[str]:
    """Mesh axes that shard groups of rows: for the sake of their products, and what is beside these may stay whole."""
    for leaf in (x for owners in propagation.owners.values() for x in owners):
        yield from (w.axis.name for w in propagation.requests.get(leaf, ()))
