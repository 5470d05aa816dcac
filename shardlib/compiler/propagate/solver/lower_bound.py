"""Computes a lower bound on the estimate of any decision, to compare the search with.

It is the minimum of the same costs, with every op deciding alone. It is less than that where tables get too large: such
a table of one value counts nothing, and such a sum of tables is minimized in parts.

The bound covers the choices of the search: a dim takes axes that an annotation or an offer requests, on the factors of
propagation. Another dim, or other factors, could be better: 0 % above the bound means only that the search is good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardlib.compiler.propagate.solver.bucket_elimination import Numbers, find_floors, find_least
from shardlib.compiler.propagate.solver.domains import Domain, Variable
from shardlib.compiler.propagate.solver.estimate import Choices, Weights
from shardlib.compiler.propagate.solver.search import Search
from shardlib.compiler.propagate.solver.value_records import UnitClass

_WRITTEN = 1 << 20  # the most entries of a table
_TURNS = 30
_MANY = 128  # with more decisions, choices are not ruled out one by one
_TRIALS = 3  # to write down all tables; sums of `_ROUGHLY` entries tell which choices to rule out
_ROUGHLY = 1 << 14
_ROUNDING = 1e-9  # sums in another order


@dataclass(frozen=True)
class LowerBound:
    """A bound of `seconds` on the estimate of any decision, beside the estimate of the present one, `decided`.

    If `exact`, the bound is the minimum itself. `decisions` counts the ops and values, or classes of equal ones, that
    decide.
    """

    seconds: float
    decided: float
    exact: bool
    decisions: int

    @property
    def gap(self) -> float:
        """Returns how much longer the decision takes than the bound, as a share of the bound."""
        if self.decided <= self.seconds * (1 + _ROUNDING):
            return 0.0
        return self.decided / self.seconds - 1 if self.seconds else math.inf

    def __str__(self) -> str:
        bound = f"{'the minimum' if self.exact else 'a bound'} of {self.seconds * 1e6:.1f} us"
        return f"{self.decided * 1e6:.1f} us, {100 * self.gap:.3g} % above {bound} ({self.decisions} decisions)"


@dataclass(frozen=True)
class Minimum:
    """A lower bound, which the `choices` reach if it is `exact`."""

    seconds: float
    exact: bool
    choices: Choices


def lower_bound(search: Search) -> LowerBound:
    """Returns the bound for a search, with every op deciding alone if it may."""
    variables = _deciding(search)
    decided, best = search.estimate.cost(_kinds(variables), search.choices), find_minimum(search)
    return LowerBound(min(best.seconds, decided), decided, best.exact, len(variables))


def _deciding(search: Search) -> list[Variable]:
    """Returns the variables with a slot that may take an axis: ops, or whole units if no axis is contested."""
    names, unit_classes = search.problem.atoms, range(len(search.choices))
    variables = [(unit_class,) for unit_class in unit_classes] if search.has_choice else search.problem.groups
    return [v for v in variables if any(search.candidates(unit_class, name) for unit_class in v for name in names)]


def _kinds(variables: Iterable[Variable]) -> list[UnitClass]:
    return [unit_class for variable in variables for unit_class in variable]


def find_minimum(search: Search, largest: int = 1 << 20) -> Minimum:
    """Returns the least estimate of all choices of a search, or less, with sums of at most `largest` entries.

    Choices that are certainly worse than the present decision are ruled out, so that tables get smaller.
    """
    estimate, weights, variables = search.estimate, Weights(), _deciding(search)
    limit = estimate.cost(_kinds(variables), search.choices)
    domains = {variable: search.domain(variable) for variable in variables}
    worth = estimate.worth({v: (domain, domain.places) for v, domain in domains.items()}, search.choices, weights)
    free: dict[Variable, tuple[Domain, Numbers]] = {}
    for variable, domain in domains.items():
        free[variable] = worth.get(variable, (domain, np.array([domain.number.get(search.choices[variable[0]], 0)])))
    for trial in range(_TRIALS):
        tables, whole = estimate.tables(free, search.choices, weights, _WRITTEN)
        sizes = {v[0]: len(at) for v, (_, at) in free.items()}
        if whole or len(free) > _MANY or trial == _TRIALS - 1:
            break
        floor = find_floors(tables, sizes, _ROUGHLY)
        free = {
            v: (domain, at[np.broadcast_to(floor[v[0]], len(at)) <= limit * (1 + _ROUNDING)])
            for v, (domain, at) in free.items()
        }
    best = find_least(tables, sizes, largest, written=_WRITTEN, turns=_TURNS)
    choices = list(search.choices)
    for variable, (domain, at) in free.items():
        for unit_class in variable:
            choices[unit_class] = domain.orders[at[best.choices[variable[0]]]]
    return Minimum(best.seconds, whole and best.exact, choices)
