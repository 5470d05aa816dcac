"""The search: the slot of every unit that gets each mesh axis, by one minimum of estimated seconds.

Every variable, some kinds of units that choose together, has a domain: a choice for each way in which it can be
sharded. Costs are tables over these. Where all tables can be written down, the minimum is found at once
(`bucket_elimination`); in larger problems the search finds the minimum of one axis, and that of the variables around
each, until nothing improves.

`choices` hold what is decided so far; whatever else is tried starts there, on the same problem.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.dim_factors import Leaf
from shardlib.compiler.propagate.propagation import Flood
from shardlib.compiler.propagate.solver.bucket_elimination import Numbers, least
from shardlib.compiler.propagate.solver.cost import Choices, Cuts, Domain, Estimate, Free, Variable, Weights, grained
from shardlib.compiler.propagate.solver.edges import Kind
from shardlib.compiler.propagate.solver.effort import Effort
from shardlib.compiler.propagate.solver.problem import Choice, Order, Problem, Role

TIE = 1.05  # estimates are no better than that: of two ends as near, the one that sends less
_DEARER = (2.0, 4.0, 12.0, 256.0)
_LEAST = 1e-3  # the share of the estimated time that a variable and its neighbors may save, or nobody looks at them
_LISTED, _MANY, _ORDERS = 5_000, 100, 700  # orders of the slots of a kind
_AT_ONCE = 1 << 18  # entries of tables that are worth working out to find a minimum,
_NEARBY = 1 << 13  # around one variable: first where there are few,
_JOINED = 1 << 21  # and of those that are made of several on the way

Offer = tuple[Leaf, str]  # a family of leaves, and a mesh axis


@dataclass(frozen=True)
class State:
    """What is decided, and the dims that may take an axis which nobody asked for, or that may not though somebody
    did."""

    choices: Choices
    offers: frozenset[Offer] = frozenset()
    withheld: frozenset[Offer] = frozenset()


class Search:
    """The choices of all kinds of a problem; with a `start`, the one that it gives for a member of each."""

    def __init__(
        self, problem: Problem, start: Callable[[Op | Value], Order] | None = None, effort: Effort | None = None
    ) -> None:
        self.problem, self.estimate, self.weights = problem, Estimate(problem), Weights()
        self.effort = Effort() if effort is None else effort
        self.solves = 0  # minima that were sought
        flood = problem.flood
        asked = {name: self._rivals(name) for name in problem.atoms}
        disputed = {name for name, rivals in asked.items() if rivals} | set(_contradicted(problem))
        # Annotations that nothing contradicts are followed: only where there is a conflict may an axis stay unused.
        self.contested = disputed | {a.name for rivals in asked.values() for role in rivals for a in role.wants}
        self.grouping = set(_grouping(flood)) - self.contested
        wants = [(problem.families.get(leaf, leaf), w) for leaf, wants in flood.wants.items() for w in wants]
        self.offers: frozenset[Offer] = frozenset((leaf, w.axis.name) for leaf, w in wants if w.offered)
        self.withheld: frozenset[Offer] = frozenset()
        self._domains: dict[object, Domain] = {}
        self.choices: Choices = [self.domain((kind,)).orders[0] for kind in range(len(problem.members))]
        if start is not None:
            self.choices = [start(problem.first(kind)) for kind in range(len(problem.members))]
            self.settle((kind,) for kind in range(len(problem.members)))

    @property
    def state(self) -> State:
        return State(self.choices, self.offers, self.withheld)

    @state.setter
    def state(self, state: State) -> None:
        self.choices, self.offers, self.withheld = state.choices, state.offers, state.withheld

    @property
    def seconds(self) -> float:
        """The estimated time of the whole program."""
        return self.estimate.total(self.choices)

    @property
    def has_choice(self) -> bool:
        """Whether parts of a unit may be better apart."""
        return bool(self.contested or self.offers or self.problem.flood.turned)

    def order(self, member: Op | Value) -> Order:
        """The choice of a member, for every mesh axis."""
        return self.choices[self.problem.kind[self.problem.units.unit[member]]]

    def cut(self, member: Op | Value) -> Cuts:
        """The mesh axes on each slot of a member's unit."""
        unit = self.problem.units.unit[member]
        kind = self.problem.kind.get(unit)
        return ((),) * len(unit.slots) if kind is None else self.estimate.cut(kind, self.choices[kind])

    def variables(self) -> list[Variable]:
        """The kinds that choose alike, as parts of one unit do until they are taken apart."""
        parts: dict[object, list[Kind]] = {}
        for g, group in enumerate(self.problem.groups):
            for kind in group:
                parts.setdefault((g, self.choices[kind]), []).append(kind)
        return [tuple(kinds) for kinds in parts.values()]

    # Domains --------------------------------------------------------------------------------------------------------

    def candidates(self, kind: Kind, name: str) -> list[int]:
        """The slots that may take a mesh axis; ~s for a slot s to which it is offered."""
        problem, leaves = self.problem, self.problem.members[kind][0].slots
        slots = problem.candidates[kind].get(name, [])
        if self.withheld:
            slots = [s for s in slots if (problem.families[leaves[s]], name) not in self.withheld]
        if not self.offers:
            return slots
        atoms, roles = problem.atoms[name], problem.slots[kind]
        able = {s for s, leaf in enumerate(leaves) if (problem.families[leaf], name) in self.offers}
        able |= {s for s, lender in problem.members[kind][0].lends.items() if lender in able}
        offered = [s for s in sorted(able) if not {*atoms} <= {*roles[s].wants}]
        wanting = {*slots, *offered}
        offered = [s for s in offered if problem.rounds[kind].get(s, s) in wanting]
        return [*(s for s in slots if s not in offered), *(~s for s in offered)]

    def domain(self, variable: Variable) -> Domain:
        """A choice for each way in which a variable can be sharded: some order of its slots on every mesh axis.

        Of an order only those count that take a part of the axis, and the first. Where there are many orders, those
        remain that cut the leaves of a dim one after another, and of these fewer slots count, down to two.
        """
        kind, problem = variable[0], self.problem
        slots = {name: tuple(self.candidates(kind, name)) for name in problem.atoms}
        idle = tuple(all(self._may_idle(k, name, slots[name]) for k in variable) for name in problem.atoms)
        key = kind, tuple(slots.values()), idle
        if (domain := self._domains.get(key)) is None:
            domain = self._domains[key] = Domain(tuple(self._ways(kind, slots, idle)))
        return domain

    def _ways(self, kind: Kind, slots: Mapping[str, Sequence[int]], idle: Sequence[bool]) -> Iterable[Order]:
        cut = self.estimate.cut
        nothing: Order = tuple(() for _ in (*slots, "turned round"))
        ways: dict[object, Order] = {cut(kind, nothing): nothing}
        for a, (name, some) in enumerate(slots.items()):
            longest = min(len(some), len(self.problem.atoms[name]) + 1)
            while longest > 2 and math.perm(len(some), longest) > _LISTED:
                longest -= 1
            heads = [*itertools.permutations(some, longest)]
            if len(ways) * len(heads) > _MANY:
                heads = [head for head in heads if self._one_after_another(kind, head)]
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
        for i, role in enumerate(self.problem.slots[kind]):
            for *orders, turned in list(ways.values()) if role.turned else ():
                way = (*orders, (*turned, i))
                ways.setdefault(cut(kind, way), way)
        return ways.values()

    def _one_after_another(self, kind: Kind, slots: Sequence[int]) -> bool:
        """Whether slots that are leaves of one dim come from the major to the minor one, and without a gap."""
        of, ordered = self.problem.members[kind][0].slots, self.problem.ordered
        leaves = [of[max(s, ~s)] for s in slots]
        turned = any((b, a) in ordered for a, b in itertools.combinations(leaves, 2))
        return not turned and all(ordered.get(pair, True) for pair in itertools.pairwise(leaves))

    def _may_idle(self, kind: Kind, name: str, slots: Sequence[int]) -> bool:
        """Whether a kind may leave an axis unused. Attention on a sharded sequence never does: the whole sequence
        may not fit on a device."""
        unit = self.problem.members[kind][0]
        if not {*unit.rounds.values(), *unit.lends.values()}.isdisjoint(max(s, ~s) for s in slots):
            return False
        beside = name in self.grouping and not any(op.owns and op.owns.begins for op in unit.ops)
        offered = all(s < 0 for s in slots)
        contested = name in self.contested or any((leaf, name) in self.offers for leaf in self.problem.doubled)
        return beside or offered or contested or not unit.spares.isdisjoint(slots)

    def settle(self, variables: Iterable[Variable]) -> None:
        """Take for every variable the choice of its domain that shards as its present one, or the first."""
        choices, cut = list(self.choices), self.estimate.cut
        for variable in variables:
            kind, domain = variable[0], self.domain(variable)
            if choices[kind] not in domain.number:
                now = cut(kind, choices[kind])
                choice = next((x for x in domain.orders if cut(kind, x) == now), domain.orders[0])
                for k in variable:
                    choices[k] = choice
        self.choices = choices

    def take(self, offer: Offer, variables: Iterable[Variable]) -> None:
        """Let every variable that holds an offered dim take the axis there, as far as its domain has that."""
        family, name = offer
        a, choices = self.problem.mesh.axis_names.index(name), list(self.choices)
        for variable in variables:
            kind = variable[0]
            slots = {~s for s, leaf in enumerate(self.problem.members[kind][0].slots)}
            slots = {s for s in slots if self.problem.families[self.problem.members[kind][0].slots[~s]] == family}
            rest = (*choices[kind][:a], *choices[kind][a + 1 :])
            orders = (x for x in self.domain(variable).orders if (*x[:a], *x[a + 1 :]) == rest)
            if taken := next((x for x in orders if slots.intersection(x[a][:1])), None):
                for k in variable:
                    choices[k] = taken
        self.choices = choices

    def domains(self, variables: Iterable[Variable]) -> Free:
        """The domains of variables that have a choice."""
        domains = {variable: self.domain(variable) for variable in variables}
        return {v: (domain, domain.places) for v, domain in domains.items() if len(domain.orders) > 1}

    # The search -----------------------------------------------------------------------------------------------------

    def minimize(self, whole: Free, allowed: Callable[[Choices], bool] = lambda choices: True) -> None:
        """Find the least estimate of all variables at once or, if that is too much to write down, by local moves until
        nothing improves or the effort is spent: of one axis, of each variable, of all that share a value, which are put
        alike, and of all that is around each variable, those first that cost most."""
        last: dict[Variable, Choices] = {}  # the choices around it with which nothing could be improved
        kinds = [kind for variable in whole for kind in variable]
        least = _LEAST * self.estimate.cost(kinds, self.choices, self.weights)
        axes = range(len(self.problem.atoms)) if len(self.problem.atoms) > 1 else ()
        nearby = _NEARBY
        moves: tuple[Callable[[], list[bool | None]], ...] = (
            lambda: [self.improve(self._on_axis(a, whole), allowed) for a in axes],
            lambda: [self.improve({variable: domain}, allowed) for variable, domain in whole.items()],
            lambda: [self._try(some, allowed) for some in self.estimate.alike(whole, _AT_ONCE)],
            lambda: [self._improve_around(v, whole, allowed, last, least, nearby) for v in self._by_cost(whole)],
        )
        while self.improve(whole, allowed) is None:
            for move in moves[:2]:  # whatever the effort
                move()
            while any(any(move()) for move in moves if not self.effort.stops()):
                pass
            if nearby == _AT_ONCE or self.effort.stops():
                break
            nearby = _AT_ONCE

    def _by_cost(self, whole: Free) -> list[Variable]:
        return sorted(whole, key=lambda variable: -self.estimate.cost(variable, self.choices, self.weights))

    def spare(self, whole: Free, limit: float, dearest: float = math.inf) -> None:
        """Send fewer bytes within a limit of seconds: follow the minimum while bytes grow dearer and dearer."""
        seconds, weights = self.estimate, self.weights
        self.estimate = bytes_alone = self.of_bytes

        def spares(choices: Choices) -> bool:
            fewer = bytes_alone.parts(choices)[1] <= bytes_alone.parts(self.choices)[1]
            return fewer and seconds.total(choices) <= limit

        dearer, before = [dear for dear in _DEARER if dear <= dearest], self.choices
        self.weights = replace(weights, sent=dearer[-1])
        self.minimize(whole)
        fewer = bytes_alone.parts(self.choices)[1] < bytes_alone.parts(before)[1]
        self.choices = before
        for dear in dearer if fewer else ():
            self.weights = replace(weights, sent=dear)
            self.minimize(whole, spares)
        self.estimate, self.weights = seconds, weights

    @property
    def of_bytes(self) -> Estimate:
        """The estimate of the bytes of messages, without their latency."""
        if self._of_bytes is None:
            self._of_bytes = Estimate(self.problem, of_bytes=True)
        return self._of_bytes

    _of_bytes: Estimate | None = None

    @contextmanager
    def optimistic(self) -> Iterator[None]:
        """Work out no messages inside ops here: those that are not known are taken to cost nothing."""
        self.estimate.optimistic = self.of_bytes.optimistic = True
        try:
            yield
        finally:
            self.estimate.optimistic = self.of_bytes.optimistic = False

    def _on_axis(self, a: int, whole: Free) -> Free:
        """What differs on one axis only from what is chosen."""

        near: dict[Variable, tuple[Domain, Numbers]] = {}
        for variable, (domain, at) in whole.items():
            now = self.choices[variable[0]]
            rest = now[:a], now[a + 1 :]
            same = [n for n in at.tolist() if (domain.orders[n][:a], domain.orders[n][a + 1 :]) == rest]
            near[variable] = domain, np.array(same)
        return near

    def _improve_around(
        self,
        variable: Variable,
        whole: Free,
        allowed: Callable[[Choices], bool],
        last: dict[Variable, Choices],
        least: float,
        at_once: int,
    ) -> bool | None:
        """Choose best for a variable and those beside it if that may save more than the `least`, unless all is as it
        was when it could not be improved."""
        if self.effort.stops():
            return False
        beside = self.estimate.beside(*variable)
        now = [self.choices[k] for k in self.estimate.beside(*beside)]
        if last.get(variable) == now:
            return False
        near = {*beside}
        better = self.improve(
            {v: domain for v, domain in whole.items() if not near.isdisjoint(v)}, allowed, least, at_once
        )
        if better is False:
            last[variable] = now
        return better

    def improve(
        self,
        free: Free,
        allowed: Callable[[Choices], bool] = lambda choices: True,
        least_gain: float = 0.0,
        at_once: int = _AT_ONCE,
    ) -> bool | None:
        """Choose best for the variables that are `free`, as all others stand, if that may save more than `least_gain`
        seconds; whether that is better, None where there are too many choices to tell."""
        estimate, weights = self.estimate, self.weights
        free = estimate.worth(free, self.choices, weights, least_gain)
        if not free:
            return False
        tables, whole = estimate.tables(free, self.choices, weights, at_once=at_once)
        if not whole:
            return None
        self.solves += 1
        self.effort.count(sum(table.costs.size for table in tables))
        best = least(tables, {variable[0]: len(at) for variable, (_, at) in free.items()}, _JOINED // len(free))
        tried = list(self.choices)
        for variable, (domain, at) in free.items():
            for kind in variable:
                tried[kind] = domain.orders[at[best.choices[variable[0]]]]
        kinds = [kind for variable in free for kind in variable if tried[kind] != self.choices[kind]]
        if estimate.cost(kinds, tried, weights) >= estimate.cost(kinds, self.choices, weights) or not allowed(tried):
            return False
        self.choices = tried
        return True

    def _try(self, some: Mapping[Variable, Order], allowed: Callable[[Choices], bool]) -> bool:
        """Choose so for some variables if that is better."""
        tried, kinds = list(self.choices), [kind for variable in some for kind in variable]
        for variable, choice in some.items():
            for kind in variable:
                tried[kind] = choice
        now = self.estimate.cost(kinds, self.choices, self.weights)
        if self.estimate.cheaper(kinds, tried, now, self.weights) and allowed(tried):
            self.choices = tried
            return True
        return False

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
    """Mesh axes that some annotation keeps off a class which wants them elsewhere."""
    flood, graph = problem.flood, problem.graph
    fixed = [(value, cut) for value, (cut, _) in flood.fixed.items()]
    fixed += [(flood.apart.get(i, graph.outputs[i]), cut) for i, (cut, _) in flood.outputs.items()]
    for value, cut in fixed:
        for leaf, axes in zip(flood.leaves(value), cut, strict=True):
            yield from (w.axis.name for w in flood.wants.get(leaf, ()) if w.axis not in axes and not w.offered)


def _grouping(flood: Flood) -> Iterator[str]:
    """Mesh axes that shard groups of rows: for the sake of their products, and what is beside these may stay whole."""
    for leaf in (x for owners in flood.owners.values() for x in owners):
        yield from (w.axis.name for w in flood.wants.get(leaf, ()))


def better(a: Search, b: Search) -> Search:
    """Of two searches in other problems that are about as fast, the one that sends less; else the faster one."""
    whole = [search.estimate.whole(search.choices) for search in (a, b)]
    near = max(map(sum, whole)) <= min(map(sum, whole)) * TIE
    keys = [tuple(map(grained, seconds[::-1] if near else (sum(seconds),))) for seconds in whole]
    return b if keys[1] < keys[0] else a
