"""Finds periodic stretches in a row of numbers: candidates for the layers of a graph."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

MIN_REPEATS = 6  # fewest repeats in a run
_MAX_PERIODS = 256  # most periods that are tried


class Run(NamedTuple):
    """A stretch of ops from `start` on: `times` repeats of `period` ops."""

    start: int
    period: int
    times: int


def find_runs(row: np.ndarray[Any, np.dtype[np.int64]], below: int | None = None) -> list[Run]:
    """Returns disjoint periodic stretches of a row of numbers, with periods `below` a limit, the longest first.

    Example:
        >>> find_runs(np.array([9, *[1, 2] * 6, 3]))
        [Run(start=1, period=2, times=6)]
    """
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i, x in enumerate(row.tolist()):
        if x in last:
            distances[i - last[x]] += 1
        last[x] = i
    candidates: list[Run] = []
    periods = [period for period, _ in distances.most_common(_MAX_PERIODS) if below is None or period < below]
    for period in periods:
        differs = np.flatnonzero(row[period:] != row[:-period])
        ends = np.concatenate([[-1], differs, [len(row) - period]])
        for before, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            if (count := (end - before - 1) // period + 1) >= MIN_REPEATS:
                candidates.append(Run(before + 1, period, count))
    taken = np.zeros(len(row), dtype=bool)
    runs: list[Run] = []
    for run in sorted(candidates, key=lambda r: (-r.period * r.times, r.period)):
        stretch = slice(run.start, run.start + run.period * run.times)
        if not taken[stretch].any():
            taken[stretch] = True
            runs.append(run)
    return runs
