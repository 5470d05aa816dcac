"""Integers that differ by device, as data: local sizes, offsets, positions, and arithmetic on them."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardlib.sharding.chunks import UnchunkedSize, is_even, shard_range
from shardlib.sharding.mesh.axis import Axis, Coords, group_position, group_size, member_coords, parse_axis

_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "==": lambda a, b: int(a == b),
}
_OF_AXES: Mapping[str, Callable[[Coords, tuple[Axis, ...], int], int]] = {
    "size": lambda c, axes, n: _length(shard_range(n, axes, c)),
    "offset": lambda c, axes, n: shard_range(n, axes, c)[0],
    "position": lambda c, axes, _: group_position(c, axes),
}


@dataclass(frozen=True, slots=True)
class Sym:
    """An integer that may differ by device: an operation and its arguments.

    * `size` and `offset` of n elements that are sharded over axes (args: axes, n);
    * `group_position` along axes (axes, 0), and `at`, one number for each position (axes, numbers);
    * `+ - * // ==` of two numbers or Syms.

    `parse` reads its text.

    Example:
        >>> start = offset(10, [Axis("data", 4)]) * 2 + 1
        >>> print(start, [start.at({"data": i}) for i in range(4)])
        ((offset(10@data) * 2) + 1) [1, 7, 13, 19]
        >>> parse(str(start), {"data": 4}) == start
        True
    """

    op: str
    args: tuple[Any, Any]

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes along which the number may differ."""
        if self.op in _ARITHMETIC:
            return frozenset(a for x in self.args if isinstance(x, Sym) for a in x.axes)
        return frozenset(self.args[0])

    def at(self, coords: Coords) -> Any:
        """Returns the number on the device at `coords`."""
        a, b = self.args
        if (function := _ARITHMETIC.get(self.op)) is not None:
            return function(local_value(a, coords), local_value(b, coords))
        if self.op == "at":
            return b[group_position(coords, a)]
        return _OF_AXES[self.op](coords, a, b)

    def __add__(self, other: Sym | int) -> Sym:
        return Sym("+", (self, other))

    def __sub__(self, other: Sym | int) -> Sym:
        return Sym("-", (self, other))

    def __mul__(self, other: Sym | int) -> Sym:
        return Sym("*", (self, other))

    def __floordiv__(self, other: Sym | int) -> Sym:
        return Sym("//", (self, other))

    def __rsub__(self, other: int) -> Sym:
        return Sym("-", (other, self))

    __radd__ = __add__
    __rmul__ = __mul__

    def eq(self, other: int) -> Sym:
        """1 where equal, else 0."""
        return Sym("==", (self, other))

    def __repr__(self) -> str:
        a, b = self.args
        if self.op in _ARITHMETIC:
            return f"({a} {self.op} {b})"
        names = "·".join(map(str, a))
        if self.op == "at":
            return f"[{' '.join(map(str, b))}]@{names}"
        return f"position({names})" if self.op == "position" else f"{self.op}({b}@{names})"


def local_value(n: Any, coords: Coords) -> Any:
    """Returns the number of a Sym on the device at `coords`; another argument is returned unchanged."""
    return n.at(coords) if isinstance(n, Sym) else n


def axes_of(n: Sym | int) -> frozenset[Axis]:
    return n.axes if isinstance(n, Sym) else frozenset()


def local_size(size: int, axes: Sequence[Axis]) -> Sym | int:
    """Returns how many of `size` elements sharded over `axes` a device holds: an int if all hold the same."""
    axes = Axis.merge(axes)  # parts of one mesh axis shard as one
    if is_even(size, axes):
        return size // group_size(axes)
    return _placed_span(size, axes)[1] if isinstance(size, UnchunkedSize) else Sym("size", (axes, size))


def offset(size: int, axes: Sequence[Axis]) -> Sym | int:
    """Returns the global index of a device's first element."""
    axes = Axis.merge(axes)
    if not axes:
        return 0
    return _placed_span(size, axes)[0] if isinstance(size, UnchunkedSize) else Sym("offset", (axes, size))


@lru_cache(maxsize=4096)
def _placed_span(size: UnchunkedSize, axes: tuple[Axis, ...]) -> tuple[Sym | int, Sym | int]:
    """Returns a device's offset and length, of a dim whose shards have chosen sizes."""
    first = tabulate(lambda c: shard_range(size, axes, c)[0], axes)
    return first, tabulate(lambda c: _length(shard_range(size, axes, c)), axes)


def place_in(axes: Sequence[Axis]) -> Sym | int:
    """Returns the position of a device along `axes`, major first."""
    return Sym("position", (tuple(axes), 0)) if axes else 0


def product(factors: Sequence[Sym | int]) -> Sym | int:
    out: Sym | int = 1
    for x in factors:
        out = out * x if isinstance(out, Sym) or not isinstance(x, Sym) else x * out
    return out


def of_member(n: Any, group: Sequence[Axis], i: int) -> Any:
    """Returns n on member `i` of a device's own group along `group`."""
    return tabulate(lambda c: n.at(member_coords(c, group, i)), n.axes, group) if isinstance(n, Sym) else n


def tabulate(function: Callable[[Coords], Any], axes: Iterable[Axis], group: Sequence[Axis] = ()) -> Any:
    """`function` of the coordinates along these axes, worked out for all: a Sym of those along which it differs, or a
    number if it is one everywhere.

    It is the same for all members of a group along `group`. A Sym of what is no number, a pair for instance, is one to
    go on with, and none for a program.
    """
    axes = apart(axes, group)
    return table(axes, [function(coords) for coords in everywhere(axes, group)])


def table(axes: Sequence[Axis], values: Sequence[Any]) -> Any:
    """One value for every position along axes that are `apart`, as a Sym of those along which they differ."""
    if len(set(values)) == 1:
        return values[0]
    for axis in axes if len(axes) > 1 else ():
        inner = group_size(axes[axes.index(axis) + 1 :])
        first = [i for i in range(len(values)) if i // inner % axis.size == 0]
        if all(values[i] == values[i + k * inner] for i in first for k in range(axis.size)):
            axes, values = tuple(a for a in axes if a != axis), [values[i] for i in first]
    return Sym("at", (axes, tuple(values)))


@lru_cache(maxsize=4096)
def most(n: Sym) -> int:
    """Returns the number on the device where it is largest."""
    return int(max(n.at(coords) for coords in everywhere(apart(n.axes))))


def apart(axes: Iterable[Axis], group: Iterable[Axis] = ()) -> tuple[Axis, ...]:
    """Returns disjoint axes that cover the same parts as `axes`, without the parts in `group`."""
    primes = {p for a in axes for p in a.primes()} - {p for a in group for p in a.primes()}
    return Axis.merge(sorted(primes, key=lambda a: (a.name, a.pre)))


def everywhere(axes: Sequence[Axis], group: Sequence[Axis] = ()) -> Iterator[dict[str, int]]:
    """Yields a device for every position along `axes`, in order: the first one along `group`."""
    origin = {a.name: 0 for a in (*axes, *group)}
    for at in itertools.product(*(range(a.size) for a in axes)):
        coords = dict(origin)
        for axis, i in zip(axes, at, strict=True):
            coords[axis.name] += i * axis.post
        yield coords


_TOKEN = re.compile(r"\s*(-?\d+|//|==|[-+*()@\[\]]|\w+(?::\(\d+\)\d+)?(?:·\w+(?::\(\d+\)\d+)?)*)")


def parse(text: str, mesh: Mapping[str, int]) -> Sym | int:
    """Reads the text of a Sym; `mesh` are the sizes of the mesh's axes. Raises ValueError for another text."""
    tokens = _TOKEN.findall(text)
    if re.sub(r"\s", "", text) != "".join(tokens):
        raise ValueError(f"{text!r} is no number of a program")
    feed = iter([*tokens, ""])

    def expect(*wanted: str) -> str:
        token: str = next(feed)
        if token not in wanted:
            raise ValueError(f"{text!r}: {token!r} stands where {' or '.join(wanted)} is expected")
        return token

    def axes() -> tuple[Axis, ...]:
        return tuple(_axis(name, mesh) for name in next(feed).split("·"))

    def number(token: str) -> Sym | int:
        if token == "(":
            a = number(next(feed))
            op = expect(*_ARITHMETIC)
            b = number(next(feed))
            expect(")")
            return Sym(op, (a, b))
        if token == "[":
            values = []
            while (token := next(feed)) != "]":
                values.append(int(token))
            expect("@")
            return Sym("at", (axes(), tuple(values)))
        if token in _OF_AXES:
            expect("(")
            n = 0 if token == "position" else int(next(feed))
            if token != "position":
                expect("@")
            result = Sym(token, (axes(), n))
            expect(")")
            return result
        return int(token)

    result = number(next(feed))
    expect("")
    return result


def _axis(text: str, mesh: Mapping[str, int]) -> Axis:
    name, pre, size = parse_axis(text)
    return Axis(name, size or mesh[name], pre, mesh[name])


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]
