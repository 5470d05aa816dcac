"""How long a search goes on."""

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
    """How long searches go on: for `limit` seconds, of which so many are `spent`; `stopped`: it did not suffice.
    A search may take a `share` of them until it leaves the rest to others.

    The seconds are counted, not measured, from what is looked at: so a program gets the same plan on every machine and
    on every rank.
    """

    limit: float = math.inf
    spent: float = 0.0
    stopped: bool = False
    share: float = 1.0

    @staticmethod
    def of(planning: Planning, ops: int) -> Effort:
        """The effort for a program of so many ops; by default as long as tracing them, 4 seconds at least.

        Example:
            >>> Effort.of("fast", 100).limit, Effort.of(None, 100).limit, Effort.of(None, 2000).limit
            (0.0, 4.0, 10.0)
        """
        if planning is None:
            return Effort(max(_LEAST, ops * _PER_OP))
        return Effort(_WORDS[planning] if isinstance(planning, str) else planning)

    def stops(self) -> bool:
        """Returns whether nothing more shall be looked at."""
        stops = self.spent >= self.limit * self.share
        self.stopped = self.stopped or stops
        return stops

    def count(self, entries: int, ways: int) -> None:
        """Count a minimum over tables of so many entries, for which so many ways between layouts were worked out."""
        self.spent += _PER_MINIMUM + entries * _PER_ENTRY + ways * _PER_WAY


_WORDS = {"fast": 0.0, "best": math.inf}


def planning_of(planning: Any) -> Planning:
    """What a user says of the time for planning. Raises `ShardingError` for what says nothing."""
    number = isinstance(planning, int | float) and not isinstance(planning, bool) and planning > 0
    if planning is None or (isinstance(planning, str) and planning in _WORDS) or number:
        return float(planning) if number else planning
    raise ShardingError(
        f"planning={planning!r} does not say how long the search for a plan goes on",
        rule='it is "fast" (no further than the first decision), "best" (until nothing improves), or seconds',
        remedy='planning="fast", or planning=10',
    )
