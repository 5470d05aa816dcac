"""Exchanges for a dim whose factors change: devices send each other the overlaps of their ranges.

`[48@t]` and `[(3 16@t)]` are shardings of one dim without a common refinement: no list of factors expresses both. A
device holds a few ranges of the dim before and other ranges after; their overlaps are sent.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlib.sharding.chunks import largest_shard, shard_range
from shardlib.sharding.mesh.axis import Axis, Coords, group_position, group_size, member_coords
from shardlib.sharding.reshard.prices import Prices
from shardlib.sharding.reshard.step import Axes, FactorAxes, FactorSizes

Dim = tuple[tuple[int, Axes], ...]  # (size, axes) per factor, major first
Range = tuple[int, int]  # start and stop
MAX_RANGES = 32  # that a device holds of the dim: each is sliced and concatenated separately


class Part(NamedTuple):
    """A range of the dim that one member of a group sends to another, with its offset on either."""

    source: int
    to: int
    start: int
    size: int
    before: int
    after: int


def held_ranges(dim: Dim, coords: Coords) -> list[Range]:
    """Returns the ranges of a dim that the device at `coords` holds, in order.

    Example:
        >>> tensor = Axis("tensor", 4)
        >>> held_ranges(((3, ()), (8, (tensor,))), {"tensor": 1})
        [(2, 4), (10, 12), (18, 20)]
    """
    ranges, post = [(0, 1)], 1
    for size, axes in reversed(dim):
        start, stop = shard_range(size, Axis.merge(axes), coords)
        if ranges == [(0, post)]:
            ranges = [(start * post, stop * post)] if start < stop else []
        else:
            ranges = [(i * post + a, i * post + b) for i in range(start, stop) for a, b in ranges]
        post *= int(size)
    return ranges


@dataclass(frozen=True)
class RefactorExchange:
    """Dim `dim` of a value changes from `before` to `after`: an exchange along the axes of `before`."""

    dim: int
    before: Dim
    after: Dim
    bytes: float = 0.0  # on the wire, per device

    @cached_property
    def axes(self) -> Axes:
        return Axis.merge(a for _, axes in self.before for a in axes)

    @cached_property
    def others(self) -> Axes:
        """Axes of `after` along which nothing is sent."""
        mine = {p for a in self.axes for p in a.primes()}
        return tuple(p for _, axes in self.after for a in axes for p in a.primes() if p not in mine)

    @cached_property
    def _schedules(self) -> dict[tuple[int, ...], _Schedule]:
        return {}

    def _schedule(self, coords: Coords) -> _Schedule:
        key = tuple(a.coord(coords) for a in self.others)
        if (schedule := self._schedules.get(key)) is None:
            schedule = self._schedules[key] = _Schedule(group_size(self.axes), self._parts(coords))
        return schedule

    def _parts(self, coords: Coords) -> list[Part]:
        """Lists all messages in the group of the device at `coords`."""
        members = [member_coords(coords, self.axes, i) for i in range(group_size(self.axes))]
        old = sorted((a, b, i, at) for i, c in enumerate(members) for a, b, at in _placed(self.before, c))
        starts, parts = [a for a, *_ in old], []
        for j, c in enumerate(members):
            for start, stop, after in _placed(self.after, c):
                k = bisect_right(starts, start) - 1
                while k < len(old) and old[k][0] < stop:
                    a, b, i, before = old[k]
                    low = max(a, start)
                    parts.append(Part(i, j, low, min(b, stop) - low, before + low - a, after + low - start))
                    k += 1
        return parts

    def sent(self, coords: Coords, i: int, j: int) -> int:
        """Returns the elements of the dim that member i of the group sends to member j."""
        return self._schedule(coords).sent.get((i, j), 0)

    def leaving(self, coords: Coords) -> list[Range]:
        """Lists the local ranges (start, size) of a device in the order in which it sends them to the members."""
        return self._schedule(coords).leaving[group_position(coords, self.axes)]

    def arriving(self, coords: Coords) -> list[Range]:
        """Lists the ranges (start, size) of the received elements in the order in which the device holds them."""
        return self._schedule(coords).arriving[group_position(coords, self.axes)]

    @cached_property
    def most(self) -> int:
        """The elements of the dim that the busiest device sends."""
        most = 0
        for at in product(*(range(a.size) for a in self.others)):
            coords = dict.fromkeys((a.name for a in (*self.axes, *self.others)), 0)
            for axis, c in zip(self.others, at, strict=True):
                coords[axis.name] += c * axis.post
            members = [member_coords(coords, self.axes, i) for i in range(group_size(self.axes))]
            before, after = ([held_ranges(dim, c) for c in members] for dim in (self.before, self.after))
            received = _CountedRanges([x for ranges in after for x in ranges])
            for mine, kept in zip(before, after, strict=True):
                most = max(most, received.overlap(mine) - _CountedRanges(kept).overlap(mine))
        return most


class _CountedRanges:
    """Ranges of a dim, which may overlap each other."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ends = [np.sort(np.array(x, dtype=np.int64)) for x in ([a for a, _ in ranges], [b for _, b in ranges])]
        self.sums = [np.concatenate([[0], np.cumsum(x)]) for x in self.ends]

    def overlap(self, ranges: Sequence[Range]) -> int:
        """Returns the elements that these have in common with `ranges`, each as often as they hold it."""
        below_starts, below_stops = self._below(np.array(ranges, dtype=np.int64).reshape(-1, 2)).sum(0)
        return int(below_stops - below_starts)

    def _below(self, points: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns for each point the elements below it."""
        starts, stops = (np.searchsorted(ends, points) for ends in self.ends)
        start_sums, stop_sums = self.sums
        below: NDArray[np.int64] = (starts - stops) * points - start_sums[starts] + stop_sums[stops]
        return below


class _Schedule:
    """Sizes and order of the messages among the `n` members of one group."""

    def __init__(self, n: int, parts: Sequence[Part]) -> None:
        self.sent: dict[tuple[int, int], int] = defaultdict(int)
        out: list[list[Part]] = [[] for _ in range(n)]
        received: list[list[Part]] = [[] for _ in range(n)]
        for part in parts:  # by receiver and position
            self.sent[part.source, part.to] += part.size
            out[part.source].append(part)
            received[part.to].append(part)
        self.leaving = [_join_ranges([(p.before, p.size) for p in sent]) for sent in out]
        self.arriving = []
        for messages in received:
            messages.sort(key=lambda p: (p.source, p.start))
            places = zip(accumulate((p.size for p in messages), initial=0), messages, strict=False)
            self.arriving.append(_join_ranges([(at, p.size) for at, p in sorted(places, key=lambda x: x[1].after)]))


def _placed(dim: Dim, coords: Coords) -> list[tuple[int, int, int]]:
    """Returns the ranges that a device holds, each with its local offset."""
    ranges = held_ranges(dim, coords)
    places = accumulate((b - a for a, b in ranges), initial=0)
    return [(a, b, at) for (a, b), at in zip(ranges, places, strict=False)]


def _join_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Joins adjacent ranges (start, size)."""
    joined: list[Range] = []
    for start, size in ranges:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + size
        else:
            joined.append((start, size))
    return joined


def _count_ranges(dim: Dim) -> int:
    """Bounds the number of ranges of a dim on a device: one per element in front of the last sharded factor."""
    sharded = max((k for k, (_, axes) in enumerate(dim) if axes), default=0)
    return math.prod(largest_shard(n, Axis.merge(axes)) for n, axes in dim[:sharded])


def _is_exchange(before: Dim, after: Dim) -> bool:
    """Returns whether a refactor exchange can do this change of a dim, with at most `MAX_RANGES` ranges."""
    if any(n == 0 for n, _ in (*before, *after)):
        return False
    return all(any(axes for _, axes in dim) and _count_ranges(dim) <= MAX_RANGES for dim in (before, after))


@lru_cache(maxsize=1 << 12)
def plan_refactor_exchanges(
    leaves: FactorSizes, itemsize: int, near: FactorAxes, src: FactorAxes, into: FactorSizes, dst: FactorAxes
) -> tuple[FactorAxes, tuple[RefactorExchange, ...]] | None:
    """Plans the exchanges from dims of factors `leaves` over `src` to dims of factors `into` over `dst`.

    Returns the sharding in front of the exchanges, and these; None if there is no such plan. `near` holds the target
    axes of the dims that keep their factors.
    """
    at, to, via, dims = 0, 0, list(near), []
    for d, (mine, theirs) in enumerate(zip(leaves, into, strict=True)):
        before, after = src[at : at + len(mine)], dst[to : to + len(theirs)]
        if mine != theirs or near[at : at + len(mine)] != after:
            exchange = RefactorExchange(
                d, tuple(zip(mine, before, strict=True)), tuple(zip(theirs, after, strict=True))
            )
            if _is_exchange(exchange.before, exchange.after):
                via[at : at + len(mine)] = before
                dims.append(exchange)
        at, to = at + len(mine), to + len(theirs)
    cut = [a for axes in via for a in axes]
    if not dims or len({*cut}) < len(cut):
        return None
    now = [*_dims(leaves, tuple(via))]
    out = []
    for x in dims:
        if {*x.others} & {a for d, dim in enumerate(now) if d != x.dim for _, axes in dim for a in axes}:
            return None
        row = math.prod(largest_shard(n, Axis.merge(a)) for d, dim in enumerate(now) if d != x.dim for n, a in dim)
        out.append(RefactorExchange(x.dim, x.before, x.after, float(itemsize * x.most * row)))
        now[x.dim] = x.after
    return tuple(via), tuple(out)


def _dims(leaves: FactorSizes, cut: FactorAxes) -> tuple[Dim, ...]:
    axes = iter(cut)
    return tuple(tuple((n, next(axes)) for n in dim) for dim in leaves)


def refactor_seconds(steps: Sequence[RefactorExchange], prices: Prices) -> float:
    """Estimates the time of refactor exchanges."""
    return sum(prices.comm_seconds(x.axes, x.bytes, "all_to_all") for x in steps)
