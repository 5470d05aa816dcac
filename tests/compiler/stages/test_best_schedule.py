"""`sl.best_schedule` against every order of tiny pipelines, and against the schedules by name."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.compiler.stages.best_schedule import BestSchedule
from shardlib.compiler.stages.fragments import PipelineShape
from shardlib.compiler.stages.schedules import order_fragments
from shardlib.compiler.stages.timetable import make_timetable

Row = tuple[tuple[str, int], ...]
Seconds = Mapping[str, Sequence[float]]


def rows_of_a_stage(kinds: str, microbatches: int) -> Iterator[Row]:
    """Yields the orders of a stage in which fragments of one kind run in the order of microbatches.

    The n-th fragment of a kind may always be that of microbatch n: microbatches are equal, so names can change places.
    """

    def extend(done: tuple[int, ...]) -> Iterator[Row]:
        if min(done) == microbatches:
            yield ()
        for k, kind in enumerate(kinds):
            if done[k] < (done[k - 1] if k else microbatches):
                for rest in extend((*done[:k], done[k] + 1, *done[k + 1 :])):
                    yield ((kind, done[k]), *rest)

    return extend((0,) * len(kinds))


def simulate(rows: Sequence[Row], seconds: Seconds, transfer: float) -> float:
    """Returns the seconds of rows, and infinity for a deadlock."""
    last = len(rows) - 1
    ends: dict[tuple[str, int, int], float] = {}
    left = [list(row) for row in rows]
    clocks = [0.0] * len(rows)
    moved = True
    while moved:
        moved = False
        for i, row in enumerate(left):
            if not row:
                continue
            kind, m = row[0]
            needs = {"F": ("F", m, i - 1), "B": ("B", m, i + 1) if i < last else ("F", m, i), "W": ("B", m, i)}
            need = needs[kind]
            if need[2] >= 0 and need not in ends:
                continue
            arrival = ends[need] + transfer * (need[2] != i) if need[2] >= 0 else 0.0
            clocks[i] = ends[kind, m, i] = max(clocks[i], arrival) + seconds[kind][i]
            row.pop(0)
            moved = True
    return math.inf if any(left) else max(clocks)


def live(row: Row) -> int:
    last = row[-1][0]
    steps = itertools.accumulate((kind == "F") - (kind == last) for kind, _ in row)
    return max(steps)


def least_seconds(seconds: Seconds, microbatches: int, transfer: float, memory: Sequence[int]) -> float:
    rows = list(rows_of_a_stage("".join(seconds), microbatches))
    choices = [[row for row in rows if live(row) <= most] for most in memory]
    return min(simulate(combined, seconds, transfer) for combined in itertools.product(*choices))


TINY: list[Any] = [(2, 2, "FB"), (2, 3, "FB"), (3, 3, "FB"), (2, 2, "FBW"), (2, 3, "FBW"), (3, 2, "FBW")]
TINY += [pytest.param(3, 4, "FB", marks=pytest.mark.long)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("stages", "microbatches", "kinds"), TINY)
def test_no_order_of_a_tiny_pipeline_is_faster(stages: int, microbatches: int, kinds: str, seed: int) -> None:
    draw = random.Random(f"{stages} {microbatches} {kinds} {seed}")
    seconds = {kind: [draw.choice([1.0, 2.0, 3.0]) for _ in range(stages)] for kind in kinds}
    transfer = draw.choice([0.0, 0.5, 2.0])
    memory = [draw.randint(1, microbatches) for _ in range(stages)]
    best = sl.best_schedule(stages, microbatches, seconds=seconds, transfer=transfer, memory=memory)
    least = least_seconds(seconds, microbatches, transfer, memory)
    assert best.bound <= least == best.seconds
    assert all(held <= most for held, most in zip(best.memory, memory, strict=True))


def by_name(name: str, shape: PipelineShape, seconds: Mapping[str, float]) -> Any:
    return make_timetable(order_fragments(name, shape), shape.needs, lambda f: seconds[f.kind])


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 12)])
@pytest.mark.parametrize(
    ("name", "seconds"),
    [("1f1b", {"F": 1.0, "B": 2.0}), ("zb_h1", {"F": 1.0, "B": 1.0, "W": 1.0})],
)
def test_is_as_fast_as_schedules_by_name_with_their_memory(
    name: str, seconds: dict[str, float], stages: int, microbatches: int
) -> None:
    """Without a transfer both reach the bound."""
    shape = PipelineShape(stages, microbatches, split_weights="W" in seconds)
    table = by_name(name, shape, seconds)
    memory = [table.live(i) for i in range(stages)]
    best = sl.best_schedule(stages, microbatches, seconds=seconds, memory=memory)
    assert best.seconds == best.bound == table.seconds
    assert best.gap == 0


@pytest.mark.parametrize(("stages", "microbatches", "memory"), [(3, 4, None), (4, 8, 5)])
def test_swaps_reach_the_bound_where_rules_do_not(stages: int, microbatches: int, memory: int | None) -> None:
    best = sl.best_schedule(stages, microbatches, seconds={"F": 1.5, "B": 2.0, "W": 2.0}, memory=memory)
    assert best.seconds == best.bound


def test_more_memory_hides_transfers() -> None:
    seconds = {"F": 1.0, "B": 2.0}
    tight, loose = (sl.best_schedule(4, 8, seconds=seconds, transfer=0.25, memory=n) for n in (4, 7))
    assert loose.seconds == loose.bound < tight.seconds
    assert max(tight.memory) <= 4 < max(loose.memory) <= 7


def test_is_accepted_by_microbatch_and_order_fragments() -> None:
    best = sl.best_schedule(2, 4, seconds={"F": 1, "B": 1, "W": 1})
    orders = order_fragments(best.rows, PipelineShape(2, 4, split_weights=True))
    assert [tuple(map(str, order)) for order in orders] == list(best.rows)
    assert sl.microbatch(torch.sum, torch.ones(4), n=4, schedule=best.rows, reduce="sum") == 4


def test_prints_seconds_bound_gap_and_memory() -> None:
    best = sl.best_schedule(2, 2, memory=1)
    assert isinstance(best, BestSchedule)
    assert str(best).splitlines() == [
        "12 s, lower bound 12 s, gap 0.0%; live microbatches per stage: 1, 1",
        "12 s, bubble 50.0%, a column is 1 s",
        "stage 0  0   aa1   bb",
        "stage 1   0aa   1bb",
    ]


REFUSED = {
    "stages": ((9, 4), {}, r"\* stages=9 is no number from 1 to 8"),
    "microbatches": ((2, 17), {}, r"\* microbatches=17 is no number from 1 to 16"),
    "both": ((0, True), {}, r"(?s)\* stages=0 is .*\* microbatches=True is .*Remedy: a schedule by name"),
    "kinds": ((2, 4), {"seconds": {"F": 1}}, r"seconds=\{'F': 1\} does not map 'F' and 'B', or 'F', 'B' and 'W'"),
    "seconds": ((2, 4), {"seconds": {"F": 1, "B": [1, 2, 3]}}, r"seconds\['B'\]=\[1, 2, 3\] .* each of 2 stages"),
    "zero": ((2, 4), {"seconds": {"F": 0, "B": 1}}, r"seconds\['F'\]=0 is no number of seconds above 0"),
    "transfer": ((2, 4), {"transfer": -1}, r"transfer=-1 is no number of seconds"),
    "memory": ((2, 4), {"memory": [4, 0]}, r"memory=\[4, 0\] is no number of microbatches above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_arguments_that_do_not_fit(case: str) -> None:
    args, options, text = REFUSED[case]
    with pytest.raises(sl.ShardingError, match=text):
        sl.best_schedule(*args, **options)
