"""Integers that differ by device: local sizes, offsets, and arithmetic on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shardlib.meshes.axis import Axis, Coords
from shardlib.specs.pieces import even, span


class Sym:
    """A function of the device's coordinates that knows which mesh axes it reads.

    Example:
        >>> start = offset(10, [Axis("data", 4)])
        >>> [(start * 2 + 1).at({"data": i}) for i in range(4)]
        [1, 7, 13, 19]
    """

    __slots__ = ("at", "axes", "text")

    def __init__(self, at: Callable[[Coords], Any], axes: frozenset[Axis], text: str) -> None:
        self.at, self.axes, self.text = at, axes, text

    def _with(self, other: Sym | int, op: Callable[[Any, Any], Any], sign: str) -> Sym:
        if isinstance(other, Sym):
            return Sym(
                lambda c: op(self.at(c), other.at(c)), self.axes | other.axes, f"({self.text} {sign} {other.text})"
            )
        return Sym(lambda c: op(self.at(c), other), self.axes, f"({self.text} {sign} {other})")

    def __add__(self, other: Sym | int) -> Sym:
        return self._with(other, lambda a, b: a + b, "+")

    def __sub__(self, other: Sym | int) -> Sym:
        return self._with(other, lambda a, b: a - b, "-")

    def __mul__(self, other: Sym | int) -> Sym:
        return self._with(other, lambda a, b: a * b, "*")

    def __floordiv__(self, other: Sym | int) -> Sym:
        return self._with(other, lambda a, b: a // b, "//")

    def eq(self, other: int) -> Sym:
        """1 where equal, else 0."""
        return self._with(other, lambda a, b: int(a == b), "==")

    def at_most(self, other: int) -> Sym:
        """The smaller of the two."""
        return self._with(other, min, "at most")

    def __rsub__(self, other: int) -> Sym:
        return self._with(other, lambda a, b: b - a, "rsub")

    __radd__ = __add__
    __rmul__ = __mul__

    def __repr__(self) -> str:
        return self.text


def local_size(size: int, axes: Sequence[Axis]) -> Sym | int:
    """How many of `size` elements cut over `axes` a device holds: an int where all hold the same."""
    axes = Axis.merge(axes)  # parts of one mesh axis cut as one
    if even(size, axes):
        return size // math.prod(a.size for a in axes)

    def at(coords: Coords) -> int:
        start, stop = span(size, axes, coords)
        return stop - start

    return Sym(at, frozenset(axes), f"size({size}@{_names(axes)})")


def offset(size: int, axes: Sequence[Axis]) -> Sym | int:
    """The global index of a device's first element."""
    axes = Axis.merge(axes)
    if not axes:
        return 0
    return Sym(lambda coords: span(size, axes, coords)[0], frozenset(axes), f"offset({size}@{_names(axes)})")


def product(factors: Sequence[Sym | int]) -> Sym | int:
    out: Sym | int = 1
    for x in factors:
        out = out * x if isinstance(out, Sym) or not isinstance(x, Sym) else x * out
    return out


def _names(axes: Sequence[Axis]) -> str:
    return "·".join(map(str, axes))
