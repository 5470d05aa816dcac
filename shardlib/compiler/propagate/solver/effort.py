"""Limits how long a search goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardlib.core.errors import ShardingError

Planning = str | float | None

# Seconds, on one core of a common machine: of a minimum, of a cost that it is found from, of a way from one layout to
# another, and of tracing an op.
_PER_MINIMUM, _PER_ENTRY, _PER_WAY, _PER_OP = 2e-3, 1e-6, 7e-4, 5e-3
_LEAST = 4.0  # that every search may take


@dataclass
class Effort:
    """Searches may take `limit` seconds, and have `spent` some; `stopped` if the limit cut one short.

    The present search may take only a `share` of the limit, and leaves the rest to later ones. Seconds are counted from
    the table entries and layouts that a search prices, not measured: so a program gets the same plan on every machine
    and on every rank.
    """

    limit: float = math.inf
    spent: float = 0.0
    stopped: bool = False
    share: float = 1.0

    @staticmethod
    def limited(planning: Planning, ops: int) -> Effort:
        """Returns the effort for a program of so many ops; by default as long as tracing them, 4 seconds at least."""
        if planning is None:
            return Effort(max(_LEAST, ops * _PER_OP))
        return Effort(_WORDS[planning] if isinstance(planning, str) else planning)

    def stops(self) -> bool:
        """Returns whether the search must stop."""
        stops = self.spent >= self.limit * self.share
        self.stopped = self.stopped or stops
        return stops

    def count(self, entries: int, ways: int) -> None:
        """Counts a minimum over tables with so many entries, and so many newly priced routes between layouts."""
        self.spent += _PER_MINIMUM + entries * _PER_ENTRY + ways * _PER_WAY


_WORDS = {"fast": 0.0, "best": math.inf}


def planning_of(planning: Any) -> Planning:
    """Checks the option `planning`. Raises `ShardingError` for any other value."""
    number = isinstance(planning, int | float) and not isinstance(planning, bool) and planning > 0
    if planning is None or (isinstance(planning, str) and planning in _WORDS) or number:
        return float(planning) if number else planning
    raise ShardingError(
        f"planning={planning!r} does not say how long the search for a plan goes on",
        rule='it is "fast" (no further than the first decision), "best" (until nothing improves), or seconds',
        remedy='planning="fast", or planning=10',
    )
