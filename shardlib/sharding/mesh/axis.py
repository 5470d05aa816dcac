"""Axes: a mesh axis or a part of one."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardlib.core.errors import ShardingError

Coords = Mapping[str, int]  # a device: its coordinate along every mesh axis


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or a contiguous part of one.

    `size` devices along the mesh axis `name` of `axis_size`; `pre` is the product of the more major parts.

    Example:
        >>> str(Axis("tensor", 8)), str(Axis("tensor", 4, pre=2, axis_size=8))
        ('tensor', 'tensor:(2)4')
        >>> Axis("tensor", 4, pre=2, axis_size=8).coord({"tensor": 7})
        3
    """

    name: str
    size: int
    pre: int = 1
    axis_size: int = 0
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        if not self.axis_size:
            object.__setattr__(self, "axis_size", self.size)
        if self.size < 1 or self.pre < 1 or self.axis_size % (self.pre * self.size):
            fault = f"a part of size {self.size} behind parts of {self.pre} does not divide it"
            raise ShardingError(f"axis {self.name!r} of size {self.axis_size} cannot be split", [fault])
        object.__setattr__(self, "_hash", hash((self.name, self.size, self.pre, self.axis_size)))

    def __hash__(self) -> int:
        return self._hash  # cached: axes are in the keys of most caches

    def __reduce__(self) -> tuple[Any, ...]:  # the hash of a string differs between processes
        return Axis, (self.name, self.size, self.pre, self.axis_size)

    @property
    def whole(self) -> bool:
        return self.size == self.axis_size

    @property
    def post(self) -> int:
        """The product of the more minor parts of the same mesh axis."""
        return self.axis_size // (self.pre * self.size)

    def coord(self, coords: Coords) -> int:
        """This part's coordinate on the device at `coords`."""
        return coords[self.name] // self.post % self.size

    def primes(self) -> tuple[Axis, ...]:
        """Splits the axis into parts of prime size, major first."""
        return _primes(self)

    def part(self, pre: int, size: int) -> Axis | None:
        """Returns the part of this size behind parts of `pre`; None unless it consists of primes of the axis."""
        edges = [self.pre, *(p.pre * p.size for p in self.primes())]
        fits = size > 1 and self.pre * pre in edges and self.pre * pre * size in edges
        return Axis(self.name, size, self.pre * pre, self.axis_size) if fits else None

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}:({self.pre}){self.size}"

    @staticmethod
    def merge(axes: Iterable[Axis]) -> tuple[Axis, ...]:
        """Merges neighbors that are adjacent parts of one mesh axis."""
        return _merged(tuple(axes))


@functools.lru_cache(1 << 12)
def _merged(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    merged: list[Axis] = []
    for axis in axes:
        last = merged[-1] if merged else None
        if last and last.name == axis.name and last.pre * last.size == axis.pre:
            merged[-1] = Axis(axis.name, last.size * axis.size, last.pre, axis.axis_size)
        elif axis.size > 1 or axis.whole:
            merged.append(axis)
    return tuple(merged)


@functools.lru_cache(1 << 10)
def _primes(axis: Axis) -> tuple[Axis, ...]:
    parts, pre, rest, p = [], axis.pre, axis.size, 2
    while rest > 1:
        while rest % p == 0:
            parts.append(Axis(axis.name, p, pre, axis.axis_size))
            pre, rest = pre * p, rest // p
        p += 1
    return tuple(parts)


def group_size(axes: Iterable[Axis]) -> int:
    """Returns the number of devices in a group along these axes, which is the number of shards of a dim over them."""
    return math.prod([a.size for a in axes])


def group_position(coords: Coords, group: Sequence[Axis]) -> int:
    """Returns the position of the device at `coords` in its group along `group`, major first."""
    index = 0
    for axis in group:
        index = index * axis.size + axis.coord(coords)
    return index


def member_coords(coords: Coords, group: Sequence[Axis], i: int) -> dict[str, int]:
    """Returns the coordinates of member `i` in the group of the device at `coords` along `group` (major first)."""
    out = dict(coords)
    for axis in reversed(group):
        i, c = divmod(i, axis.size)
        out[axis.name] += (c - axis.coord(out)) * axis.post
    return out


_PART = re.compile(r"(\w+)(?::\((\d+)\)(\d+))?")


def first_replicas(devices: Iterable[Coords], axes: Iterable[Axis]) -> list[int]:
    """Returns for each device the first device with the same coordinates along `axes`, which holds the same shard."""
    first: dict[tuple[int, ...], int] = {}
    axes = tuple(axes)
    return [first.setdefault(tuple([a.coord(c) for a in axes]), i) for i, c in enumerate(devices)]


def parse_axis(text: str) -> tuple[str, int, int | None]:
    """Parses `tensor` (the whole axis: no size) or `tensor:(2)4` as its name, `pre` and size.

    Example:
        >>> parse_axis("tensor:(2)4"), parse_axis("tensor")
        (('tensor', 2, 4), ('tensor', 1, None))
    """
    match = _PART.fullmatch(text)
    assert match, f"{text!r} is no axis"
    name, pre, size = match.groups()
    return name, int(pre or 1), int(size) if size else None
