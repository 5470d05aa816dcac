"""Pictures of a timetable: text, a figure, and a trace for Perfetto."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shardlib.compiler.simulate.perfetto import Span, write_trace
from shardlib.compiler.simulate.simulated import clock
from shardlib.compiler.stages.fragments import Fragment
from shardlib.core.plots import new_figure

if TYPE_CHECKING:
    from shardlib.compiler.stages.timetable import Timetable

_KINDS = {"F": "forward", "B": "backward", "W": "gradients of weights"}
_COLUMNS = 160  # of the widest text


def draw_text(table: Timetable) -> str:
    """Draws a row per stage: of microbatch 0, `0` is F, `a` is B, and `A` is W; digits and letters repeat.

    A column is as long as the shortest fragment, unless the rows would be wider than 160 columns.
    """
    lengths = [end - start for start, end in table.spans.values() if end > start]
    column = max(min(lengths, default=1.0), table.seconds / _COLUMNS)
    lines = [f"{clock(table.seconds)}, bubble {table.bubble:.1%}, a column is {clock(column)}"]
    width = len(str(len(table.orders) - 1))
    for stage, order in enumerate(table.orders):
        cells = [" "] * (round(table.seconds / column) + 1)
        for f in order:
            start, end = (round((t - table.first) / column) for t in table.spans[f])
            end = max(end, start + 1)
            cells[start:end] = _symbol(f) * (end - start)
        lines.append(f"stage {stage:<{width}}  {''.join(cells).rstrip()}")
    return "\n".join(lines)


def _symbol(f: Fragment) -> str:
    return str(f.microbatch % 10) if f.kind == "F" else chr(ord("a" if f.kind == "B" else "A") + f.microbatch % 26)


def draw_figure(table: Timetable) -> Any:
    """Draws stages against milliseconds: bars colored by kind, paler for later chunks, labeled with microbatches."""
    figure = new_figure(min(4 + 0.25 * max(map(len, table.orders), default=0), 40), 1.5 + 0.4 * len(table.orders))
    axes = figure.subplots()
    for f, (start, end) in table.spans.items():
        color = f"C{list(_KINDS).index(f.kind)}"
        width, left = 1e3 * (end - start), 1e3 * (start - table.first)
        axes.barh(f.stage, width, left=left, color=color, alpha=1 / (1 + f.chunk), edgecolor="white")
        axes.text(left + width / 2, f.stage, str(f.microbatch), ha="center", va="center", fontsize=7, clip_on=True)
    kinds = {f.kind for f in table.spans}
    for i, (kind, label) in enumerate(_KINDS.items()):
        if kind in kinds:
            axes.barh(0, 0, color=f"C{i}", label=label)
    axes.set_yticks(range(len(table.orders)), [f"stage {i}" for i in range(len(table.orders))])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"{clock(table.seconds)}, bubble {table.bubble:.1%}")
    figure.legend(loc="outside lower center", ncols=len(_KINDS))
    return figure


def write_perfetto(table: Timetable, path: str | os.PathLike[str]) -> None:
    """Writes a trace that Perfetto opens, with a track per stage."""
    spans = (
        Span(f"stage {f.stage}", str(f), start - table.first, end - start, dict(zip(f._fields, f, strict=True)))
        for f, (start, end) in table.spans.items()
    )
    name = f"pipeline of {len(table.orders)} stages"
    write_trace(path, name, (f"stage {i}" for i in range(len(table.orders))), spans)
