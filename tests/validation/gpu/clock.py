"""Times on a GPU: CUDA events, warm-up, contestants by turns, an empty L2 cache before each, medians and quartiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 << 20  # several times an H100's or H200's L2


@dataclass(frozen=True)
class Times:
    """Seconds of one call: the median and the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high)

    def rate(self, work: float, unit: float) -> str:
        """Work per second in `unit`, with its quartiles: a short time is a high rate."""
        return f"{work / self.median / unit:.0f} ({work / self.high / unit:.0f}-{work / self.low / unit:.0f})"


def race(
    contestants: Mapping[str, Callable[[], object]],
    device: str,
    *,
    rounds: int = 20,
    warmup: int = 3,
    calls: int = 1,
) -> dict[str, Times]:
    """Seconds of a call of every contestant; in each round everyone has a turn, of `calls` calls in a row.

    The GPU is kept behind the host, so that no gap before a launch counts: before every turn it empties the cache.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    spans: list[tuple[str, Any, Any]] = []
    flush = torch.empty(FLUSH_BYTES if device == "cuda" else 1 << 10, dtype=torch.uint8, device=device)
    for i in range(-warmup, rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            flush.zero_()
            start, end = _mark(device), _mark(device)
            start.record()
            for _ in range(calls):
                contestants[name]()
            end.record()
            if i >= 0:
                spans.append((name, start, end))
        if i == -1 and device == "cuda":
            torch.cuda.synchronize()
    if device == "cuda":
        torch.cuda.synchronize()
    for name, start, end in spans:
        seconds[name].append(start.elapsed_time(end) / 1e3 / calls)
    return {name: Times.of(values) for name, values in seconds.items()}


class _HostMark:
    """An event of the host's clock, for rehearsals on a machine with no GPU."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _HostMark) -> float:
        return max(end.at - self.at, 1e-9) * 1e3


def _mark(device: str) -> Any:
    return torch.cuda.Event(enable_timing=True) if device == "cuda" else _HostMark()
