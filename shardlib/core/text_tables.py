"""Formats text for plans: counts with prefixes, columns, and folding of repeated lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardlib.core.name_patterns import group_names, strip_numbers


def format_si(n: float, unit: str) -> str:
    """Formats a count with a decimal prefix: `11.4 MB`."""
    n = float(f"{n:.3g}") if n >= 1e3 else n  # 999,999 B are 1 MB
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= power:
            return f"{n / power:.3g} {prefix}{unit}"
    return f"{n:g} {unit}"


def format_table(rows: Sequence[tuple[str, ...]], limit: int = 64) -> list[str]:
    """Aligns rows in columns; a cell longer than `limit` does not widen its column."""
    if not rows:
        return []
    n = max(map(len, rows))
    full = [(*r, *("",) * (n - len(r))) for r in rows]
    widths = [max([len(r[i]) for r in full if len(r[i]) <= limit], default=0) for i in range(n)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in full]


def fold_names(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merges rows whose first cells differ only by an index (`layers[0]`, `layers[1]`), and appends their number."""
    return [(f"{name} x {n}" if n > 1 else name, *rest) for name, n, rest in group_names(rows)]


@dataclass(frozen=True)
class Row:
    """One line: a head, figures and a note, and its depth. A row of one cell spans all columns."""

    cells: tuple[str, ...]
    depth: int = 0

    @property
    def shape(self) -> tuple[str, ...]:
        """The cells without numbers in head and note: equal for lines that repeat for another layer."""
        if len(self.cells) == 1:
            return self.cells
        head, *figures, note = self.cells
        return (strip_numbers(head), *figures, strip_numbers(note))


_LONGEST = 400  # lines of one block


def fold_rows(rows: Sequence[Row]) -> list[Row]:
    """Replaces consecutive repeats of a block of lines by the first one, under a line with their number."""
    ids: dict[tuple[str, ...], int] = {}
    shapes = [ids.setdefault(row.shape, len(ids)) for row in rows]
    heads = [len(row.cells) == 1 for row in rows]
    out: list[Row] = []
    for i, period, times in find_repeats(shapes, heads):
        block, last = rows[i : i + period], rows[i + (times - 1) * period : i + times * period]
        if times == 1:
            out += block
            continue
        out.append(Row((f"{times} times{_difference(block, last)}:",), min(r.depth for r in block)))
        out += [Row(r.cells, r.depth + 1) for r in block]
    return out


def indent_rows(rows: Sequence[Row]) -> list[str]:
    """Formats rows as lines: cells in columns, indented by depth."""
    lines = iter(format_table([("  " * (r.depth + 1) + r.cells[0], *r.cells[1:]) for r in rows if len(r.cells) > 1]))
    return ["  " * (r.depth + 1) + r.cells[0] if len(r.cells) == 1 else next(lines) for r in rows]


def find_repeats(keys: Sequence[int], heads: Sequence[bool]) -> Iterator[tuple[int, int, int]]:
    """Splits a sequence into repeated blocks; yields the start of each, its period, and how often it stands there.

    `heads` marks headings: a block that has one starts with one. An item without repeats is a block of its own.

    Example:
        >>> list(find_repeats([1, 2, 1, 2, 3], [False] * 5))
        [(0, 2, 2), (4, 1, 1)]
    """
    i = 0
    while i < len(keys):
        period, times = _best_repeat(keys, i, heads)
        yield i, period, times
        i += period * times


def _best_repeat(shapes: Sequence[int], i: int, heads: Sequence[bool]) -> tuple[int, int]:
    """Returns period and number of the repeats from item `i` that save most items; (1, 1) without repeats."""
    best, saved = (1, 1), 1
    for j in range(i + 1, min(i + _LONGEST, (i + len(shapes)) // 2 + 1)):
        if heads[j] and not heads[i]:
            break
        if shapes[j] != shapes[i]:
            continue
        period, times = j - i, 1
        block = shapes[i:j]
        while shapes[i + times * period : i + (times + 1) * period] == block:
            times += 1
        if (times - 1) * period > saved:
            best, saved = (period, times), (times - 1) * period
    return best


def _difference(first: Sequence[Row], last: Sequence[Row]) -> str:
    """Returns `, differing in layers[0] ... layers[31]` for the first index that runs through the repeats."""
    for a, b in zip(_words(first), _words(last), strict=False):
        if a != b:
            return f", differing in {a} ... {b}"
    return ""


def _words(rows: Sequence[Row]) -> Iterator[str]:
    """Yields names with an index; those of inputs first, which are the most telling."""
    text = " ".join(cell for row in rows for cell in row.cells)
    yield from re.findall(r"\w+\[\d+\]|(?<=\.)\w+\.\d+(?=\.)", text)
    yield from re.findall(r"\b[A-Za-z]\w*_\d+\b", text)
