"""The text forms of a plan: counts with prefixes, columns, and the folding of lines that repeat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


def si(n: float, unit: str) -> str:
    """A count with a decimal prefix.

    Example:
        >>> si(11_421_708, "B"), si(96, "B")
        ('11.4 MB', '96 B')
    """
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= power:
            return f"{n / power:.3g} {prefix}{unit}"
    return f"{n:g} {unit}"


def table(rows: Sequence[tuple[str, ...]], limit: int = 64) -> list[str]:
    """Rows in columns; a cell longer than `limit` does not widen its column."""
    if not rows:
        return []
    n = max(map(len, rows))
    full = [(*r, *("",) * (n - len(r))) for r in rows]
    widths = [max([len(r[i]) for r in full if len(r[i]) <= limit], default=0) for i in range(n)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in full]


def fold_names(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows whose first cells differ only by an index (`layers[0]`, `layers[1]`) become one, with their number.

    Example:
        >>> fold_names([("w[0]", "f32[4]"), ("w[1]", "f32[4]"), ("b", "f32[4]")])
        [('w[*] x 2', 'f32[4]'), ('b', 'f32[4]')]
    """
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for name, *rest in rows:
        parts = re.split(r"(?<=\[)(\d+)(?=\])|(?<=\.)(\d+)(?=\.|$)", name)
        pieces = [part for part in parts if part is not None]
        pattern = "".join("*" if part.isdecimal() else part for part in pieces)
        groups.setdefault((pattern, *rest), []).append(pieces)
    return [(_common(names), *rest) for (_, *rest), names in groups.items()]


def _common(names: Sequence[Sequence[str]]) -> str:
    """What all names share, with a star where they differ."""
    shared = "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*names, strict=True))
    return shared if len(names) == 1 else f"{shared} x {len(names)}"


@dataclass(frozen=True)
class Row:
    """One line: its cells, and its depth. A row of one cell stands across the columns."""

    cells: tuple[str, ...]
    depth: int = 0

    @property
    def shape(self) -> tuple[str, ...]:
        """What stays when the line is repeated for another layer."""
        if len(self.cells) == 1:
            return self.cells
        head, kind, *rest = self.cells
        return (unnumbered(head), kind, *map(unnumbered, rest))


def unnumbered(text: str) -> str:
    """Names without the numbers of nodes and layers.

    Example:
        >>> unnumbered("mm_3"), unnumbered("layers[3].w1")
        ('mm', 'layers[#].w1')
    """
    return re.sub(r"(?<=\w)_\d+\b", "", re.sub(r"(?<=\[)\d+(?=\])|(?<=\.)\d+(?=\.)", "#", text))


_LONGEST = 400  # lines of one block


def fold(rows: Sequence[Row]) -> list[Row]:
    """Consecutive repeats of a block of lines become the first of them, under a line that says how many there are.

    Example:
        >>> lines = [Row(("a", "1")), Row((f"mm_{0}", "2")), Row((f"mm_{1}", "2")), Row((f"mm_{2}", "2"))]
        >>> [row.cells for row in fold(lines)]
        [('a', '1'), ('3 times, differing in mm_0 ... mm_2:',), ('mm_0', '2')]
    """
    ids: dict[tuple[str, ...], int] = {}
    shapes = [ids.setdefault(row.shape, len(ids)) for row in rows]
    heads = [len(row.cells) == 1 for row in rows]
    out: list[Row] = []
    i = 0
    while i < len(rows):
        period, times = _best(shapes, i, heads)
        if times < 2:
            out.append(rows[i])
            i += 1
            continue
        block, last = rows[i : i + period], rows[i + (times - 1) * period : i + times * period]
        out.append(Row((f"{times} times{_difference(block, last)}:",), min(r.depth for r in block)))
        out += [Row(r.cells, r.depth + 1) for r in block]
        i += period * times
    return out


def indented(rows: Sequence[Row]) -> list[str]:
    """Rows as lines: cells in columns, each line as deep as its row."""
    lines = iter(table([("  " * (r.depth + 1) + r.cells[0], *r.cells[1:]) for r in rows if len(r.cells) > 1]))
    return ["  " * (r.depth + 1) + r.cells[0] if len(r.cells) == 1 else next(lines) for r in rows]


def _best(shapes: Sequence[int], i: int, heads: Sequence[bool]) -> tuple[int, int]:
    """The period and number of the repeats from line `i` on that save most lines; a block that holds a heading starts
    with one.
    """
    best, saved = (0, 0), 1
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
    """`, differing in layers[0] ... layers[31]`: the first index that runs through the repeats."""
    for a, b in zip(_words(first), _words(last), strict=False):
        if a != b:
            return f", differing in {a} ... {b}"
    return ""


def _words(rows: Sequence[Row]) -> Iterator[str]:
    """Names with an index; those of inputs first, as they say most."""
    text = " ".join(cell for row in rows for cell in row.cells)
    yield from re.findall(r"\w+\[\d+\]|(?<=\.)\w+\.\d+(?=\.)", text)
    yield from re.findall(r"\b[A-Za-z]\w*_\d+\b", text)
