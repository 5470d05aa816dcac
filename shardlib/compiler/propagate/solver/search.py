"""The search: the slot of every unit that gets each mesh axis, by one minimum of estimated seconds.

Every variable, some unit classes that choose together, has a domain: a choice for each way in which it can be
sharded. Costs are tables over these. Where all tables can be written down, the minimum is found at once
(`bucket_elimination`); in larger problems the search finds the minimum of one axis, and of the variables around each,
until nothing improves.

`choices` hold the present decision; every trial starts there, on the same problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.solver.bucket_elimination import Numbers, find_least, round_to_grain
from shardlib.compiler.propagate.solver.domains import Domain, Domains, Offer, SlotAxes, Variable
from shardlib.compiler.propagate.solver.effort import Effort
from shardlib.compiler.propagate.solver.estimate import Choices, Estimate, Free, Weights
from shardlib.compiler.propagate.solver.problem import Order, Problem
from shardlib.compiler.propagate.solver.value_records import UnitClass

TIE = 1.05  # estimates are no more exact: of two plans within this factor, the one that sends less is better
_DEARER = (2.0, 4.0, 12.0, 256.0)
_LEAST = 1e-3  # the search skips a variable whose neighborhood may save a smaller share of the estimated time
# The most entries of tables for one minimum; around one variable in the first rounds; and of sums of tables.
_AT_ONCE, _NEARBY, _JOINED = 1 << 18, 1 << 13, 1 << 21


@dataclass(frozen=True)
class SearchState:
    """The decisions, and the dims that may take an axis which no annotation requests."""

    choices: Choices
    offers: frozenset[Offer] = frozenset()


class Search:
    """Searches the choices of all unit classes of a problem; begins with `start` of a member of each, if given."""

    def __init__(
        self, problem: Problem, start: Callable[[Op | Value], Order] | None = None, effort: Effort | None = None
    ) -> None:
        self.problem, self.allowed, self.weights = problem, Domains(problem), Weights()
        self.estimate = Estimate(problem, self.allowed.slot_axes)
        self.effort = Effort() if effort is None else effort
        self.solves = 0  # how many minima were computed
        self._priced: dict[Estimate, int] = {}  # routes between layouts at the last count
        propagation = problem.propagation
        requests = [
            (problem.families.get(dim_factor, dim_factor), request)
            for dim_factor, requests in propagation.requests.items()
            for request in requests
        ]
        self.offers: frozenset[Offer] = frozenset((x, request.axis.name) for x, request in requests if request.offered)
        self.choices: Choices = [self.domain((unit_class,)).orders[0] for unit_class in range(len(problem.members))]
        if start is not None:
            self.choices = [start(units[0].first_member) for units in problem.members]
            self.settle((unit_class,) for unit_class in range(len(problem.members)))

    @property
    def state(self) -> SearchState:
        return SearchState(self.choices, self.offers)

    @state.setter
    def state(self, state: SearchState) -> None:
        self.choices, self.offers = state.choices, state.offers

    @property
    def seconds(self) -> float:
        """Returns the estimated time of all units with a choice."""
        return self.estimate.total(self.choices)

    @property
    def has_choice(self) -> bool:
        """Returns whether splitting units may help."""
        return bool(self.allowed.contested or self.offers)

    def order(self, member: Op | Value) -> Order:
        """Returns the choice of a member, for every mesh axis."""
        return self.choices[self.problem.class_of[self.problem.units.unit[member]]]

    def slot_axes(self, member: Op | Value) -> SlotAxes:
        """Returns the mesh axes on each slot of a member's unit."""
        unit = self.problem.units.unit[member]
        unit_class = self.problem.class_of.get(unit)
        if unit_class is None:
            return ((),) * len(unit.slots)
        return self.allowed.slot_axes(unit_class, self.choices[unit_class])

    def variables(self) -> list[Variable]:
        """Returns the unit classes that choose alike, as parts of one unit do until it is split."""
        parts: dict[object, list[UnitClass]] = {}
        for g, group in enumerate(self.problem.groups):
            for unit_class in group:
                parts.setdefault((g, self.choices[unit_class]), []).append(unit_class)
        return [tuple(unit_classes) for unit_classes in parts.values()]

    def candidates(self, unit_class: UnitClass, name: str) -> list[int]:
        """Returns the slots that may take a mesh axis; ~s for a slot s to which it is offered."""
        return self.allowed.candidates(unit_class, name, self.offers)

    def domain(self, variable: Variable) -> Domain:
        """Returns the present domain of a variable."""
        return self.allowed.choices_of(variable, self.offers)

    def settle(self, variables: Iterable[Variable]) -> None:
        """Takes for every variable the choice of its domain that shards like its present one, or the first."""
        choices, slot_axes = list(self.choices), self.allowed.slot_axes
        for variable in variables:
            unit_class, domain = variable[0], self.domain(variable)
            if choices[unit_class] not in domain.number:
                now = slot_axes(unit_class, choices[unit_class])
                choice = next((x for x in domain.orders if slot_axes(unit_class, x) == now), domain.orders[0])
                for k in variable:
                    choices[k] = choice
        self.choices = choices

    def take(self, offer: Offer, variables: Iterable[Variable]) -> None:
        """Lets every variable that holds an offered dim take the axis there, if its domain has such a choice."""
        family, name = offer
        a, choices = self.problem.mesh.axis_names.index(name), list(self.choices)
        for variable in variables:
            unit_class = variable[0]
            slots = {~s for s, dim_factor in enumerate(self.problem.members[unit_class][0].slots)}
            slots = {s for s in slots if self.problem.families[self.problem.members[unit_class][0].slots[~s]] == family}
            rest = (*choices[unit_class][:a], *choices[unit_class][a + 1 :])
            orders = (x for x in self.domain(variable).orders if (*x[:a], *x[a + 1 :]) == rest)
            if taken := next((x for x in orders if slots.intersection(x[a][:1])), None):
                for k in variable:
                    choices[k] = taken
        self.choices = choices

    def domains(self, variables: Iterable[Variable]) -> Free:
        """Returns the domains of variables that have a choice."""
        domains = {variable: self.domain(variable) for variable in variables}
        return {v: (domain, domain.places) for v, domain in domains.items() if len(domain.orders) > 1}

    # The search -----------------------------------------------------------------------------------------------------

    def minimize(self, free: Free, allowed: Callable[[Choices], bool] = lambda choices: True) -> None:
        """Minimizes the estimate over all variables at once, or by local moves if the tables would be too large.

        A move minimizes over one axis, over one variable, or over a variable and its neighbors, the costliest first;
        or it puts all ends of a shared value into one layout, as a weight needs that many layers read.
        Moves go on until none improves or the effort is spent.
        """
        last: dict[Variable, Choices] = {}  # the choices around it with which nothing could be improved
        unit_classes = [unit_class for variable in free for unit_class in variable]
        least = _LEAST * self.estimate.cost(unit_classes, self.choices, self.weights)
        axes = range(len(self.problem.atoms)) if len(self.problem.atoms) > 1 else ()
        nearby = _NEARBY
        moves: tuple[Callable[[], list[bool | None]], ...] = (
            lambda: [self.improve(self._on_axis(a, free), allowed) for a in axes],
            lambda: [self.improve({variable: domain}, allowed) for variable, domain in free.items()],
            lambda: [self._try(some, allowed) for some in self.estimate.align_ends(free, _AT_ONCE)],
            lambda: [self._improve_around(v, free, allowed, last, least, nearby) for v in self._by_cost(free)],
        )
        while self.improve(free, allowed) is None:
            for move in moves[:2]:  # even without effort
                move()
            while any(any(move()) for move in moves if not self.effort.stops()):
                pass
            if nearby == _AT_ONCE or self.effort.stops():
                break
            nearby = _AT_ONCE

    def _try(self, some: Mapping[Variable, Order], allowed: Callable[[Choices], bool]) -> bool:
        """Takes these choices if they cost less."""
        tried, unit_classes = list(self.choices), [unit_class for variable in some for unit_class in variable]
        for variable, choice in some.items():
            for unit_class in variable:
                tried[unit_class] = choice
        now = self.estimate.cost(unit_classes, self.choices, self.weights)
        if self.estimate.is_cheaper(unit_classes, tried, now, self.weights) and allowed(tried):
            self.choices = tried
            return True
        return False

    def _by_cost(self, free: Free) -> list[Variable]:
        return sorted(free, key=lambda variable: -self.estimate.cost(variable, self.choices, self.weights))

    def send_fewer_bytes(self, free: Free, limit: float) -> None:
        """Sends fewer bytes within a limit of seconds: minimizes again with dearer and dearer bytes."""
        seconds, weights = self.estimate, self.weights
        self.estimate = bytes_alone = self.of_bytes

        def sends_less(choices: Choices) -> bool:
            fewer = bytes_alone.decided_seconds(choices)[1] <= bytes_alone.decided_seconds(self.choices)[1]
            return fewer and seconds.total(choices) <= limit

        before = self.choices
        self.weights = replace(weights, sent=_DEARER[-1])
        self.minimize(free)
        fewer = bytes_alone.decided_seconds(self.choices)[1] < bytes_alone.decided_seconds(before)[1]
        self.choices = before
        for dear in _DEARER if fewer else ():
            self.weights = replace(weights, sent=dear)
            self.minimize(free, sends_less)
        self.estimate, self.weights = seconds, weights

    @cached_property
    def of_bytes(self) -> Estimate:
        """Returns the estimate of the bytes of messages, without their latency."""
        return Estimate(self.problem, self.allowed.slot_axes, self.problem.prices.of_bytes)

    @cached_property
    def counting(self) -> Estimate:
        """Returns the estimate whose messages cost their bytes."""
        return Estimate(self.problem, self.allowed.slot_axes, self.problem.prices.counting)

    @contextmanager
    def optimistic(self) -> Iterator[None]:
        """Computes no messages inside ops in this block: those not yet computed cost nothing."""
        self.estimate.optimistic = self.of_bytes.optimistic = True
        try:
            yield
        finally:
            self.estimate.optimistic = self.of_bytes.optimistic = False

    def _on_axis(self, a: int, free: Free) -> Free:
        """Returns the choices that differ from the present ones on one axis only."""

        near: dict[Variable, tuple[Domain, Numbers]] = {}
        for variable, (domain, at) in free.items():
            now = self.choices[variable[0]]
            rest = now[:a], now[a + 1 :]
            same = [n for n in at.tolist() if (domain.orders[n][:a], domain.orders[n][a + 1 :]) == rest]
            near[variable] = domain, np.array(same)
        return near

    def _improve_around(
        self,
        variable: Variable,
        free: Free,
        allowed: Callable[[Choices], bool],
        last: dict[Variable, Choices],
        least: float,
        at_once: int,
    ) -> bool | None:
        """Minimizes over a variable and its neighbors if that may save more than `least` seconds.

        Skips the variable if all choices around it are those of its last vain try.
        """
        if self.effort.stops():
            return False
        near = self.estimate.neighbors(*variable)
        now = [self.choices[k] for k in self.estimate.neighbors(*near)]
        if last.get(variable) == now:
            return False
        better = self.improve(
            {v: domain for v, domain in free.items() if not {*near}.isdisjoint(v)}, allowed, least, at_once
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
        """Minimizes over the `free` variables, all others fixed, if that may save more than `least_gain` seconds.

        Returns whether the estimate improves; None if the tables would be too large.
        """
        estimate, weights = self.estimate, self.weights
        free = estimate.worth(free, self.choices, weights, least_gain)
        if not free:
            return False
        tables, complete = estimate.tables(free, self.choices, weights, at_once=at_once)
        if not complete:
            return None
        self.solves += 1
        priced = estimate.priced
        self.effort.count(sum(table.costs.size for table in tables), priced - self._priced.get(estimate, 0))
        self._priced[estimate] = priced
        best = find_least(tables, {variable[0]: len(at) for variable, (_, at) in free.items()}, _JOINED // len(free))
        tried = list(self.choices)
        for variable, (domain, at) in free.items():
            for unit_class in variable:
                tried[unit_class] = domain.orders[at[best.choices[variable[0]]]]
        changed = [k for variable in free for k in variable if tried[k] != self.choices[k]]
        now = estimate.cost(changed, self.choices, weights)
        if estimate.cost(changed, tried, weights) >= now or not allowed(tried):
            return False
        self.choices = tried
        return True


def choose_search(a: Search, b: Search) -> Search:
    """Returns the search that sends less, of two whose results are about as fast; else the faster one."""
    return (a, b)[pick_least_sent([search.estimate.program_seconds(search.choices) for search in (a, b)])]


def pick_least_sent(seconds: Sequence[tuple[float, float]]) -> int:
    """Returns the position of the decision that sends least, among those about as fast as the fastest.

    `seconds` has those of arithmetic and of communication, for each decision.
    """
    limit = min(map(sum, seconds)) * TIE
    near = [i for i, pair in enumerate(seconds) if sum(pair) <= limit]
    return min(near, key=lambda i: tuple(map(round_to_grain, seconds[i][::-1])))
