"""Pictures of a timetable: its text, its figure, and its trace."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from shardlib.compiler.stages.fragments import PipelineShape
from shardlib.compiler.stages.pictures import draw_figure
from shardlib.compiler.stages.schedules import SCHEDULES, order_fragments
from shardlib.compiler.stages.timetable import Timetable, make_timetable
from shardlib.core.errors import ShardingError


def timetable(name: str, stages: int, microbatches: int, unit: float = 1.0) -> Timetable:
    schedule = SCHEDULES[name]
    shape = PipelineShape(stages, microbatches, schedule.chunks or 1, schedule.folded, schedule.split_weights)
    return make_timetable(order_fragments(name, shape), shape.needs, lambda f: unit)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "rows"),
    [
        ("gpipe", 3, 4, ["0123    abcd", " 0123  abcd", "  0123abcd"]),
        ("1f1b", 3, 4, ["012  a3b c d", " 01 a2b3c d", "  0a1b2c3d"]),
        ("gpipe", 1, 11, ["01234567890abcdefghijk"]),
        ("zb_h1", 2, 3, ["01 aA2bBcC", " 0a1bA2cBC"]),
    ],
)
def test_text_has_a_row_per_stage(name: str, stages: int, microbatches: int, rows: list[str]) -> None:
    head, *lines = str(timetable(name, stages, microbatches)).splitlines()
    assert lines == [f"stage {i}  {row}" for i, row in enumerate(rows)]
    assert head.endswith("a column is 1 s")


def test_long_fragments_take_several_columns_and_wide_texts_are_scaled() -> None:
    shape = PipelineShape(2, 2)
    table = make_timetable(order_fragments("gpipe", shape), shape.needs, lambda f: {"F": 1.0, "B": 3.0}[f.kind])
    assert str(table).splitlines()[1:] == ["stage 0  01    aaabbb", "stage 1   01aaabbb"]
    wide = str(timetable("1f1b", 2, 400)).splitlines()
    assert max(map(len, wide)) <= len("stage 0  ") + 161


def test_figure_has_a_bar_and_a_label_per_fragment(tmp_path: Path) -> None:
    table = timetable("zb_v", 2, 4)
    (axes,) = draw_figure(table).axes
    assert Counter(text.get_text() for text in axes.texts) == Counter({str(m): 12 for m in range(4)})
    bars = [bar for bar in axes.patches if bar.get_width()]
    assert len({bar.get_facecolor()[:3] for bar in bars}) == 3
    assert len({bar.get_alpha() for bar in bars}) == 2
    ends = {
        f: (bar.get_x(), bar.get_width(), round(bar.get_y() + 0.4)) for f, bar in zip(table.spans, bars, strict=True)
    }
    assert ends == {f: (1e3 * a, pytest.approx(1e3 * (b - a)), f.stage) for f, (a, b) in table.spans.items()}
    for name in ("table.png", "table.svg"):
        table.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_a_plot_without_matplotlib_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ShardingError, match=r"(?s)needs matplotlib, which is not installed.*pip install matplotlib"):
        timetable("gpipe", 2, 2).plot(tmp_path / "table.png")


def test_perfetto_has_a_track_per_stage(tmp_path: Path) -> None:
    table = timetable("zb_h1", 3, 4, unit=1e-3)
    table.to_perfetto(tmp_path / "table.json")
    events = json.loads((tmp_path / "table.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["stage 0", "stage 1", "stage 2"]
    bars = [e for e in events if e["ph"] == "X"]
    assert {(tracks[e["tid"]], e["name"]) for e in bars} == {(f"stage {f.stage}", str(f)) for f in table.spans}
    assert max(e["ts"] + e["dur"] for e in bars) == pytest.approx(1e6 * table.seconds)
    assert bars[0]["args"] == {"kind": "F", "microbatch": 0, "stage": 0, "chunk": 0}
