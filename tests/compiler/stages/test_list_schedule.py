"""List schedules: limits of memory, seconds, and transfers."""

from __future__ import annotations

import pytest

from shardlib.compiler.stages.fragments import Fragment, PipelineShape
from shardlib.compiler.stages.list_schedule import list_schedule
from shardlib.compiler.stages.timetable import make_timetable, refuse_incomplete


def backward_first(f: Fragment, full: bool) -> int:
    return "BFW".index(f.kind)


def texts(orders: object) -> list[str]:
    return [" ".join(map(str, order)) for order in orders]  # type: ignore[attr-defined]


def test_limits_and_priorities_give_1f1b() -> None:
    orders = list_schedule(PipelineShape(2, 3), backward_first, limits=[2, 1])
    assert texts(orders) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


def test_a_free_stage_runs_what_is_ready_first() -> None:
    """B0 arrives at stage 0 after 1 + 1 + 1 + 1 s: a second before that, F3 starts."""
    orders = list_schedule(PipelineShape(2, 4), backward_first, limits=[4, 4], transfer=1.0)
    assert texts(orders)[0] == "F0 F1 F2 F3 B0 B1 B2 B3"


def test_priorities_know_whether_memory_is_full() -> None:
    def weights_when_full(f: Fragment, full: bool) -> int:
        return -1 if full and f.kind == "W" else backward_first(f, full)

    shape = PipelineShape(1, 3, split_weights=True)
    assert texts(list_schedule(shape, weights_when_full, limits=[2])) == ["F0 B0 F1 W0 B1 F2 B2 W1 W2"]


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("limit", [3, 4, 6])
def test_runs_every_fragment_within_memory(chunks: int, folded: bool, limit: int) -> None:
    """A place for later chunks is kept, so that no stage waits for ever."""
    shape = PipelineShape(3, 7, chunks, folded, split_weights=True)
    orders = list_schedule(shape, lambda f, full: (f.kind != "B", -f.chunk), [limit] * 3, lambda f: 1.0 + f.stage)
    refuse_incomplete(orders, shape)
    table = make_timetable(orders, shape.needs, lambda f: 1.0 + f.stage)
    assert max(map(table.live, range(3))) <= limit
