"""Halos: elements of a sharded dim that a device reads beyond its own shard.

A range is a pair of indices into the whole dim, and may differ by device. Shards may be uneven, empty or shorter than a
halo, so a device may need elements of any other device. The program sends one message per distance between devices, and
only the elements that are needed. No device receives an element twice. A message costs as much as its fullest copy.

Local forms call these functions. They name a dim by its label of at most one factor; `()` is a dim that is not sharded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardlib.primitives.body import resolve_group
from shardlib.primitives.collectives import piece
from shardlib.rules.local_forms.helpers import pad_constant, shard_size

Range = tuple[int, int]  # [start, stop)


def intersect(a: Range, b: Range) -> Range:
    """Returns the intersection of two ranges; an empty range inside `a` if they are disjoint."""
    low = min(max(a[0], b[0]), a[1])
    return low, max(low, min(a[1], b[1]))


def length(r: Range) -> int:
    return r[1] - r[0]


def shard_range(label: Sequence[str], size: int) -> Range:
    """Returns the range of a dim of `size` that this device holds."""
    if not label:
        return 0, size
    offset, n, _ = piece(label[0])
    return offset, offset + n


def shard_length(label: Sequence[str], size: int) -> int:
    """Returns the number of elements of a dim of `size` that this device holds."""
    return shard_size(label[0]) if label else size


def fetch(
    x: Tensor, dim: int, label: Sequence[str], needs: Sequence[Range], name: str, have: Range | None = None
) -> list[Tensor]:
    """Fetches ranges of a dim from the devices that hold them, with one message per pair of devices.

    `x` is this device's shard of the dim, or covers range `have`. A plan calls the tensor `name`.
    """
    mine = shard_range(label, x.shape[dim]) if have is None else have
    if not (label and _is_sharded(label)):
        return [crop_or_pad(x, dim, mine, need) for need in needs]
    ends = [n for need in needs for n in need]
    x = torch.ops.shardlib.manual_fetch(x, [*label], dim, mine, ends, name)
    return [*torch.split(x, [length(need) for need in needs], dim)] if len(needs) > 1 else [x]


def add_to_owners(x: Tensor, dim: int, label: Sequence[str], have: Range, size: int, name: str = "") -> Tensor:
    """Sends addends for range `have` of a dim of `size` to the devices that hold it, which add them up.

    This is the transpose of `fetch`.
    """
    mine = shard_range(label, size)
    if label and _is_sharded(label):
        total: Tensor = torch.ops.shardlib.manual_give_back(x, [*label], dim, have, mine, name)
        return total
    return crop_or_pad(x, dim, have, mine)


def crop_or_pad(x: Tensor, dim: int, have: Range, want: Range, fill: complex = 0) -> Tensor:
    """Crops or pads a tensor that covers range `have` of a dim, so that it covers `want`. Sends nothing."""
    both = intersect(have, want)
    x = x.narrow(dim, both[0] - have[0], length(both))
    before, after = (both[0] - want[0], want[1] - both[1]) if length(both) else (length(want), 0)
    return pad_constant(x, [0, 0] * (x.dim() - 1 - dim) + [before, after], fill)


def _is_sharded(label: Sequence[str]) -> bool:
    return resolve_group("fetch", label)[2] > 1


def match_senders(have: Sequence[set[Range]], need: Sequence[set[Range]]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Returns the (source, destination) pairs of each distance around the ring, the longest distance first."""
    n, pairs = len(have), set[tuple[int, int]]()
    intervals = sorted((low, high, src) for src, ranges in enumerate(have) for low, high in ranges if low < high)
    starts, last_stops = [low for low, *_ in intervals], [*accumulate((high for _, high, _ in intervals), max)]
    for dst, ranges in enumerate(need):
        for low, high in ranges:
            k = bisect_left(starts, high) - 1 if low < high else -1
            while k >= 0 and last_stops[k] > low:
                _, stop, src = intervals[k]
                if stop > low and src != dst:
                    pairs.add((src, dst))
                k -= 1
    by_distance: dict[int, list[tuple[int, int]]] = {}
    for src, dst in sorted(pairs):
        by_distance.setdefault((dst - src) % n, []).append((src, dst))
    return sorted(by_distance.items(), reverse=True)
