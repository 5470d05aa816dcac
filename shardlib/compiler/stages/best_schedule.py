"""`best_schedule`: searches the order of a small pipeline's fragments, and says how far it may be from the best.

List schedules by several rules are the start. A best-first search then swaps neighbors on the critical path, as in job
shops (van Laarhoven, Aarts and Lenstra, "Job shop scheduling by simulated annealing", 1992).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardlib.compiler.simulate.simulated import clock
from shardlib.compiler.stages.fragments import Fragment, PipelineShape
from shardlib.compiler.stages.list_schedule import list_schedule
from shardlib.compiler.stages.pipeline_times import PipelineTimes, lower_bound
from shardlib.compiler.stages.schedules import SCHEDULES, order_fragments
from shardlib.compiler.stages.timetable import Orders, Timetable
from shardlib.core.errors import ShardingError

MOST_STAGES, MOST_MICROBATCHES = 8, 16
_TRIALS = 300  # timetables that the search makes


@dataclass(frozen=True)
class BestSchedule:
    """The best order of fragments that a search saw, and a lower bound for all orders.

    `bound` is in seconds.
    """

    timetable: Timetable
    bound: float

    @cached_property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The orders as texts, a row per stage, for `sl.microbatch(schedule=...)`."""
        return tuple(tuple(map(str, order)) for order in self.timetable.orders)

    @property
    def seconds(self) -> float:
        """The seconds of all microbatches, from the first start to the last finish."""
        return self.timetable.seconds

    @property
    def gap(self) -> float:
        """The share by which `seconds` exceeds the bound; 0 if no order is faster."""
        return max(0.0, self.seconds / self.bound - 1)

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """The microbatches whose saved values each stage holds at once, at most."""
        return tuple(map(self.timetable.live, range(len(self.rows))))

    def __str__(self) -> str:
        bound = f"{clock(self.seconds)}, lower bound {clock(self.bound)}, gap {self.gap:.1%}"
        return f"{bound}; live microbatches per stage: {', '.join(map(str, self.memory))}\n{self.timetable}"

    __repr__ = __str__


def best_schedule(
    stages: int,
    microbatches: int,
    *,
    seconds: Mapping[str, float | Sequence[float]] | None = None,
    transfer: float = 0.0,
    memory: int | Sequence[int] | None = None,
) -> BestSchedule:
    """Searches the fastest order of a pipeline's fragments, for at most 8 stages and 16 microbatches.

    `seconds` has the seconds of fragments of the kinds `"F"`, `"B"` and, if the gradients of weights are fragments of
    their own, `"W"`: one number, or one per stage. The default is 1 for F and 2 for B. `transfer` is the seconds of a
    message between stages. `memory` bounds the microbatches whose saved values a stage holds at once, as one number or
    one per stage. Of orders that are equally fast, the one that holds fewer is better.

    Raises `ShardingError` for larger pipelines and for arguments that do not fit, and names all of them.

    Example:
        >>> best = best_schedule(2, 4, seconds={"F": 1, "B": 1, "W": 1}, memory=2)
        >>> print(best)
        13 s, lower bound 13 s, gap 0.0%; live microbatches per stage: 2, 2
        13 s, bubble 7.7%, a column is 1 s
        stage 0  01 aA2bB3cCdD
        stage 1   0a1Ab2Bc3dCD
        >>> best.rows[0][:4]
        ('F0', 'F1', 'B0', 'W0')
    """
    times = _read_arguments(stages, microbatches, seconds or {"F": 1.0, "B": 2.0}, transfer, memory)
    bound = lower_bound(times)
    tables = [times.timetable(orders) for orders in _first_orders(times)]
    return BestSchedule(_search(times, [table for table in tables if _fits(table, times)], bound), bound)


# Rules of list schedules: the kinds from the first to the last, and the most microbatches that a stage holds at once.
# The limit follows from its memory, the number of stages behind it, and the number of all stages.
_KINDS = ("BFW", "FBW", "BWF", "WBF")
_LIMITS: Sequence[Callable[[int, int, int], int]] = (
    lambda memory, following, stages: memory,
    lambda memory, following, stages: min(memory, stages),  # as many as the first stage under 1F1B
    lambda memory, following, stages: min(memory, following + 1),  # 1F1B
    lambda memory, following, stages: min(memory, 3 * following // 2 + 1),
    lambda memory, following, stages: min(memory, 2 * following + 1),  # fills the way to the last stage and back
)


def _first_orders(times: PipelineTimes) -> Iterator[Orders]:
    """Yields the orders of list schedules, which fit into memory, and those of the schedules by name."""
    kinds = dict.fromkeys("".join(kind for kind in order if kind in times.shape.kinds) for order in _KINDS)
    for rule in itertools.product(kinds, _LIMITS):
        yield _order_by_rule(times, *rule)
    for name, schedule in SCHEDULES.items():
        if schedule.chunks in (1, None) and schedule.split_weights == times.shape.split_weights:
            yield order_fragments(name, times.shape)


def _order_by_rule(times: PipelineTimes, kinds: str, limit: Callable[[int, int, int], int]) -> Orders:
    stages = times.shape.stages
    limits = [limit(most, stages - 1 - stage, stages) for stage, most in enumerate(times.memory)]

    def priority(f: Fragment, full: bool) -> int:
        return -1 if full and f.kind == "W" else kinds.index(f.kind)

    return list_schedule(times.shape, priority, limits, times.seconds_of, times.transfer)


def _search(times: PipelineTimes, tables: Sequence[Timetable], bound: float) -> Timetable:
    """Explores the timetables from the best one on, until one reaches the bound or the trials are used up."""
    count = itertools.count()  # breaks ties
    heap = [(_score(table), next(count), table) for table in tables]
    heapq.heapify(heap)
    seen = {_key(table.orders) for table in tables}
    best = heap[0]
    trials = 0
    while heap and trials < _TRIALS and best[2].seconds > bound * (1 + 1e-9):
        _, _, table = heapq.heappop(heap)
        for orders in _swaps(table, times):
            if (key := _key(orders)) not in seen:
                seen.add(key)
                trials += 1
                other = times.timetable(orders)
                if _fits(other, times):
                    heapq.heappush(heap, (_score(other), next(count), other))
        best = min([best, *heap[:1]])
    return best[2]


def _fits(table: Timetable, times: PipelineTimes) -> bool:
    return all(table.live(stage) <= most for stage, most in enumerate(times.memory))


def _score(table: Timetable) -> tuple[float, int, int]:
    live = [table.live(stage) for stage in range(len(table.orders))]
    return table.seconds, max(live), sum(live)


def _key(orders: Orders) -> tuple[tuple[Fragment, ...], ...]:
    return tuple(map(tuple, orders))


def _swaps(table: Timetable, times: PipelineTimes) -> Iterator[Orders]:
    """Yields the orders in which two successive fragments on the critical path change places.

    Such a swap is never a deadlock: a way from the first to the second over other stages would take longer than 0 s.
    """
    for first, second in _critical_pairs(table, times):
        if first not in times.needs(second):
            orders = [list(order) for order in table.orders]
            at = orders[first.stage].index(first)
            orders[first.stage][at : at + 2] = second, first
            yield orders


def _critical_pairs(table: Timetable, times: PipelineTimes) -> Iterator[tuple[Fragment, Fragment]]:
    """Yields pairs of one stage, from the end of the critical path to its begin, that run without a pause."""
    before = {b: a for order in table.orders for a, b in itertools.pairwise(order)}
    f = max(table.spans, key=lambda f: table.spans[f][1])
    while True:
        start = table.spans[f][0]
        previous = before.get(f)
        if previous is not None and table.spans[previous][1] == start:
            yield previous, f
            f = previous
        elif needs := times.needs(f):
            (f,) = needs
        else:
            return


def _read_arguments(stages: Any, microbatches: Any, seconds: Any, transfer: Any, memory: Any) -> PipelineTimes:
    """Raises one `ShardingError` for all arguments of `best_schedule` that do not fit."""
    faults = [
        f"{name}={value!r} is no number from 1 to {most}"
        for name, value, most in (("stages", stages, MOST_STAGES), ("microbatches", microbatches, MOST_MICROBATCHES))
        if type(value) is not int or not 1 <= value <= most
    ]
    table = dict(seconds) if isinstance(seconds, Mapping) else {}
    if set(table) not in ({"F", "B"}, {"F", "B", "W"}):
        faults.append(f"seconds={seconds!r} does not map 'F' and 'B', or 'F', 'B' and 'W', to seconds")
    faults += [
        f"seconds[{kind!r}]={value!r} is no number of seconds above 0, or one for each of {stages} stages"
        for kind, value in table.items()
        if not _is_per_stage(value, stages, lambda x: _is_number(x) and x > 0)
    ]
    if not _is_number(transfer) or transfer < 0:
        faults.append(f"transfer={transfer!r} is no number of seconds")
    if memory is not None and not _is_per_stage(memory, stages, lambda x: type(x) is int and x > 0):
        faults.append(f"memory={memory!r} is no number of microbatches above 0, or one for each of {stages} stages")
    if faults:
        raise ShardingError(
            "best_schedule has arguments that do not fit",
            faults,
            rule=f"the search serves at most {MOST_STAGES} stages and {MOST_MICROBATCHES} microbatches",
            remedy='a schedule by name serves all sizes: sl.microbatch(..., schedule="zb_h1")',
        )
    rows = {kind: _per_stage(value, stages) for kind, value in table.items()}
    shape = PipelineShape(stages, microbatches, split_weights="W" in rows)
    limits = _per_stage(microbatches if memory is None else memory, stages)
    return PipelineTimes(shape, rows, float(transfer), limits)


def _is_per_stage(value: Any, stages: Any, is_valid: Callable[[Any], bool]) -> bool:
    """True for a valid number, and for a sequence with one per stage."""
    return all(map(is_valid, value)) and len(value) == stages if isinstance(value, Sequence) else is_valid(value)


def _per_stage(value: Any, stages: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * stages


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
