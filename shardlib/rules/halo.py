"""Halos: what a device needs of a cut dim beyond its own piece, from its neighbours.

A range is a pair of indices into the whole dim, and may differ by device. Pieces may be uneven, empty or shorter than a
halo, so a device may need something of any other one: what is `shift` places away goes there in one `ppermute`, and
nothing is sent that nobody needs. No device receives anything twice, so a halo never costs more than a gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardlib.rules.rule import Labels, Local

aten = torch.ops.aten
Range = tuple[int, int]  # [start, stop); in local forms a symbolic pair


def overlap(a: Range, b: Range) -> Range:
    """What two ranges share; an empty range inside `a` where they share nothing.

    Example:
        >>> overlap((0, 5), (3, 9)), overlap((0, 5), (7, 9))
        ((3, 5), (5, 5))
    """
    low = min(max(a[0], b[0]), a[1])
    return low, max(low, min(a[1], b[1]))


def length(r: Range) -> int:
    return r[1] - r[0]


def extent(local: Local, dim: Sequence[str], size: int) -> Any:
    """The range of a dim that this device holds; `dim` is its label, of one factor at most."""
    if not dim:
        return 0, size
    (factor,) = dim
    return local.calc(lambda low, n: (low, low + n), local.offset(factor), local.size(factor))


@dataclass
class Piece:
    """This device's piece of a tensor: its local value and shape (ints that may be symbolic).

    Every method replaces the value; `name` is what a plan calls it.
    """

    local: Local
    value: Any
    shape: list[Any]
    name: str

    @staticmethod
    def of(local: Local, value: Any, labels: Labels, name: str) -> Piece:
        return Piece(local, value, [_size(local, dim) for dim in labels], name)

    def fetch(self, dim: int, label: Sequence[str], need: Any, frame: Any, fill: float = 0) -> None:
        """Get range `need` of a dim, from whoever holds it, and put it in range `frame`, filled up with `fill`.

        What `need` asks for outside of the whole dim is filled up, too; all the rest of it must be in `frame`.
        """
        local = self.local
        size = local.rule.sizes[label[0]] if label else self.shape[dim]
        mine = extent(local, label, size)
        # Members with a lower position come first; of the rest of the ring, those that are furthest along.
        own = self._narrowed(dim, mine, local.calc(overlap, mine, need))
        lower, upper = [], []
        for shift, piece in self._exchanged(dim, label, mine, need):
            behind = local.calc(lambda at, s: int(at >= s), local.position(label[0]), shift)
            n = piece.shape[dim]
            low = local.calc(lambda n, yes: n * yes, n, behind)
            lower.append(piece._cut(dim, 0, low))
            upper.append(piece._cut(dim, low, local.calc(lambda n, low: n - low, n, low)))
        within = local.calc(overlap, (0, size), need)
        before = local.calc(lambda frame, r: r[0] - frame[0] if length(r) else length(frame), frame, within)
        after = local.calc(lambda frame, r: frame[1] - r[1] if length(r) else 0, frame, within)
        parts = [self._filled(dim, before, fill), *lower, own, *upper, self._filled(dim, after, fill)]
        parts = [p for p in parts if not _none(p.shape[dim])] or parts[:1]
        self.shape[dim] = local.calc(length, frame)
        self.value = local.op(aten.cat.default, [p.value for p in parts], dim) if len(parts) > 1 else parts[0].value

    def give_back(self, dim: int, label: Sequence[str], have: Any, size: int) -> None:
        """The transpose of fetching: addends for range `have` of a dim of `size` go home, and are added up there."""
        local = self.local
        mine = extent(local, label, size)
        total = self._copy()
        total.reframe(dim, have, mine)
        for shift, piece in self._exchanged(dim, label, have, mine):
            theirs = _from(local, label[0], shift, have)
            piece.reframe(dim, local.calc(overlap, theirs, mine), mine)
            total.value = local.op(aten.add.Tensor, total.value, piece.value)
        self.value, self.shape = total.value, total.shape

    def reframe(self, dim: int, have: Any, want: Any, fill: float = 0) -> None:
        """Make a value that covers range `have` of a dim cover `want`, without asking anybody."""
        self.shape[dim] = self.local.calc(length, have)
        kept = self.local.calc(overlap, have, want)
        inner = self._narrowed(dim, have, kept)
        before = self.local.calc(lambda r, want: r[0] - want[0] if length(r) else length(want), kept, want)
        after = self.local.calc(lambda r, want: want[1] - r[1] if length(r) else 0, kept, want)
        self.value = inner.value
        if not (_none(before) and _none(after)):
            pads = [0, 0] * (len(self.shape) - 1 - dim) + [before, after]
            self.value = self.local.op(aten.constant_pad_nd.default, inner.value, pads, fill)
        self.shape[dim] = self.local.calc(length, want)

    def viewed(self, shape: list[Any]) -> Piece:
        """The same elements in another shape."""
        return Piece(self.local, self.local.op(aten.reshape.default, self.value, list(shape)), shape, self.name)

    def keep(self, dim: int, start: Any, n: Any) -> None:
        """Only `n` of a dim, from `start` on."""
        self.value, self.shape = (part := self._cut(dim, start, n)).value, part.shape

    # Parts ----------------------------------------------------------------------------------------------------------

    def _exchanged(self, dim: int, label: Sequence[str], have: Any, need: Any) -> Iterator[tuple[int, Piece]]:
        """For every shift: what a device that needs range `need` gets of the device `shift` places before it, which
        has range `have`; in the order of the holders."""
        if not label or self.local.ways(label[0]) < 2:
            return
        local, factor, n, flying = self.local, label[0], self.local.ways(label[0]), []
        for shift, pairs in _pairs(local.values(have, factor), local.values(need, factor)):
            sent = self._narrowed(dim, have, local.calc(overlap, have, _from(local, factor, -shift, need)))
            got = local.send(sent.value, factor, pairs, list(sent.shape), name=self.name)
            # Zeros come to whom nobody sends, as many as it sends itself.
            shape = list(sent.shape)
            shape[dim] = local.of(shape[dim], factor, [_source(pairs, i) for i in range(n)].__getitem__)
            flying.append((shift, Piece(local, got, shape, self.name)))
        for shift, piece in flying:  # all are on their way before the first is waited for
            arrived = local.calc(overlap, _from(local, factor, shift, have), need)
            yield shift, piece._cut(dim, 0, local.calc(length, arrived))

    def _narrowed(self, dim: int, have: Any, kept: Any) -> Piece:
        start = self.local.calc(lambda have, kept: kept[0] - have[0], have, kept)
        return self._cut(dim, start, self.local.calc(length, kept))

    def _cut(self, dim: int, start: Any, n: Any) -> Piece:
        out = self._copy()
        if not (_none(start) and _none(self.local.calc(lambda a, b: a - b, n, self.shape[dim]))):
            out.value = self.local.op(aten.narrow.default, self.value, dim, start, n)
            out.shape[dim] = n
        return out

    def _filled(self, dim: int, n: Any, fill: float) -> Piece:
        out = self._copy()
        out.shape[dim] = n
        if not _none(n):
            out.value = self.local.op(aten.new_full.default, self.value, list(out.shape), fill)
        return out

    def _copy(self) -> Piece:
        return Piece(self.local, self.value, list(self.shape), self.name)


def _size(local: Local, dim: Sequence[str]) -> Any:
    return local.calc(lambda *sizes: math.prod(sizes), *map(local.size, dim)) if dim else 1


def _source(pairs: Sequence[tuple[int, int]], at: int) -> int:
    """Whose value a member has after an exchange: its own (but zeros) where nobody sends to it."""
    return next((src for src, dst in pairs if dst == at), at)


def _from(local: Local, factor: str, shift: int, value: Any) -> Any:
    """What a symbolic value is on the device `shift` places before this one, round the ring."""
    n = local.ways(factor)
    return local.of(value, factor, lambda i: (i - shift) % n)


def _none(n: Any) -> bool:
    return isinstance(n, int) and n == 0


def _pairs(have: Sequence[set[Range]], need: Sequence[set[Range]]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Who sends to whom, by how many places it is further round the ring: the longest way first."""
    n = len(have)
    found: dict[int, list[tuple[int, int]]] = {}
    for src, theirs in enumerate(have):
        for dst, mine in enumerate(need):
            if src != dst and any(length(overlap(a, b)) for a in theirs for b in mine):
                found.setdefault((dst - src) % n, []).append((src, dst))
    return sorted(found.items(), reverse=True)


def sent(size: int, pieces: int, need: Callable[[Range], Range]) -> Callable[[int], tuple[int, int]]:
    """What a `Halo` sends: a dim of `size` is cut, and whoever has a range of a dim of `pieces` needs `need(range)`."""

    @cache
    def count(n: int) -> tuple[int, int]:
        haves, needs = [_chunk(size, n, i) for i in range(n)], [_chunk(pieces, n, i) for i in range(n)]
        needs = [need(r) if length(r) else (0, 0) for r in needs]
        pairs = _pairs([{r} for r in haves], [{r} for r in needs])
        return len(pairs), sum(max(length(overlap(haves[a], needs[b])) for a, b in where) for _, where in pairs)

    return count


def _chunk(size: int, n: int, i: int) -> Range:
    step = -(-size // n)
    return min(i * step, size), min((i + 1) * step, size)
