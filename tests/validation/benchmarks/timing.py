"""Timings that survive a shared machine: contestants take turns, and only ratios of medians are reported."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Samples = dict[str, list[float]]


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    before: Callable[[], object] = lambda: None,
) -> Samples:
    """Seconds of every call, by contestant. In each round every contestant runs once, the order turned by one.

    `before` runs ahead of each call, outside its time (a barrier, among several processes).
    """
    names = list(contestants)
    samples: Samples = {name: [] for name in names}
    for i in range(-warmup, rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            before()
            start = time.perf_counter()
            contestants[name]()
            if i >= 0:
                samples[name].append(time.perf_counter() - start)
    return samples


@dataclass(frozen=True)
class Ratio:
    """Ratio of medians, with the quartiles of the ratios of single rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


def ratio(ours: Sequence[float], peer: Sequence[float]) -> Ratio:
    by_round = [a / b for a, b in zip(ours, peer, strict=True)]
    low, _, high = statistics.quantiles(by_round, n=4) if len(by_round) > 1 else [by_round[0]] * 3
    return Ratio(statistics.median(ours) / statistics.median(peer), low, high)


def apart(who: str, losses: Sequence[float], expected: Sequence[float], within: float = 1e-4) -> float:
    """The largest relative difference; one that is not small is an error: the timings would compare two programs."""
    error = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    if not error <= within:
        raise ValueError(f"{who} computes other losses than plain torch: {losses}, not {expected}")
    return error


def ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"### {title}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join([*lines, ""])
