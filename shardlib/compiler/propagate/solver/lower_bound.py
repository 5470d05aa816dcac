"""How good a decision can be at all: a lower bound on the estimate, whatever the search finds.

It is the minimum of the same costs, with every op deciding alone, or less where that is too much to write down: a table
that is too large counts nothing, and one that would become too large on the way is minimized in parts (`tables`).

It covers the choices that decisions have: a dim takes axes that an annotation or an offer gave it, in the factors that
propagation found. What cutting another dim could do is not bounded: 0 % above it says that the search is good, not that
nobody could plan better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardlib.compiler.propagate.solver.bucket_elimination import Numbers, floors, least
from shardlib.compiler.propagate.solver.cost import Choices, Weights
from shardlib.compiler.propagate.solver.domains import Domain, Variable
from shardlib.compiler.propagate.solver.edges import Kind
from shardlib.compiler.propagate.solver.search import Search

_WRITTEN, _BRIEFLY = 1 << 20, 1 << 14  # entries of a cost that are worth working out, and where that shall be quick
_TURNS = 30
_MANY = 128  # decisions, above which choices are not given up one by one
_TRIALS = 3  # to write down all costs, with sums of so many entries to tell what may be given up
_ROUGHLY = 1 << 14
_ROUNDING = 1e-9  # sums in another order


@dataclass(frozen=True)
class LowerBound:
    """How far the decisions of a plan are from the best, by the estimate that they are made by.

    `seconds`: nothing that could be decided is estimated to take less; `decided`: what was decided takes. `exact` where
    `seconds` is the minimum itself. `decisions` is the number of those taken apart: one for each op and value, or for
    all that are alike.

    Example:
        >>> print(LowerBound(100e-6, 102e-6, True, 12))
        102.0 us, 2 % above the minimum of 100.0 us (12 decisions)
    """

    seconds: float
    decided: float
    exact: bool
    decisions: int

    @property
    def gap(self) -> float:
        """How much longer the decision takes than the bound, as a share of the bound."""
        if self.decided <= self.seconds * (1 + _ROUNDING):
            return 0.0
        return self.decided / self.seconds - 1 if self.seconds else math.inf

    def __str__(self) -> str:
        what = f"{'the minimum' if self.exact else 'a bound'} of {self.seconds * 1e6:.1f} us"
        return f"{self.decided * 1e6:.1f} us, {100 * self.gap:.3g} % above {what} ({self.decisions} decisions)"


@dataclass(frozen=True)
class Minimum:
    """At least `seconds`, and `exact` where choices reach it; `choices` are good ones, those then."""

    seconds: float
    exact: bool
    choices: Choices


def lower_bound(search: Search, *, brief: bool = False) -> LowerBound:
    """The bound on what was decided, every op deciding alone where it may; a lower one where it shall be there in a
    `brief` time."""
    variables = _deciding(search)
    decided, best = search.estimate.cost(_kinds(variables), search.choices), minimum(search, brief=brief)
    return LowerBound(min(best.seconds, decided), decided, best.exact, len(variables))


def _deciding(search: Search) -> list[Variable]:
    """Those with a slot that may take an axis: ops, or whole units where nothing is contested."""
    names, kinds = search.problem.atoms, range(len(search.choices))
    variables = [(kind,) for kind in kinds] if search.has_choice else search.problem.groups
    return [v for v in variables if any(search.candidates(kind, name) for kind in v for name in names)]


def _kinds(variables: Iterable[Variable]) -> list[Kind]:
    return [kind for variable in variables for kind in variable]


def minimum(search: Search, largest: int = 1 << 20, *, brief: bool = False) -> Minimum:
    """The least estimate of all choices of a search, or less, with sums of at most that many entries.

    What is known to be above the estimate of what was decided is given up, so that more can be written down.
    """
    estimate, weights, variables = search.estimate, Weights(), _deciding(search)
    limit = estimate.cost(_kinds(variables), search.choices)
    domains = {variable: search.domain(variable) for variable in variables}
    worth = estimate.worth({v: (domain, domain.places) for v, domain in domains.items()}, search.choices, weights)
    free: dict[Variable, tuple[Domain, Numbers]] = {}
    for variable, domain in domains.items():
        free[variable] = worth.get(variable, (domain, np.array([domain.number.get(search.choices[variable[0]], 0)])))
    written, turns, largest = (_BRIEFLY, 1, _BRIEFLY) if brief else (_WRITTEN, _TURNS, largest)
    for trial in range(_TRIALS):
        tables, whole = estimate.tables(free, search.choices, weights, written)
        sizes = {v[0]: len(at) for v, (_, at) in free.items()}
        if whole or brief or len(free) > _MANY or trial == _TRIALS - 1:
            break
        floor = floors(tables, sizes, _ROUGHLY)
        free = {
            v: (domain, at[np.broadcast_to(floor[v[0]], len(at)) <= limit * (1 + _ROUNDING)])
            for v, (domain, at) in free.items()
        }
    best = least(tables, sizes, largest, written=written, turns=turns)
    choices = list(search.choices)
    for variable, (domain, at) in free.items():
        for kind in variable:
            choices[kind] = domain.orders[at[best.choices[variable[0]]]]
    return Minimum(best.seconds, whole and best.exact, choices)
