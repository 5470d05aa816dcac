"""Which factor of a unit gets each mesh axis: one global minimum of estimated seconds.

The search starts from every order of precedence between classes, improves one unit at a time until nothing improves,
and keeps the best end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardlib.graph import Graph, Op
from shardlib.meshes.axis import Axis
from shardlib.meshes.mesh import Mesh
from shardlib.propagate.estimate import Choices, Estimate, Order
from shardlib.propagate.flood import Flood
from shardlib.propagate.problem import Choice, Kind, Problem, Role
from shardlib.propagate.units import Unit, Units

_TIE = 1.05  # estimates are no better than that: of two ends as near, the one that sends less
_DEARER = (2.0, 8.0, 32.0)

Beside = list[tuple[Kind, ...]]  # for every kind, those that share a value with it


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
    """The search; `unit_cut(unit)` is the answer."""

    def __init__(
        self, graph: Graph, flood: Flood, units: Units, mesh: Mesh, start: Callable[[Unit], Order] | None = None
    ) -> None:
        self.units = units
        self.problem = Problem(graph, flood, units, mesh)
        self.estimate = Estimate(self.problem)
        self.rivals = {name: self._rivals(name) for name in self.problem.atoms}
        # Annotations that nothing contradicts are followed: only where there is a conflict may an axis stay unused.
        asked = {name: self._rivals(name, asked=True) for name in self.problem.atoms}
        disputed = {name for name, rivals in asked.items() if rivals} | set(_contradicted(graph, flood))
        self.contested = disputed | {a.name for rivals in asked.values() for role in rivals for a in role.wants}
        self.grouping = set(_grouping(flood)) - self.contested
        self.followers, self.neighbours = self._beside()
        if start is None:
            self.choices: Choices = self._search()
        else:
            self.choices = [start(members[0]) for members in self.problem.members]
            self._descend(self.choices, self.followers, quiet=False)
        self._descend(self.choices, self.neighbours, quiet=False)

    @property
    def seconds(self) -> float:
        """The estimated time of the whole program."""
        return self.estimate.total(self.choices)

    def order(self, unit: Unit) -> Order:
        """The choice of a unit, for every mesh axis."""
        return self.choices[self.problem.kind[unit]]

    def spare(self) -> None:
        """Send less where that takes hardly longer: follow the minimum while communication grows dearer and dearer."""
        limit = self.seconds * _TIE

        def near(choices: Choices) -> bool:
            dear, self.estimate.dear = self.estimate.dear, 1.0
            seconds = self.estimate.total(choices)
            self.estimate.dear = dear
            return seconds <= limit

        for self.estimate.dear in _DEARER:
            self._descend(self.choices, self.neighbours, quiet=False, allowed=near)
        self.estimate.dear = 1.0

    # The search -----------------------------------------------------------------------------------------------------

    def _search(self) -> Choices:
        """Descend from every class first and every class last, on every axis, and with all units that have a choice of
        their own taking it alike; keep the best end."""
        if not self.problem.members:
            return []
        nobody: dict[str, tuple[Role, ...]] = dict.fromkeys(self.problem.atoms, ())
        best = [self._start(kind, nobody, nobody) for kind in range(len(self.problem.members))]
        self._descend(best, self.followers)
        best_cost = self.estimate.total(best)
        improved = True
        while improved:
            improved = False
            for name in self.problem.atoms:
                starts = [
                    [self._start(k, first, last, best[k]) for k in range(len(self.problem.members))]
                    for role in self.rivals[name]
                    for first, last in ((nobody | {name: (role,)}, nobody), (nobody, nobody | {name: (role,)}))
                ]
                for choices in (*starts, *self._alike(name, best)):
                    if choices == best:
                        continue
                    self._descend(choices, self.followers)
                    cost = self.estimate.total(choices)
                    if cost < best_cost * (1 - 1e-6):
                        best, best_cost, improved = choices, cost, True
        return best

    def _alike(self, name: str, given: Choices) -> Iterator[Choices]:
        """All units that could pass something round do, then all that could cut what is lent: where two units read one
        value, neither gains by doing so alone."""
        a = list(self.problem.atoms).index(name)
        units = [members[0] for members in self.problem.members]
        for preferred in ([{**unit.rounds, **unit.follows} for unit in units], [unit.lends for unit in units]):
            choices = list(given)
            for kind in range(len(units)):
                slots = self.problem.candidates[kind].get(name, ())
                first = [i for i in slots if i in preferred[kind]]
                if first:
                    order = (*first, *(i for i in slots if i not in first))
                    choices[kind] = (*given[kind][:a], order, *given[kind][a + 1 :])
            if choices != given:
                yield choices

    def _rivals(self, name: str, *, asked: bool = False) -> list[Role]:
        """The roles that compete for the axis in some unit, in the order of their first appearance; or those alone for
        which it was `asked`."""
        rivals: dict[Role, None] = {}
        for slots, candidates in zip(self.problem.slots, self.problem.candidates, strict=True):
            roles = dict.fromkeys(slots[i] for i in candidates.get(name, ()) if not (asked and slots[i].offered))
            rivals |= roles if len(roles) > 1 else {}
        return list(rivals)

    def _start(
        self,
        kind: Kind,
        first: dict[str, tuple[Role, ...]],
        last: dict[str, tuple[Role, ...]],
        given: Order | None = None,
    ) -> Order:
        """`given` (or everything that wants an axis, in order) with some classes put first or last on some axes."""
        roles = self.problem.slots[kind]
        choice = []
        for a, name in enumerate(self.problem.atoms):
            slots = tuple(self.problem.candidates[kind].get(name, ()))
            order = slots if given is None or first[name] or last[name] else given[a]
            if given is not None and order is slots and not any(roles[i] in (*first[name], *last[name]) for i in slots):
                order = given[a]
            elif given is not None and order is slots:
                order = tuple(dict.fromkeys((*given[a], *slots)))
            choice.append(
                tuple(sorted(order, key=lambda i: (roles[i] not in first[name]) + 2 * (roles[i] in last[name])))
            )
        return tuple(choice)

    def _alternatives(self, kind: Kind, name: str, *, idle_too: bool = False) -> list[Choice]:
        slots = self.problem.candidates[kind].get(name, [])
        if self.problem.members[kind][0].alone:
            # An axis may be shared: some of it cuts heads, the rest passes keys round. It is never left unused: whoever
            # cuts a sequence has no room for the whole of it.
            orders = [(i, j, *(k for k in slots if k not in (i, j))) for i, j in itertools.permutations(slots, 2)]
            return orders or [tuple(slots)]
        idle: list[Choice] = [()] if slots and (idle_too or self.may_idle(kind, name)) else []
        return [(i, *(j for j in slots if j != i)) for i in slots] + idle

    def may_idle(self, kind: Kind, name: str) -> bool:
        """Whether a unit of this kind may leave the axis unused."""
        slots = self.problem.candidates[kind].get(name, [])
        beside = name in self.grouping and not any(op.owns and op.owns.begins for op in self._ops(kind))
        offered = all(self.problem.slots[kind][i].offered for i in slots)
        return beside or offered or name in self.contested or not self.problem.members[kind][0].spares.isdisjoint(slots)

    def _ops(self, kind: Kind) -> list[Op]:
        """The ops of a unit of this kind."""
        return self.problem.members[kind][0].ops

    def _descend(
        self,
        choices: Choices,
        beside: Beside,
        *,
        quiet: bool = True,
        allowed: Callable[[Choices], bool] = lambda choices: True,
    ) -> None:
        """Improve one kind at a time until nothing does, with an answer of each of those `beside` it.

        Without `quiet`, only kinds beside which something moves, or that could do less; what is not `allowed` is taken
        back.
        """
        improved = True
        while improved:
            improved = False
            for kind in range(len(self.problem.members)):
                if not quiet and not self._may_gain(kind, choices):
                    continue
                for a, name in enumerate(self.problem.mesh.axis_names):
                    alternatives = self._alternatives(kind, name)
                    if len(alternatives) < 2:
                        continue
                    moving = (kind, *beside[kind])
                    current = best = [choices[k] for k in moving]
                    best_cost = self.estimate.cost(moving, choices)
                    for alternative in alternatives:
                        self._put(choices, moving, current)
                        choices[kind] = (*current[0][:a], alternative, *current[0][a + 1 :])
                        for follower in beside[kind]:
                            self._follow(choices, follower, a, name)
                        cost = self.estimate.cost(moving, choices)
                        if cost < best_cost * (1 - 1e-9):
                            best, best_cost = [choices[k] for k in moving], cost
                    self._put(choices, moving, best)
                    if best != current and not allowed(choices):
                        self._put(choices, moving, current)
                        continue
                    improved |= best != current

    def _may_gain(self, kind: Kind, choices: Choices) -> bool:
        """Whether a kind costs more than it must: a value beside it moves, or some choice on one axis is less work."""
        if self.estimate.moves(kind, choices):
            return True
        mine, now = choices[kind], self.estimate.work(kind, choices)
        for a, name in enumerate(self.problem.atoms):
            for way in self._alternatives(kind, name):
                choices[kind] = (*mine[:a], way, *mine[a + 1 :])
                less = self.estimate.work(kind, choices) < now * (1 - 1e-9)
                choices[kind] = mine
                if less:
                    return True
        return False

    def _follow(self, choices: Choices, kind: Kind, a: int, name: str) -> None:
        """Give `kind` what is best for mesh axis `name` as everything else stands."""
        current = choices[kind]
        ways = [(*current[:a], way, *current[a + 1 :]) for way in self._alternatives(kind, name)]

        def cost(choice: Order) -> float:
            choices[kind] = choice
            return self.estimate.kind_cost(kind, choices)

        choices[kind] = min((current, *ways), key=cost)

    @staticmethod
    def _put(choices: Choices, kinds: tuple[Kind, ...], orders: Sequence[Order]) -> None:
        for kind, order in zip(kinds, orders, strict=True):
            choices[kind] = order

    def _beside(self) -> tuple[Beside, Beside]:
        """For every kind, the inputs beside it that nobody annotated, which go where their readers want them; and all
        kinds beside it."""
        free = {
            k
            for k, (unit, *_) in enumerate(self.problem.members)
            if not unit.ops and all(v.op is None for v in unit.values)
        }
        all_of: list[dict[Kind, None]] = [{} for _ in self.problem.members]
        for record in self.problem.records:
            for kind in record.kinds:
                all_of[kind] |= dict.fromkeys(k for k in record.kinds if k != kind)
        return [tuple(k for k in found if k in free) for found in all_of], [tuple(found) for found in all_of]

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
        for alternative in self._alternatives(kind, name, idle_too=True):
            choices = list(self.choices)
            choices[kind] = (*choices[kind][:a], alternative, *choices[kind][a + 1 :])
            cut = self.estimate.cut(kind, choices[kind])
            seconds = self.estimate.kind_cost(kind, choices)
            rows.setdefault(cut, (self._takers(kind, name, alternative, cut), seconds, alternative[:1]))
        winner = self._takers(kind, name, self.choices[kind][a], self.unit_cut(unit))
        return Decision(name, winner, tuple(rows.values()), len(self.problem.members[kind]))

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
