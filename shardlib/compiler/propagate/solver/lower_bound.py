"""How good a decision can be at all: a lower bound on the estimate, whatever the search finds.

It is the minimum of the same costs, with every op deciding alone, or less where that is too much to write down: a table
that is too large counts nothing, and one that would become too large on the way is minimised in parts (`tables`).

It covers the choices that decisions have: a dim takes axes that an annotation or an offer gave it, in the factors that
the flood found. What cutting another dim could do is not bounded: 0 % above it says that the search is good, not that
nobody could plan better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlib.compiler.propagate.solver.bucket_elimination import floors, least
from shardlib.compiler.propagate.solver.cost import Choices
from shardlib.compiler.propagate.solver.search import Decider

_WRITTEN = 1 << 20  # entries of a cost that are worth working out
_TURNS = 30
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


def lower_bound(decider: Decider, apart: Decider) -> LowerBound:
    """The bound on what was decided; `apart` has the same to decide, op by op."""
    decided, found = decider.seconds, minimum(apart)
    return LowerBound(min(found.seconds, decided), decided, found.exact, len(apart.problem.members))


def minimum(decider: Decider, largest: int = 1 << 20) -> Minimum:
    """The least estimate of all choices that a decider has, or less, with sums of at most that many entries.

    What is known to be above the estimate of what was decided is given up, so that more can be written down.
    """
    estimate, limit = decider.estimate, decider.seconds
    worth = estimate.worth(dict(enumerate(decider.domains)), decider.choices)
    free = {kind: worth.get(kind, [choice]) for kind, choice in enumerate(decider.choices)}
    for _ in range(_TRIALS):
        tables, whole = estimate.tables(free, decider.choices, _WRITTEN)
        sizes = {kind: len(domain) for kind, domain in free.items()}
        if whole:
            break
        floor = floors(tables, sizes, _ROUGHLY)
        free = {
            kind: [x for x, seconds in zip(domain, floor[kind], strict=True) if seconds <= limit * (1 + _ROUNDING)]
            for kind, domain in free.items()
        }
    found = least(tables, sizes, largest, written=_WRITTEN, turns=_TURNS)
    best = [domain[found.choices[kind]] for kind, domain in free.items()]
    return Minimum(found.seconds, whole and found.exact, best)
