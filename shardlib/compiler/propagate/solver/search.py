"""Which factor of a unit gets each mesh axis: one global minimum of estimated seconds.

Every kind of unit has a domain, a choice for each way in which it can be cut, and costs are tables over these. Where
all of them can be written down, the minimum is found at once (`tables`); in larger problems so is that of one axis, and
that of the kinds around each, until nothing improves.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardlib.compiler.graph.ir import Graph
from shardlib.compiler.propagate.decision_units import Unit, Units
from shardlib.compiler.propagate.propagation import Flood
from shardlib.compiler.propagate.solver.bucket_elimination import least
from shardlib.compiler.propagate.solver.cost import Choices, Estimate, Order
from shardlib.compiler.propagate.solver.edges import Kind
from shardlib.compiler.propagate.solver.problem import Choice, Problem, Role
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh

TIE = 1.05  # estimates are no better than that: of two ends as near, the one that sends less
_DEARER = (2.0, 4.0, 12.0, 256.0)
_TURNS = 30  # in which rough figures are corrected where it matters, at most
_ORDERS = 700  # of the slots of a kind
_AT_ONCE = 1 << 18  # entries of tables that are worth working out to find a minimum,
_JOINED = 1 << 21  # and of those that are made of several on the way


@dataclass(frozen=True)
class Decision:
    """Why a kind of unit gives `axis` to `winner`: estimated seconds of the whole program for every alternative."""

    axis: str
    winner: str
    alternatives: tuple[tuple[str, float, Choice], ...]  # what is cut, seconds, the slot that comes first
    units: int

    def __str__(self) -> str:
        others = ", ".join(f"{name}: {s * 1e6:.1f} us" for name, s, _ in self.alternatives)
        return f"{self.axis} -> {self.winner} ({others}; {self.units} alike)"


def _contradicted(graph: Graph, flood: Flood) -> Iterator[str]:
    """Mesh axes that some annotation keeps off a class which wants them elsewhere."""
    fixed = [(value, cut) for value, (cut, _) in flood.fixed.items()]
    fixed += [(flood.apart.get(i, graph.outputs[i]), cut) for i, (cut, _) in flood.outputs.items()]
    for value, cut in fixed:
        for leaf, axes in zip(flood.leaves(value), cut, strict=True):
            yield from (w.axis.name for w in flood.wants.get(leaf, ()) if w.axis not in axes and not w.offered)


def _grouping(flood: Flood) -> Iterator[str]:
    """Mesh axes that cut groups of rows: for the sake of their products, and what is beside these may stay whole."""
    for leaf in (x for owners in flood.owners.values() for x in owners):
        yield from (w.axis.name for w in flood.wants.get(leaf, ()))


class Decider:
    """The search; `unit_cut(unit)` is the answer.

    With a `start`, that is where it begins; without `improve` that is all.
    """

    def __init__(
        self,
        graph: Graph,
        flood: Flood,
        units: Units,
        mesh: Mesh,
        start: Callable[[Unit], Order] | None = None,
        *,
        improve: bool = True,
    ) -> None:
        self.units = units
        self.problem = Problem(graph, flood, units, mesh)
        self.estimate = Estimate(self.problem)
        # Annotations that nothing contradicts are followed: only where there is a conflict may an axis stay unused.
        asked = {name: self._rivals(name) for name in self.problem.atoms}
        disputed = {name for name, rivals in asked.items() if rivals} | set(_contradicted(graph, flood))
        self.contested = disputed | {a.name for rivals in asked.values() for role in rivals for a in role.wants}
        self.offered = any(role.offered for slots in self.problem.slots for role in slots)
        self.grouping = set(_grouping(flood)) - self.contested
        self.domains = [self._domain(kind) for kind in range(len(self.problem.members))]
        self.choices: Choices = [domain[0] for domain in self.domains]
        if start is not None:
            self.choices = [self._nearest(kind, start(m[0])) for kind, m in enumerate(self.problem.members)]
        if improve:
            self._minimise()

    @property
    def seconds(self) -> float:
        """The estimated time of the whole program."""
        return self.estimate.total(self.choices)

    @property
    def unhidden(self) -> float:
        """The same, with all that nobody decides, where arithmetic hides the messages that nobody waits for."""
        return self.estimate.unhidden(self.choices)

    def order(self, unit: Unit) -> Order:
        """The choice of a unit, for every mesh axis."""
        return self.choices[self.problem.kind[unit]]

    @property
    def limit(self) -> float:
        """Seconds that a choice may take which sends less than the one that is taken."""
        return self.seconds + sum(self.estimate.whole(self.choices)) * (TIE - 1)

    def spare(self, limit: float, dearest: float = math.inf) -> None:
        """Send fewer bytes within a limit: follow the minimum while they grow dearer and dearer."""
        seconds = self.estimate
        self.estimate = bytes_alone = Estimate(self.problem, of_bytes=True)

        def spares(choices: Choices) -> bool:
            fewer = bytes_alone.parts(choices)[1] <= bytes_alone.parts(self.choices)[1]
            return fewer and seconds.total(choices) <= limit

        for dear in _DEARER:
            if dear <= dearest:
                self._minimise(dear, spares)
        self.estimate = seconds

    # The search -----------------------------------------------------------------------------------------------------

    def _domain(self, kind: Kind) -> list[Order]:
        """A choice for each way in which a kind can be cut: whatever order of its slots on every mesh axis gives it.

        Of an order only those count that take a part of the axis, and the first; fewer, down to two, where there are
        too many orders.
        """
        nothing = tuple(() for _ in (*self.problem.atoms, "turned round"))
        found: dict[object, Order] = {self.estimate.cut(kind, nothing): nothing}
        for a, (name, atoms) in enumerate(self.problem.atoms.items()):
            slots = self.problem.candidates[kind].get(name, [])
            longest = min(len(slots), len(atoms) + 1)
            while longest > 2 and len(found) * math.perm(len(slots), longest) > _ORDERS:
                longest -= 1
            heads = itertools.permutations(slots, longest)
            orders: list[Choice] = [(*head, *(s for s in slots if s not in head)) for head in heads]
            if slots and self._may_idle(kind, name):
                orders.append(())
            ways = [(*choice[:a], order, *choice[a + 1 :]) for choice in found.values() for order in orders]
            found = {}
            for way in ways:
                found.setdefault(self.estimate.cut(kind, way), way)
        for i, role in enumerate(self.problem.slots[kind]):
            for *orders, turned in list(found.values()) if role.turned else ():
                way = (*orders, (*turned, i))
                found.setdefault(self.estimate.cut(kind, way), way)
        return list(found.values())

    def _may_idle(self, kind: Kind, name: str) -> bool:
        """Whether a kind may leave an axis unused. Attention never does: whoever cuts a sequence has no room for the
        whole of it."""
        unit, slots = self.problem.members[kind][0], self.problem.candidates[kind].get(name, ())
        if unit.alone:
            return False
        beside = name in self.grouping and not any(op.owns and op.owns.begins for op in unit.ops)
        offered = all(self.problem.slots[kind][i].offered for i in slots)
        return beside or offered or name in self.contested or not unit.spares.isdisjoint(slots)

    def _nearest(self, kind: Kind, order: Order) -> Order:
        cut = self.estimate.cut(kind, order)
        return next((x for x in self.domains[kind] if self.estimate.cut(kind, x) == cut), self.domains[kind][0])

    def _minimise(self, dear: float = 1.0, allowed: Callable[[Choices], bool] = lambda choices: True) -> None:
        """The least estimate, with communication so many times `dear`: of all at once or, if that is too much to write
        down, of one axis after the other, and of all that is around each kind, until nothing improves. Where even that
        is too much, all that share a value are put alike, and each kind chooses alone."""
        whole = {kind: domain for kind, domain in enumerate(self.domains) if len(domain) > 1}
        last: dict[Kind, Choices] = {}  # with which choices around it nothing could be improved
        while self._improve(whole, dear, allowed) is None:
            improved = [self._improve(self._on_axis(a, whole), dear, allowed) for a in range(len(self.problem.atoms))]
            if not any(improved):
                improved = [self._improve_around(kind, dear, allowed, last) for kind in whole]
            if not any(improved) and None in improved:
                improved = [self._try(some, dear, allowed) for some in self.estimate.alike(whole, _AT_ONCE)]
                improved += [self._improve({kind: domain}, dear, allowed) for kind, domain in whole.items()]
            if not any(improved):
                break

    def _on_axis(self, a: int, kinds: Iterable[Kind]) -> dict[Kind, list[Order]]:
        """What differs on one axis only from what is chosen."""
        rest = {k: (self.choices[k][:a], self.choices[k][a + 1 :]) for k in kinds}
        return {k: [x for x in self.domains[k] if (x[:a], x[a + 1 :]) == rest[k]] for k in kinds}

    def _improve_around(
        self, kind: Kind, dear: float, allowed: Callable[[Choices], bool], last: dict[Kind, Choices]
    ) -> bool | None:
        """Choose best for a kind and those beside it, unless all is as it was when it could not be improved."""
        beside = self.estimate.beside(kind)
        now = [self.choices[k] for k in self.estimate.beside(*beside)]
        if last.get(kind) == now:
            return False
        better = self._improve({k: self.domains[k] for k in beside}, dear, allowed)
        if better is False:
            last[kind] = now
        return better

    def _improve(
        self, free: Mapping[Kind, Sequence[Order]], dear: float, allowed: Callable[[Choices], bool]
    ) -> bool | None:
        """Choose best for the kinds that are `free`, as all others stand; whether that is better, None where there are
        too many choices to tell."""
        free = self.estimate.worth(free, self.choices, dear)
        if not free:
            return False
        written, whole = self.estimate.tables(free, self.choices, at_once=_AT_ONCE, rough=True)
        if not whole:
            return None
        before, now = self.choices, self.estimate.cost(free, self.choices, dear)
        for _ in range(_TURNS):
            tables = [table.dearer(dear) for table in written]
            best = least(tables, {kind: len(domain) for kind, domain in free.items()}, _JOINED // len(free))
            tried = list(before)
            for kind, i in best.choices.items():
                tried[kind] = free[kind][i]
            if (cost := self.estimate.cost(free, tried, dear)) < now and allowed(tried):
                self.choices, now = tried, cost
            if not self.estimate.corrected(written, best.choices, tried):
                break
        return self.choices is not before

    def _try(self, some: Mapping[Kind, Order], dear: float, allowed: Callable[[Choices], bool]) -> bool | None:
        """Choose so for some kinds if that is better."""
        tried = [some.get(kind, choice) for kind, choice in enumerate(self.choices)]
        now = self.estimate.cost(some, self.choices, dear)
        if self.estimate.cheaper(some, tried, now, dear) and allowed(tried):
            self.choices = tried
            return True
        return False

    def _rivals(self, name: str) -> list[Role]:
        """The roles that compete for the axis in some unit because it was asked for, in the order of their first
        appearance; also one that two dims have (a matrix times itself, turned round), of which one can take it."""
        rivals: dict[Role, None] = {}
        for members, slots, candidates in zip(
            self.problem.members, self.problem.slots, self.problem.candidates, strict=True
        ):
            wanting = candidates.get(name, ())
            asked = [i for i in wanting if not slots[i].offered]
            twice = [i for i, n in Counter(members[0].slots[i] for i in wanting).items() if n > 1]
            rivals |= dict.fromkeys(slots[i] for i in asked) if len(asked) > 1 else {}
            rivals |= dict.fromkeys(slots[i] for i in wanting if members[0].slots[i] in twice)
        return list(rivals)

    # The answer -----------------------------------------------------------------------------------------------------

    def unit_cut(self, unit: Unit) -> tuple[tuple[Axis, ...], ...]:
        kind = self.problem.kind.get(unit)
        return ((),) * len(unit.slots) if kind is None else self.estimate.cut(kind, self.choices[kind])

    def decision(self, unit: Unit, name: str) -> Decision | None:
        """Why the unit uses (or leaves) mesh axis `name`; None where there was nothing to decide."""
        kind = self.problem.kind.get(unit)
        if kind is None or not self.problem.candidates[kind].get(name):
            return None
        a = self.problem.mesh.axis_names.index(name)
        rows: dict[tuple[tuple[Axis, ...], ...], tuple[str, float, Choice]] = {}
        for alternative in self._alternatives(kind, name):
            choices = list(self.choices)
            choices[kind] = (*choices[kind][:a], alternative, *choices[kind][a + 1 :])
            cut = self.estimate.cut(kind, choices[kind])
            seconds = self.estimate.cost([kind], choices)
            rows.setdefault(cut, (self._takers(kind, name, alternative, cut), seconds, alternative[:1]))
        winner = self._takers(kind, name, self.choices[kind][a], self.unit_cut(unit))
        return Decision(name, winner, tuple(rows.values()), len(self.problem.members[kind]))

    def near(self, unit: Unit, name: str) -> tuple[str, float] | None:
        """What else mesh axis `name` could cut in a unit if the program then takes hardly longer, or less, all other
        units deciding anew, and the seconds of that; the nearest."""
        kind, mine, a = self.problem.kind[unit], self.choices, self.problem.mesh.axis_names.index(name)
        limit, winner = (
            self.seconds * TIE,
            self._takers(kind, name, mine[self.problem.kind[unit]][a], self.unit_cut(unit)),
        )
        others = {k: domain for k, domain in enumerate(self.domains) if k != kind and len(domain) > 1}
        found: dict[str, float] = {}
        for choice in self.domains[kind]:
            what = self._takers(kind, name, choice[a], self.estimate.cut(kind, choice))
            rest = (*choice[:a], *choice[a + 1 :]) == (*mine[kind][:a], *mine[kind][a + 1 :])
            if rest and what != winner:
                self.choices = [*mine[:kind], choice, *mine[kind + 1 :]]
                self._improve(others, 1.0, lambda choices: True)
                found[what] = min(self.seconds, found.get(what, math.inf))
                self.choices = mine
        near = [(seconds, what) for what, seconds in found.items() if seconds <= limit]
        return (min(near)[1], min(near)[0]) if near else None

    def _alternatives(self, kind: Kind, name: str) -> list[Choice]:
        """Every slot first, and the axis unused; where a unit may share it out, every two."""
        slots = self.problem.candidates[kind].get(name, [])
        if self.problem.members[kind][0].alone:
            orders = [(i, j, *(k for k in slots if k not in (i, j))) for i, j in itertools.permutations(slots, 2)]
            return orders or [tuple(slots)]
        return [*((i, *(j for j in slots if j != i)) for i in slots), ()]

    def _takers(self, kind: Kind, name: str, choice: Choice, cut: tuple[tuple[Axis, ...], ...]) -> str:
        """What the axis cuts: the first slot, or, where a unit may share it out, all that get some of it."""
        rounds = self.problem.rounds[kind]
        takers = choice[:1]
        if self.problem.members[kind][0].alone:
            takers = tuple(i for i in choice if any(a.name == name for a in cut[i]))
        names = []
        for slot in takers:
            if slot in self.problem.members[kind][0].follows:
                names.append(self._role_name(kind, rounds[slot]))
            elif slot in rounds:
                names.append(f"{self._role_name(kind, rounds[slot])}, with {self._role_name(kind, slot)} passed round")
            elif all(rounds.get(i) != slot for i in takers):
                names.append(self._role_name(kind, slot))
        return " and ".join(names) or "nothing"

    def _role_name(self, kind: Kind, slot: int) -> str:
        role = self.problem.slots[kind][slot]
        return role.name or f"a dim of {role.size}"
