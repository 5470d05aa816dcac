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
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlib.sharding.chunks import largest_shard, shard_range, shard_sizes
from shardlib.sharding.mesh.axis import Axis, Coords, group_position, group_size, member_coords
from shardlib.sharding.reshard.prices import Prices
from shardlib.sharding.reshard.step import Axes, FactorAxes, FactorSizes

Dim = tuple[tuple[int, Axes], ...]  # (size, axes) per factor, major first
Range = tuple[int, int]  # start and stop
Numbers = NDArray[np.int64]
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

    def sent(self, coords: Coords) -> list[list[int]]:
        """Returns the elements of the dim that each member of the group sends to each member, by sender."""
        n = group_size(self.axes)
        table = [[0] * n for _ in range(n)]
        for (i, j), size in self._schedule(coords).sent.items():
            table[i][j] = size
        return table

    def leaving(self, coords: Coords) -> list[Range]:
        """Lists the local ranges (start, size) of a device in the order in which it sends them to the members."""
        return self._schedule(coords).leaving[group_position(coords, self.axes)]

    def arriving(self, coords: Coords) -> list[Range]:
        """Lists the ranges (start, size) of the received elements in the order in which the device holds them."""
        return self._schedule(coords).arriving[group_position(coords, self.axes)]

    @cached_property
    def most(self) -> int:
        """The elements of the dim that the busiest device sends."""
        axes = *self.others, *self.axes
        devices = np.arange(group_size(axes))
        before, after = (_HeldByAll(dim, axes) for dim in (self.before, self.after))
        requested = before.overlaps(after, devices // group_size(self.axes))  # by the whole group
        return int((requested - before.overlaps(after, devices)).max(initial=0))


class _HeldByAll:
    """The ranges of a dim that all devices along `axes` hold, numbered major first."""

    def __init__(self, dim: Dim, axes: Axes) -> None:
        self.count, self.size = group_size(axes), math.prod(int(n) for n, _ in dim)
        self.owner = np.arange(self.count)
        self.start, self.stop = np.zeros(self.count, np.int64), np.ones(self.count, np.int64)
        coords: dict[str, Numbers] = {}
        for axis, along in zip(axes, np.indices([a.size for a in axes]).reshape(len(axes), -1), strict=True):
            coords[axis.name] = coords.get(axis.name, np.array(0)) + along * axis.post
        post, is_whole = 1, True
        for size, sharded in reversed(dim):
            edges = np.cumsum([0, *shard_sizes(size, Axis.merge(sharded))])
            at = np.zeros(self.count, np.int64)
            for axis in sharded:
                at = at * axis.size + coords[axis.name] // axis.post % axis.size
            self._extend(edges[at], edges[at + 1], post, is_whole)
            post, is_whole = post * int(size), is_whole and not sharded

    def _extend(self, first: Numbers, last: Numbers, post: int, is_whole: bool) -> None:
        """Adds a more major factor, of which devices hold the elements from `first` to `last`, of `post` each.

        `is_whole`: all devices hold all of the more minor factors.
        """
        if is_whole:
            self.start, self.stop = first * post, last * post
            return
        counts = (last - first)[self.owner]
        ranges = np.repeat(np.arange(len(counts)), counts)
        i = np.arange(len(ranges)) - np.repeat(np.cumsum(counts) - counts, counts) + first[self.owner][ranges]
        self.owner, self.start, self.stop = (
            self.owner[ranges],
            self.start[ranges] + i * post,
            self.stop[ranges] + i * post,
        )

    def overlaps(self, other: _HeldByAll, groups: Numbers) -> Numbers:
        """Counts for each device its elements that devices of its group hold in `other`, each as often as they do."""
        mine, theirs = groups[self.owner] * self.size, groups[other.owner] * self.size  # no two groups overlap
        starts, stops = np.sort(other.start + theirs), np.sort(other.stop + theirs)
        start_sums, stop_sums = (np.concatenate([[0], np.cumsum(ends)]) for ends in (starts, stops))

        def count_below(points: Numbers) -> Numbers:
            i, j = np.searchsorted(starts, points), np.searchsorted(stops, points)
            below: Numbers = (i - j) * points - start_sums[i] + stop_sums[j]
            return below

        overlap = count_below(self.stop + mine) - count_below(self.start + mine)
        counts = np.zeros(self.count, np.int64)
        np.add.at(counts, self.owner, overlap)
        return counts


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
