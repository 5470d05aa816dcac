"""The search: the slot of every unit that gets each mesh axis, by one minimum of estimated seconds.

Every variable, some kinds of units that choose together, has a domain: a choice for each way in which it can be
sharded. Costs are tables over these. Where all tables can be written down, the minimum is found at once
(`bucket_elimination`); in larger problems the search finds the minimum of one axis, and that of the variables around
each, until nothing improves.

`choices` hold what is decided so far; whatever else is tried starts there, on the same problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.solver.bucket_elimination import Numbers, least
from shardlib.compiler.propagate.solver.cost import Choices, Estimate, Free, Weights, grained
from shardlib.compiler.propagate.solver.domains import Cuts, Domain, Domains, Offer, Variable
from shardlib.compiler.propagate.solver.edges import Kind
from shardlib.compiler.propagate.solver.effort import Effort
from shardlib.compiler.propagate.solver.problem import Order, Problem

TIE = 1.05  # estimates are no better than that: of two ends as near, the one that sends less
_DEARER = (2.0, 4.0, 12.0, 256.0)
_LEAST = 1e-3  # the share of the estimated time that a variable and its neighbors may save, or nobody looks at them
_AT_ONCE = 1 << 18  # entries of tables that are worth working out to find a minimum,
_NEARBY = 1 << 13  # around one variable: first where there are few,
_JOINED = 1 << 21  # and of those that are made of several on the way


@dataclass(frozen=True)
class State:
    """The decisions, and the dims that may take an axis which no annotation requests."""

    choices: Choices
    offers: frozenset[Offer] = frozenset()


class Search:
    """The choices of all kinds of a problem; with a `start`, the one that it gives for a member of each."""

    def __init__(
        self, problem: Problem, start: Callable[[Op | Value], Order] | None = None, effort: Effort | None = None
    ) -> None:
        self.problem, self.allowed, self.weights = problem, Domains(problem), Weights()
        self.estimate = Estimate(problem, self.allowed.cut)
        self.effort = Effort() if effort is None else effort
        self.solves = 0  # minima that were sought
        self._priced: dict[Estimate, int] = {}  # ways from layout to layout, when last counted
        propagation = problem.propagation
        requests = [
            (problem.families.get(leaf, leaf), w) for leaf, requests in propagation.requests.items() for w in requests
        ]
        self.offers: frozenset[Offer] = frozenset((leaf, w.axis.name) for leaf, w in requests if w.offered)
        self.choices: Choices = [self.domain((kind,)).orders[0] for kind in range(len(problem.members))]
        if start is not None:
            self.choices = [start(problem.first(kind)) for kind in range(len(problem.members))]
            self.settle((kind,) for kind in range(len(problem.members)))

    @property
    def state(self) -> State:
        return State(self.choices, self.offers)

    @state.setter
    def state(self, state: State) -> None:
        self.choices, self.offers = state.choices, state.offers

    @property
    def seconds(self) -> float:
        """The estimated time of the whole program."""
        return self.estimate.total(self.choices)

    @property
    def has_choice(self) -> bool:
        """Returns whether parts of a unit may be better apart."""
        return bool(self.allowed.contested or self.offers)

    def order(self, member: Op | Value) -> Order:
        """The choice of a member, for every mesh axis."""
        return self.choices[self.problem.kind[self.problem.units.unit[member]]]

    def cut(self, member: Op | Value) -> Cuts:
        """The mesh axes on each slot of a member's unit."""
        unit = self.problem.units.unit[member]
        kind = self.problem.kind.get(unit)
        return ((),) * len(unit.slots) if kind is None else self.allowed.cut(kind, self.choices[kind])

    def variables(self) -> list[Variable]:
        """The kinds that choose alike, as parts of one unit do until they are taken apart."""
        parts: dict[object, list[Kind]] = {}
        for g, group in enumerate(self.problem.groups):
            for kind in group:
                parts.setdefault((g, self.choices[kind]), []).append(kind)
        return [tuple(kinds) for kinds in parts.values()]

    def candidates(self, kind: Kind, name: str) -> list[int]:
        """The slots that may take a mesh axis; ~s for a slot s to which it is offered."""
        return self.allowed.candidates(kind, name, self.offers)

    def domain(self, variable: Variable) -> Domain:
        """A choice for each way in which a variable can be sharded now."""
        return self.allowed.of(variable, self.offers)

    def settle(self, variables: Iterable[Variable]) -> None:
        """Take for every variable the choice of its domain that shards as its present one, or the first."""
        choices, cut = list(self.choices), self.allowed.cut
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
        nothing improves or the effort is spent: of one axis, of each variable, and of all variables around each, those
        first that cost most."""
        last: dict[Variable, Choices] = {}  # the choices around it with which nothing could be improved
        kinds = [kind for variable in whole for kind in variable]
        least = _LEAST * self.estimate.cost(kinds, self.choices, self.weights)
        axes = range(len(self.problem.atoms)) if len(self.problem.atoms) > 1 else ()
        nearby = _NEARBY
        moves: tuple[Callable[[], list[bool | None]], ...] = (
            lambda: [self.improve(self._on_axis(a, whole), allowed) for a in axes],
            lambda: [self.improve({variable: domain}, allowed) for variable, domain in whole.items()],
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

    def spare(self, whole: Free, limit: float) -> None:
        """Send fewer bytes within a limit of seconds: follow the minimum while bytes grow dearer and dearer."""
        seconds, weights = self.estimate, self.weights
        self.estimate = bytes_alone = self.of_bytes

        def spares(choices: Choices) -> bool:
            fewer = bytes_alone.parts(choices)[1] <= bytes_alone.parts(self.choices)[1]
            return fewer and seconds.total(choices) <= limit

        before = self.choices
        self.weights = replace(weights, sent=_DEARER[-1])
        self.minimize(whole)
        fewer = bytes_alone.parts(self.choices)[1] < bytes_alone.parts(before)[1]
        self.choices = before
        for dear in _DEARER if fewer else ():
            self.weights = replace(weights, sent=dear)
            self.minimize(whole, spares)
        self.estimate, self.weights = seconds, weights

    @property
    def of_bytes(self) -> Estimate:
        """The estimate of the bytes of messages, without their latency."""
        if self._of_bytes is None:
            self._of_bytes = Estimate(self.problem, self.allowed.cut, of_bytes=True)
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
        priced = estimate.priced
        self.effort.count(sum(table.costs.size for table in tables), priced - self._priced.get(estimate, 0))
        self._priced[estimate] = priced
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


def better(a: Search, b: Search) -> Search:
    """Of two searches in other problems that are about as fast, the one that sends less; else the faster one."""
    whole = [search.estimate.whole(search.choices) for search in (a, b)]
    near = max(map(sum, whole)) <= min(map(sum, whole)) * TIE
    keys = [tuple(map(grained, seconds[::-1] if near else (sum(seconds),))) for seconds in whole]
    return b if keys[1] < keys[0] else a
