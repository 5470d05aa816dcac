"""The seconds and memory of a chain-shaped pipeline, and a lower bound for all orders of its fragments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from shardlib.compiler.stages.fragments import Fragment, PipelineShape
from shardlib.compiler.stages.timetable import Orders, Timetable, make_timetable


@dataclass(frozen=True)
class PipelineTimes:
    """The seconds of each kind of fragment per stage, and of a `transfer` between neighbors; one chunk per stage.

    Stage i holds the saved values of at most `memory[i]` microbatches.
    """

    shape: PipelineShape
    seconds: Mapping[str, Sequence[float]]
    transfer: float
    memory: Sequence[int]

    @cached_property
    def needs(self) -> Callable[[Fragment], tuple[Fragment, ...]]:
        """Returns the fragments that one needs."""
        return cache(self.shape.needs)

    def seconds_of(self, fragment: Fragment) -> float:
        """Returns the seconds of a fragment."""
        return self.seconds[fragment.kind][fragment.stage]

    def timetable(self, orders: Orders) -> Timetable:
        """Simulates orders."""
        return make_timetable(orders, self.needs, self.seconds_of, lambda source, target: self.transfer)


def lower_bound(times: PipelineTimes) -> float:
    """Returns seconds that no order of the fragments undercuts: the maximum over stages of three bounds.

    Let r be the first second in which stage i can run a backward fragment: after one way to the last stage and back.

    * Work: before r the stage runs forward fragments only, as many as its memory holds. It is idle for the rest of r.
    * Drain: all F and B of the stage, and W of all microbatches but those in memory, run before its last B has ended.
      The backward fragments of earlier stages, and a W of one of them, follow.
    * Memory: the n-th forward fragment waits until n - `memory[i]` microbatches have made their way and are released.
      The last microbatch makes its way after its forward fragment has started.
    """
    m = times.shape.microbatches
    starts = [0.0] * m  # of the n-th forward fragment of a stage, at the earliest
    bounds = []
    for stage in range(times.shape.stages):
        f, b, w = _seconds(times, stage)
        most = min(times.memory[stage], m)
        way = f + _round_trip(times, stage) + b
        tail = _drain(times, stage)
        for n in range(1, m):
            released = starts[n - most] + way + w if n >= most else 0.0
            starts[n] = max(starts[n], starts[n - 1] + f, released)
        idle = max(starts[0], starts[0] + way - b - most * f)
        bounds += [
            idle + m * (f + b + w),
            idle + m * (f + b) + (m - most) * w + tail,
            starts[-1] + way + tail,
        ]
        starts = [start + f + times.transfer for start in starts]  # the next stage's arrivals
    return max(bounds)


def _seconds(times: PipelineTimes, stage: int) -> tuple[float, float, float]:
    f, b, w = (times.seconds[kind][stage] if kind in times.seconds else 0.0 for kind in "FBW")
    return f, b, w


def _round_trip(times: PipelineTimes, stage: int) -> float:
    """Returns the seconds from the end of F to the begin of B of a microbatch, if no stage is busy."""
    later = range(stage + 1, times.shape.stages)
    return sum(sum(_seconds(times, i)[:2]) + 2 * times.transfer for i in later)


def _drain(times: PipelineTimes, stage: int) -> float:
    """Returns the seconds from the end of a stage's last B to the end of all fragments that follow it."""
    seconds, latest = 0.0, 0.0
    for i in reversed(range(stage + 1)):
        _, b, w = _seconds(times, i)
        seconds += times.transfer + b if i < stage else 0.0
        latest = max(latest, seconds + w)
    return latest
