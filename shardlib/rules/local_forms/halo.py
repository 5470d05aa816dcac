"""Halos: what a device needs of a cut dim beyond its own piece, from its neighbors.

A range is a pair of indices into the whole dim, and may differ by device. Pieces may be uneven, empty or shorter than a
halo, so a device may need something of any other one: what is `shift` places away goes there in one `ppermute`, and
nothing is sent that nobody needs. No device receives anything twice; a message costs what the fullest one takes.

Local forms call what is here. A dim is named by its label, of one factor at most: `()` is a dim that nobody cuts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardlib.primitives.body import group
from shardlib.primitives.collectives import piece
from shardlib.rules.local_forms.helpers import share

aten = torch.ops.aten
Range = tuple[int, int]  # [start, stop)


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


def extent(label: Sequence[str], size: int) -> Range:
    """The range of a dim of `size` that this device holds."""
    if not label:
        return 0, size
    offset, n, _ = piece(label[0])
    return offset, offset + n


def held(label: Sequence[str], size: int) -> int:
    """How much of a dim of `size` this device holds."""
    return share(label[0]) if label else size


def fetch(
    x: Tensor, dim: int, label: Sequence[str], needs: Sequence[Range], name: str, have: Range | None = None
) -> list[Tensor]:
    """Get some ranges of a dim, from whoever holds them: what one device sends another one is one message.

    x is this device's piece of the dim, or range `have` of what needs count. A plan calls it `name`.
    """
    mine = extent(label, x.shape[dim]) if have is None else have
    if not (label and _cut(label)):
        return [reframe(x, dim, mine, need) for need in needs]
    ends = [n for need in needs for n in need]
    x = torch.ops.shardlib.manual_fetch(x, [*label], dim, mine, ends, name)
    return [*torch.split(x, [length(need) for need in needs], dim)] if len(needs) > 1 else [x]


def give_back(x: Tensor, dim: int, label: Sequence[str], have: Range, size: int, name: str = "") -> Tensor:
    """The transpose of fetching: addends for range `have` of a dim of `size` go home, and are added up there."""
    mine = extent(label, size)
    if label and _cut(label):
        home: Tensor = torch.ops.shardlib.manual_give_back(x, [*label], dim, have, mine, name)
        return home
    return reframe(x, dim, have, mine)


def reframe(x: Tensor, dim: int, have: Range, want: Range, fill: complex = 0) -> Tensor:
    """What covers range `have` of a dim, as it covers `want`, without asking anybody."""
    kept = overlap(have, want)
    x = x.narrow(dim, kept[0] - have[0], length(kept))
    before, after = (kept[0] - want[0], want[1] - kept[1]) if length(kept) else (length(want), 0)
    return padded(x, [0, 0] * (x.dim() - 1 - dim) + [before, after], fill)


def padded(x: Tensor, pads: Sequence[int], fill: complex = 0) -> Tensor:
    """`F.pad`, but for integers: that makes a float of `fill`."""
    out: Tensor = aten.constant_pad_nd.default(x, pads, fill)
    return out


def _cut(label: Sequence[str]) -> bool:
    return group("fetch", label)[2] > 1


def exchanges(have: Sequence[set[Range]], need: Sequence[set[Range]]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Who sends to whom, by how many places it is further round the ring: the longest way first."""
    n, pairs = len(have), set[tuple[int, int]]()
    held = sorted((a, b, src) for src, theirs in enumerate(have) for a, b in theirs if a < b)
    starts, reach = [a for a, *_ in held], [*accumulate((b for _, b, _ in held), max)]
    for dst, mine in enumerate(need):
        for low, high in mine:
            k = bisect_left(starts, high) - 1 if low < high else -1
            while k >= 0 and reach[k] > low:
                _, stop, src = held[k]
                if stop > low and src != dst:
                    pairs.add((src, dst))
                k -= 1
    found: dict[int, list[tuple[int, int]]] = {}
    for src, dst in sorted(pairs):
        found.setdefault((dst - src) % n, []).append((src, dst))
    return sorted(found.items(), reverse=True)
