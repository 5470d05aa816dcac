"""A dim that is cut in other factors after than before: devices send each other what their ranges have in common.

`[48@t]` and `[(3 16@t)]` are two cuts of one dim without a common refinement: no list of factors has both. A device
then holds a few ranges of the dim, others after than before, and what changes hands is where these overlap.
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

from shardlib.sharding.chunks import fullest, span
from shardlib.sharding.mesh.axis import Axis, Coords, member_coords, position, ways
from shardlib.sharding.reshard.prices import Prices
from shardlib.sharding.reshard.step import Axes, Cut, Leaves

Dim = tuple[tuple[int, Axes], ...]  # (size, axes) per factor, major first
Range = tuple[int, int]  # start and stop
MOST = 32  # ranges that a device holds of the dim: each is cut out and joined by itself


class Part(NamedTuple):
    """What goes from one member of a group to another: a range of the dim, and where that starts on either."""

    source: int
    to: int
    start: int
    size: int
    before: int
    after: int


def held(dim: Dim, coords: Coords) -> list[Range]:
    """The ranges of a dim that the device at `coords` holds, in order.

    Example:
        >>> tensor = Axis("tensor", 4)
        >>> held(((3, ()), (8, (tensor,))), {"tensor": 1})
        [(2, 4), (10, 12), (18, 20)]
    """
    ranges, post = [(0, 1)], 1
    for size, axes in reversed(dim):
        start, stop = span(size, Axis.merge(axes), coords)
        if ranges == [(0, post)]:
            ranges = [(start * post, stop * post)] if start < stop else []
        else:
            ranges = [(i * post + a, i * post + b) for i in range(start, stop) for a, b in ranges]
        post *= int(size)
    return ranges


@dataclass(frozen=True)
class Crossing:
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
    def _known(self) -> dict[tuple[int, ...], _Told]:
        return {}

    def _told(self, coords: Coords) -> _Told:
        key = tuple(a.coord(coords) for a in self.others)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = _Told(ways(self.axes), self._parts(coords))
        return known

    def _parts(self, coords: Coords) -> list[Part]:
        """What goes from whom to whom in the group of the device at `coords`."""
        members = [member_coords(coords, self.axes, i) for i in range(ways(self.axes))]
        old = sorted((a, b, i, at) for i, c in enumerate(members) for a, b, at in _placed(self.before, c))
        starts, found = [a for a, *_ in old], []
        for j, c in enumerate(members):
            for start, stop, after in _placed(self.after, c):
                k = bisect_right(starts, start) - 1
                while k < len(old) and old[k][0] < stop:
                    a, b, i, before = old[k]
                    low = max(a, start)
                    found.append(Part(i, j, low, min(b, stop) - low, before + low - a, after + low - start))
                    k += 1
        return found

    def sent(self, coords: Coords, i: int, j: int) -> int:
        """How much of the dim member i of the group sends to member j."""
        return self._told(coords).sent.get((i, j), 0)

    def leaving(self, coords: Coords) -> list[Range]:
        """What a device has of the dim, in the order in which it goes to the members: (start, size) on it."""
        return self._told(coords).leaving[position(coords, self.axes)]

    def arriving(self, coords: Coords) -> list[Range]:
        """What has come from the members, one after the other, in the order in which it is held."""
        return self._told(coords).arriving[position(coords, self.axes)]

    @cached_property
    def most(self) -> int:
        """How much of the dim the device sends that sends most."""
        most = 0
        for at in product(*(range(a.size) for a in self.others)):
            coords = dict.fromkeys((a.name for a in (*self.axes, *self.others)), 0)
            for axis, c in zip(self.others, at, strict=True):
                coords[axis.name] += c * axis.post
            out: dict[int, int] = defaultdict(int)
            for (i, j), size in self._told(coords).sent.items():
                out[i] += size * (i != j)
            most = max([most, *out.values()])
        return most


class _Told:
    """What the `n` members of one group are told: how much goes from whom to whom, and in which order."""

    def __init__(self, n: int, parts: Sequence[Part]) -> None:
        self.sent: dict[tuple[int, int], int] = defaultdict(int)
        out: list[list[Part]] = [[] for _ in range(n)]
        came: list[list[Part]] = [[] for _ in range(n)]
        for part in parts:  # by who gets it, and where it is
            self.sent[part.source, part.to] += part.size
            out[part.source].append(part)
            came[part.to].append(part)
        self.leaving = [_joined([(p.before, p.size) for p in of]) for of in out]
        self.arriving = []
        for of in came:
            of.sort(key=lambda p: (p.source, p.start))
            places = zip(accumulate((p.size for p in of), initial=0), of, strict=False)
            self.arriving.append(_joined([(at, p.size) for at, p in sorted(places, key=lambda x: x[1].after)]))


def _placed(dim: Dim, coords: Coords) -> list[tuple[int, int, int]]:
    """The ranges that a device holds, and where each starts on it."""
    ranges = held(dim, coords)
    places = accumulate((b - a for a, b in ranges), initial=0)
    return [(a, b, at) for (a, b), at in zip(ranges, places, strict=False)]


def _joined(places: Sequence[Range]) -> list[Range]:
    """The places (start, size) with those that follow each other as one."""
    found: list[Range] = []
    for start, size in places:
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((start, size))
    return found


def _most_ranges(dim: Dim) -> int:
    """How many ranges of a dim a device may hold: one for each place in front of the minor factor that is cut."""
    cut = max((k for k, (_, axes) in enumerate(dim) if axes), default=0)
    return math.prod(fullest(n, Axis.merge(axes)) for n, axes in dim[:cut])


def _crosses(before: Dim, after: Dim) -> bool:
    """Whether a change of a dim is an exchange, of not too many ranges."""
    if any(n == 0 for n, _ in (*before, *after)):
        return False
    return all(any(axes for _, axes in dim) and _most_ranges(dim) <= MOST for dim in (before, after))


@lru_cache(maxsize=1 << 12)
def crossings(
    leaves: Leaves, itemsize: int, near: Cut, src: Cut, into: Leaves, dst: Cut
) -> tuple[Cut, tuple[Crossing, ...]] | None:
    """How a value of dims `leaves`, there in cut `src`, comes to cut `dst` of dims `into`: by which cut, and crossings.

    `near` is what it is to be where dims do not change, which are whole there; `src` counts on those that do.
    """
    at, to, via, dims = 0, 0, list(near), []
    for d, (mine, theirs) in enumerate(zip(leaves, into, strict=True)):
        before, after = src[at : at + len(mine)], dst[to : to + len(theirs)]
        if mine != theirs or near[at : at + len(mine)] != after:
            found = Crossing(d, tuple(zip(mine, before, strict=True)), tuple(zip(theirs, after, strict=True)))
            if _crosses(found.before, found.after):
                via[at : at + len(mine)] = before
                dims.append(found)
        at, to = at + len(mine), to + len(theirs)
    cut = [a for axes in via for a in axes]
    if not dims or len({*cut}) < len(cut):
        return None
    now = [*_dims(leaves, tuple(via))]
    out = []
    for x in dims:
        if {*x.others} & {a for d, dim in enumerate(now) if d != x.dim for _, axes in dim for a in axes}:
            return None
        row = math.prod(fullest(n, Axis.merge(a)) for d, dim in enumerate(now) if d != x.dim for n, a in dim)
        out.append(Crossing(x.dim, x.before, x.after, float(itemsize * x.most * row)))
        now[x.dim] = x.after
    return tuple(via), tuple(out)


def _dims(leaves: Leaves, cut: Cut) -> tuple[Dim, ...]:
    axes = iter(cut)
    return tuple(tuple((n, next(axes)) for n in dim) for dim in leaves)


def crossed_seconds(steps: Sequence[Crossing], prices: Prices) -> float:
    """Estimated time of crossings."""
    return sum(prices.sent(x.axes, x.bytes, "all_to_all") for x in steps)
