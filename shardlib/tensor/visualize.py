"""Draws the shards of a tensor on the devices: as text for terminals, as SVG for notebooks.

A grid shows the last two dims, divided wherever a shard begins or ends. Every block of the dims before them has a grid
of its own. A block names the ranks that hold it: several ranks for copies, ranks joined by `+` for the addends of a
partial sum. A sharded factor inside a dim shows as stripes. Ranks that hold nothing are listed at the end.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardlib.core.errors import ShardingError
from shardlib.sharding.chunks import shard_range
from shardlib.sharding.layout import Dim, Layout
from shardlib.sharding.mesh.axis import Coords
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.sharded_tensor import ShardedTensor, format_mesh_axes, typeof

Span = tuple[int, int]
Block = tuple[int, ...]  # the number of a stretch of each dim

_MOST = 8  # drawn stretches of a dim
_HIDDEN = "..."


@dataclass(frozen=True)
class Picture:
    """The ranks of every block; prints as text, and notebooks draw it.

    `stretches` are those of every dim, None for omitted ones. `ranks` maps a block to the text of its ranks, `first` to
    its lowest rank; `empty` lists the ranks that hold nothing.
    """

    title: str
    stretches: tuple[tuple[Span | None, ...], ...]
    ranks: dict[Block, str]
    first: dict[Block, int]
    empty: str

    def __str__(self) -> str:
        lines = [self.title]
        if not all(self.stretches):
            return f"{self.title}\nno elements"
        for name, rows, columns, block in _grids(self):
            lines += [name] * bool(name) + _draw_text(self, rows, columns, block)
        return "\n".join(lines + [f"nothing on {self.empty}"] * bool(self.empty))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        below = f"<div>nothing on {self.empty}</div>" if self.empty else ""
        return (
            f'<div style="font-family:monospace"><div>{html.escape(self.title)}</div>{self._repr_svg_()}{below}</div>'
        )

    def _repr_svg_(self) -> str:
        return _draw_svg(self)


def visualize(x: torch.Tensor | Layout, mesh: Mesh | None = None) -> Picture:
    """Draws the shards of a `ShardedTensor`, or of a layout on `mesh` (by default the current one).

    No value is read or sent. Raises `ShardingError` for a layout outside any mesh.

    Example:
        >>> from shardlib import Mesh, shard
        >>> with Mesh(data=2, tensor=2):
        ...     x = shard(torch.zeros(4, 6), "batch@data ff@tensor")
        >>> print(visualize(x))
        f32[4@data, 6@tensor] on Mesh(data=2, tensor=2)
             0:3 3:6
            ┌───┬───┐
        0:2 │ 0 │ 1 │
            ├───┼───┤
        2:4 │ 2 │ 3 │
            └───┴───┘
    """
    mesh = x.mesh if isinstance(x, ShardedTensor) else mesh or current_mesh()
    if mesh is None:
        raise ShardingError(
            f"visualize({x!r}) is outside any mesh",
            rule="a layout says what each device of a mesh holds",
            remedy="visualize(layout, mesh)",
        )
    name = f"[{x}]" if isinstance(x, Layout) else typeof(x)
    layout = x if isinstance(x, Layout) else x.sharding if isinstance(x, ShardedTensor) else Layout.replicated(x.shape)
    return _picture(f"{name} on {format_mesh_axes(mesh)}", layout, mesh)


def _picture(title: str, layout: Layout, mesh: Mesh) -> Picture:
    coords = {rank: mesh.coords(rank) for rank in mesh.member_ranks}
    stretches = [_find_stretches(dim, coords) for dim in layout.dims]
    blocks = itertools.product(*(range(len(parts)) for parts in stretches))
    ranks, first = {}, {}
    everywhere = frozenset(coords)
    for block in blocks:
        parts = [stretches[d][i] for d, i in enumerate(block)]
        holders = everywhere.intersection(*(part[1] for part in parts if part is not None))
        if all(part is not None for part in parts):
            ranks[block] = _format_holders(sorted(holders), layout, coords)
            first[block] = min(holders)
    held = {r for r, c in coords.items() if 0 not in layout.local_shape(c)}
    empty = _ranges([r for r in coords if r not in held])
    return Picture(title, tuple(tuple(p and p[0] for p in dim) for dim in stretches), ranks, first, empty)


def _find_stretches(dim: Dim, coords: Mapping[int, Coords]) -> list[tuple[Span, frozenset[int]] | None]:
    """Returns the stretches of a dim between ends of shards, with the ranks of each; None for omitted ones."""
    runs: dict[tuple[Span, ...], list[Span]] = {}
    ranks: dict[tuple[Span, ...], set[int]] = {}
    for rank, c in coords.items():
        spans = tuple(shard_range(f.size, f.axes, c) for f in dim)
        if spans not in runs:
            runs[spans] = list(itertools.islice(contiguous_runs(dim, spans), 2 * _MOST))
        ranks.setdefault(spans, set()).add(rank)
    edges = sorted({edge for spans in runs.values() for run in spans for edge in run})
    shown = list(itertools.pairwise(edges))
    size = 1
    for f in dim:
        size *= int(f.size)
    left_out = len(shown) > _MOST or (shown and shown[-1][1] < size)
    out: list[tuple[Span, frozenset[int]] | None] = []
    for start, stop in shown[: _MOST - 1] if left_out else shown:
        holders = [ranks[s] for s, own in runs.items() if any(a <= start and stop <= b for a, b in own)]
        out.append(((start, stop), frozenset().union(*holders)))
    return out + [None] if left_out else out


def contiguous_runs(dim: Dim, spans: Sequence[Span]) -> Iterator[Span]:
    """Yields the contiguous runs of a dim for spans of its factors."""
    (low, high), inner = spans[0], 1
    for f in dim[1:]:
        inner *= int(f.size)
    if all((start, stop) == (0, f.size) for f, (start, stop) in zip(dim[1:], spans[1:], strict=True)):
        if low < high:
            yield low * inner, high * inner
        return
    for i in range(low, high):
        for start, stop in contiguous_runs(dim[1:], spans[1:]):
            yield i * inner + start, i * inner + stop


def _format_holders(ranks: Sequence[int], layout: Layout, coords: Mapping[int, Coords]) -> str:
    """Formats the ranks of a block: copies with commas, the addends of one sum with `+` between them."""
    if not layout.pending:
        return _ranges(ranks)
    sums: dict[tuple[int, ...], list[str]] = {}
    for rank in ranks:
        origin = dict(coords[rank])
        for axis in layout.pending_axes:
            origin[axis.name] -= axis.coord(coords[rank]) * axis.post
        sums.setdefault(tuple(origin.values()), []).append(str(rank))
    sign = "+" if layout.pending[0].kind == "sum" else f" {layout.pending[0].kind} "
    return ", ".join(sign.join(addends) for addends in sums.values())


def _ranges(ranks: Sequence[int]) -> str:
    """Formats ranks as `0-3,6`: runs of at least three ranks are shortened."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 2 else ",".join(map(str, p)) for p in parts)


# --- drawing ----------------------------------------------------------------------------------------------------------


def _grids(picture: Picture) -> Iterator[tuple[str, tuple[Span | None, ...], tuple[Span | None, ...], Block]]:
    """Yields name, rows and columns of every grid, and its block of the dims before the last two."""
    dims = picture.stretches
    rows: tuple[Span | None, ...] = dims[-2] if len(dims) > 1 else ((0, 1),)
    columns: tuple[Span | None, ...] = dims[-1] if dims else ((0, 1),)
    for block in itertools.product(*(range(len(stretches)) for stretches in dims[:-2])):
        at = [dims[d][i] for d, i in enumerate(block)]
        name = ", ".join(_label(s) for s in at)
        yield f"[{name}, :, :]" if name else "", rows, columns, block


def _label(stretch: Span | None) -> str:
    return _HIDDEN if stretch is None else f"{stretch[0]}:{stretch[1]}"


def _cell(picture: Picture, front: Block, i: int, j: int) -> Block:
    n = len(picture.stretches)
    return (*front, i, j) if n > 1 else (j,) if n else ()


def _draw_text(
    picture: Picture, rows: Sequence[Span | None], columns: Sequence[Span | None], front: Block
) -> list[str]:
    cells = [
        [picture.ranks.get(_cell(picture, front, i, j), _HIDDEN) for j in range(len(columns))] for i in range(len(rows))
    ]
    one_row, scalar = len(picture.stretches) < 2, not picture.stretches
    heads = [""] * len(columns) if scalar else [_label(c) for c in columns]
    sides = [""] * len(rows) if one_row else [_label(r) for r in rows]
    widths = [max(len(head), *(len(row[j]) + 2 for row in cells)) for j, head in enumerate(heads)]
    side = max([len(s) + 1 for s in sides if s], default=0)

    def rule(left: str, middle: str, right: str) -> str:
        return " " * side + left + middle.join("─" * w for w in widths) + right

    lines = [] if scalar else [" " * (side + 1) + " ".join(f"{h:^{w}}" for h, w in zip(heads, widths, strict=True))]
    for i, row in enumerate(cells):
        lines.append(rule("├", "┼", "┤") if i else rule("┌", "┬", "┐"))
        body = "│".join(f"{text:^{w}}" for text, w in zip(row, widths, strict=True))
        lines.append(f"{sides[i]:<{side}}│{body}│")
    return [line.rstrip() for line in [*lines, rule("└", "┴", "┘")]]


_COLORS = ("#8ecae6", "#ffb703", "#a7c957", "#f28482", "#cdb4db", "#90dbf4", "#f4a261", "#b7b7a4")
_ROW, _CHAR, _GAP = 26, 8, 18  # pixels: height of a row, width of a character, between grids


def _draw_svg(picture: Picture) -> str:
    parts: list[str] = [] if all(picture.stretches) else [_word(4, 14, "no elements", "start")]
    top, width = (0, 0) if all(picture.stretches) else (20, 100)
    for name, rows, columns, front in _grids(picture) if all(picture.stretches) else ():
        if name:
            parts.append(_word(4, top + 14, name, "start"))
            top += _GAP
        side = _CHAR * max(len(_label(r)) for r in rows) + 8 if len(picture.stretches) > 1 else 4
        if picture.stretches:
            top += _GAP
        left = side
        for j, column in enumerate(columns):
            texts = [picture.ranks.get(_cell(picture, front, i, j), _HIDDEN) for i in range(len(rows))]
            wide = _CHAR * max([len(_label(column)), *map(len, texts)]) + 16
            if picture.stretches:
                parts.append(_word(left + wide // 2, top - 5, _label(column)))
            for i, text in enumerate(texts):
                first = picture.first.get(_cell(picture, front, i, j))
                color = "#ffffff" if first is None else _COLORS[first % len(_COLORS)]
                parts.append(
                    f'<rect x="{left}" y="{top + i * _ROW}" width="{wide}" height="{_ROW}" fill="{color}" '
                    'stroke="#333"/>'
                )
                parts.append(_word(left + wide // 2, top + i * _ROW + 17, text))
            left += wide
        if len(picture.stretches) > 1:
            parts += [_word(side - 4, top + i * _ROW + 17, _label(r), "end") for i, r in enumerate(rows)]
        top += _ROW * len(rows) + 8
        width = max(width, left + 4)
    size = f'width="{width}" height="{top}" viewBox="0 0 {width} {top}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'


def _word(x: int, y: int, text: str, anchor: str = "middle") -> str:
    style = f'text-anchor="{anchor}" font-family="monospace" font-size="12"'
    return f'<text x="{x}" y="{y}" {style}>{html.escape(text)}</text>'


tensor_hooks.draw_html = lambda x: visualize(x)._repr_html_()
