"""Writes a plan as a table for notebooks: plain HTML with inline styles, which loads nothing."""

from __future__ import annotations

import html
from collections.abc import Sequence

from shardlib.core.text_tables import Row

Cells = tuple[str, ...]
Section = tuple[str, Sequence[Row | Cells]]  # its title, and its lines

_CELL = "padding:1px 12px 1px 0;text-align:left;white-space:pre;vertical-align:top;border:none"
_TITLE = f"{_CELL};font-weight:bold;padding-top:8px"
_SENDS = "background:rgba(255,183,3,.25)"  # a collective
_QUIET = "color:gray"  # a source line


def page(heading: str, sections: Sequence[Section], totals: Sequence[Cells], notes: Sequence[str]) -> str:
    """Returns one table: the sections, then the totals, then notes over the whole width."""
    sections = [*sections, ("", totals)]
    width = max([len(_cells(line)) for _, lines in sections for line in lines], default=1)
    rows = []
    for title, lines in sections:
        if title:
            rows.append(_row([title], width, _TITLE))
        rows += [_line(line, width) for line in lines]
    rows += [_row([note], width, f"{_CELL};{_QUIET}") for note in notes]
    table = f'<table style="font-family:monospace;font-size:12px;border-collapse:collapse">{"".join(rows)}</table>'
    return f'<div style="overflow-x:auto"><div style="font-weight:bold">{html.escape(heading)}</div>{table}</div>'


def _cells(line: Row | Cells) -> Cells:
    return line.cells if isinstance(line, Row) else line


def _line(line: Row | Cells, width: int) -> str:
    cells, depth = _cells(line), line.depth if isinstance(line, Row) else 0
    sends = isinstance(line, Row) and len(cells) > 1 and cells[0].startswith("!")
    style = _SENDS if sends else _QUIET if isinstance(line, Row) and len(cells) == 1 else ""
    first, *rest = cells
    return _row(["  " * depth + first, *rest], width, f"{_CELL};{style}" if style else _CELL)


def _row(cells: Sequence[str], width: int, style: str) -> str:
    """Returns a row; its last cell spans the rest of the table."""
    *first, last = (html.escape(cell) for cell in cells)
    parts = [f'<td style="{style}">{cell}</td>' for cell in first]
    return f'<tr>{"".join(parts)}<td style="{style}" colspan="{width - len(first)}">{last}</td></tr>'
