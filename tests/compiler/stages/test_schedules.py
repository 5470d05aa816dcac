"""Pipeline schedules against the formulas of their papers, counted on the orders that run."""

from __future__ import annotations

import pytest

from shardlib.compiler.stages.fragments import Fragment, PipelineShape
from shardlib.compiler.stages.schedules import SCHEDULES, order_fragments
from shardlib.compiler.stages.timetable import Timetable, make_timetable
from shardlib.core.errors import ShardingError

SIZES = [(2, 2), (2, 5), (3, 7), (4, 4), (4, 8), (4, 16), (8, 16)]


def shape_of(name: str, stages: int, microbatches: int, chunks: int | None = None) -> PipelineShape:
    schedule = SCHEDULES[name]
    chunks = chunks or schedule.chunks or 2
    return PipelineShape(stages, microbatches, chunks, schedule.folded, schedule.split_weights)


def timetable(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Timetable:
    """The timetable if each fragment of a whole chunk takes a second, and a backward one without `W` takes two."""
    shape = shape_of(name, stages, microbatches, chunks)
    seconds = {"F": 1.0, "B": 1.0 if shape.split_weights else 2.0, "W": 1.0}
    orders = order_fragments(name, shape)
    return make_timetable(orders, shape.needs, lambda f: seconds[f.kind] / shape.chunks)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble(name: str, stages: int, microbatches: int) -> None:
    table = timetable(name, stages, microbatches, chunks=1)
    assert table.bubble == pytest.approx((stages - 1) / (stages - 1 + microbatches))
    for stage in range(stages):
        assert table.idle(stage) == pytest.approx(3 * (stages - 1))


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_interleaving_divides_the_bubble(stages: int, microbatches: int, chunks: int) -> None:
    table = timetable("interleaved_1f1b", stages, microbatches, chunks)
    assert table.idle(0) == pytest.approx(3 * (stages - 1) / chunks)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_zb_h1_has_a_third_of_the_bubble(stages: int, microbatches: int) -> None:
    """There are at least as many microbatches as stages: all stages work at once."""
    assert timetable("zb_h1", stages, microbatches).idle(0) == pytest.approx(stages - 1)


@pytest.mark.parametrize("stages", range(2, 9))
def test_zb_v_waits_only_at_the_ends(stages: int) -> None:
    """F, B and W take a unit each, and there are at least two microbatches per stage."""
    for microbatches in (2 * stages, 2 * stages + 1, 3 * stages + 2):
        shape = shape_of("zb_v", stages, microbatches)
        orders = order_fragments("zb_v", shape)
        table = make_timetable(orders, shape.needs, lambda f: 1.0)
        for stage, order in enumerate(orders):
            starts, ends = zip(*map(table.spans.__getitem__, order), strict=True)
            assert max(ends) - min(starts) == table.busy(stage) == 6 * microbatches
            assert min(starts) == stage
            assert table.live(stage) == 2 * stages
        assert table.seconds == 6 * microbatches + stages - 1


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_live_microbatches(stages: int, microbatches: int) -> None:
    one_f_one_b, gpipe = (timetable(name, stages, microbatches, chunks=1) for name in ("1f1b", "gpipe"))
    zb_h1, zb_v = timetable("zb_h1", stages, microbatches), timetable("zb_v", stages, microbatches)
    for stage in range(stages):
        assert one_f_one_b.live(stage) == min(stages - stage, microbatches)
        assert gpipe.live(stage) == microbatches
        assert zb_h1.live(stage) <= stages
        assert zb_v.live(stage) <= 2 * stages


def test_a_comparator_of_the_user() -> None:
    shape = PipelineShape(stages=3, microbatches=4)

    def forward_first(a: Fragment, b: Fragment, shape: PipelineShape) -> bool:
        return (a.kind, b.kind) == ("F", "B")

    orders = order_fragments(forward_first, shape)
    assert [list(order) for order in orders] == [list(order) for order in order_fragments("gpipe", shape)]
    assert [str(f) for f in order_fragments(lambda a, b, shape: False, shape)[0]] == [
        "F0",
        "F1",
        "F2",
        "F3",
        "B0",
        "B1",
        "B2",
        "B3",
    ]


def test_a_list_of_the_user() -> None:
    rows = [["F0", "F1", "B1", "B0"], ["F0", "F1", "B1", "B0"]]
    orders = order_fragments(rows, PipelineShape(2, 2))
    assert [[str(f) for f in order] for order in orders] == rows


BAD = {
    "a deadlock": (
        [["F0", "B0", "F1", "B1"], ["F1", "F0", "B1", "B0"]],
        r"(?s)its stages wait for each other.*\* B0 of stage 0 needs B0 of stage 1, which comes behind F1 of stage 1"
        r".*\* F1 of stage 1 needs F1 of stage 0, which comes behind B0 of stage 0",
    ),
    "a fragment left out": (
        [["F0", "F1", "B0"], ["F0", "B0", "F1", "B1", "B1"]],
        r"(?s)does not run every fragment once.*\* B1 of stage 0 is left out.*\* B1 of stage 1 runs 2 times",
    ),
    "a stage left out": ([["F0", "F1", "B0", "B1"]], r"it orders 1 stages, where there are 2"),
    "an unknown fragment": (
        [["F0", "F1", "B0", "B1", "B7"], ["F0", "B0", "F1", "B1"]],
        r"\* B7 of stage 0 does not exist",
    ),
    "no fragment": ([["F0", "G1"]], r"'G1' is no fragment"),
    "an unknown name": ("2f2b", r"(?s)no pipeline schedule is called '2f2b'.*there are gpipe, 1f1b"),
    "a contradiction": (lambda a, b, shape: True, r"(?s)contradicts itself.*B0 of stage 0 and .* each run before"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    schedule, text = BAD[case]
    with pytest.raises(ShardingError, match=text):
        order_fragments(schedule, PipelineShape(stages=2, microbatches=2))
