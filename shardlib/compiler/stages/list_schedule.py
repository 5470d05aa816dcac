"""List schedules: every stage that is free runs the best of its ready fragments.

Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardlib.compiler.stages.fragments import Fragment, PipelineShape
from shardlib.compiler.stages.timetable import Orders

Priority = Callable[[Fragment, bool], Any]  # of a fragment, and True if memory holds a forward fragment up


def list_schedule(
    shape: PipelineShape,
    priority: Priority,
    limits: Sequence[int],
    seconds: Callable[[Fragment], float] = lambda fragment: 1.0,
    transfer: float = 0.0,
) -> Orders:
    """Returns the order of every stage if a free stage runs its ready fragment of the least priority value.

    Stage i holds the saved values of at most `limits[i]` chunks' microbatches. A forward fragment leaves a place for
    each later chunk of its stage, so that the microbatches in flight can end. Fragments of one kind and chunk run in
    the order of microbatches. `seconds` of a fragment are more than 0; a `transfer` between stages may take none.
    """
    return _ListSchedule(shape, priority, limits, seconds, transfer).run()


class _Choice(NamedTuple):
    start: float
    stage: int
    fragment: Fragment


class _ListSchedule:
    def __init__(
        self,
        shape: PipelineShape,
        priority: Priority,
        limits: Sequence[int],
        seconds: Callable[[Fragment], float],
        transfer: float,
    ) -> None:
        self.shape, self.priority, self.limits, self.seconds, self.transfer = shape, priority, limits, seconds, transfer
        self.queues = [_queues(shape, stage) for stage in range(shape.stages)]
        self.needs = {f: shape.needs(f) for stage in range(shape.stages) for f in shape.fragments(stage)}
        self.orders: list[list[Fragment]] = [[] for _ in self.queues]
        self.ends: dict[Fragment, float] = {}
        self.clocks = [0.0] * shape.stages
        self.held = [0] * shape.stages
        self.last = shape.kinds[-1]  # the kind that frees what a forward fragment saves

    def run(self) -> Orders:
        choices = {stage: self._choose(stage) for stage in range(self.shape.stages)}
        while any(choices.values()):
            start, stage, fragment = min(filter(None, choices.values()))
            self._run(start, stage, fragment)
            for i, queues in enumerate(self.queues):
                if i == stage or any(fragment in self.needs[queue[0]] for queue in queues):
                    choices[i] = self._choose(i)
        return self.orders

    def _choose(self, stage: int) -> _Choice | None:
        """Returns what a stage runs next, and when: the best of the fragments that can start first."""
        heads = [queue[0] for queue in self.queues[stage] if self._fits(queue[0])]
        starts = {f: start for f in heads if (start := self._start(f)) is not None}
        if not starts:
            return None
        first, full = min(starts.values()), self._is_full(stage)
        best = min((f for f in starts if starts[f] == first), key=lambda f: self.priority(f, full))
        return _Choice(first, stage, best)

    def _start(self, fragment: Fragment) -> float | None:
        """Returns the first second in which a fragment can run, or None if it needs one that has not run."""
        start = self.clocks[fragment.stage]
        for f in self.needs[fragment]:
            if f not in self.ends:
                return None
            start = max(start, self.ends[f] + (self.transfer if f.stage != fragment.stage else 0.0))
        return start

    def _fits(self, f: Fragment) -> bool:
        return f.kind != "F" or self.held[f.stage] + self.shape.chunks - 1 - f.chunk < self.limits[f.stage]

    def _is_full(self, stage: int) -> bool:
        """True if forward fragments are left, and those of the first chunk do not fit."""
        left = any(queue[0].kind == "F" for queue in self.queues[stage])
        return left and self.held[stage] + self.shape.chunks - 1 >= self.limits[stage]

    def _run(self, start: float, stage: int, fragment: Fragment) -> None:
        (queue,) = (queue for queue in self.queues[stage] if queue[0] == fragment)
        queue.popleft()
        if not queue:
            self.queues[stage].remove(queue)
        self.orders[stage].append(fragment)
        self.held[stage] += (fragment.kind == "F") - (fragment.kind == self.last)
        self.clocks[stage] = self.ends[fragment] = start + self.seconds(fragment)


def _queues(shape: PipelineShape, stage: int) -> list[deque[Fragment]]:
    """Returns the fragments of a stage, a queue for every kind and chunk."""
    pairs = [(kind, chunk) for kind in shape.kinds for chunk in range(shape.chunks)]
    return [deque(Fragment(kind, m, stage, chunk) for m in range(shape.microbatches)) for kind, chunk in pairs]
