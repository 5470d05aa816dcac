"""The elements that a device holds of a factor cut over axes.

A factor is cut in chunks, or elsewhere: where somebody chose (its size is then `Pieces`, a number that knows the
pieces), or where another factor is cut (`Aligned`). `span` is the one place that says who holds what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

from shardlib.sharding.mesh.axis import Axis, Coords, ways


class Placed(int):
    """A size that says itself where it is cut. Equal only to one that says the same, never to a plain number: what is
    remembered for the one must not be taken for the other."""


class Pieces(Placed):
    """The size of a factor whose pieces are chosen: over `axes` (prime parts, major first) they are `sizes`.

    It counts as their sum. Over fewer of the axes, neighboring pieces stay together; over more, every piece is cut in
    chunks; over others first, the whole factor is. So what holds of chunks holds here: dropping the minor axis is an
    all-gather, adding one is a local slice.

    Example:
        >>> data = Axis("data", 4)
        >>> batch = Pieces((5, 3, 8, 0), (data,))
        >>> batch + 0, [span(batch, (data,), {"data": i}) for i in range(4)]
        (16, [(0, 5), (5, 8), (8, 16), (16, 16)])
    """

    sizes: tuple[int, ...]
    axes: tuple[Axis, ...]
    edges: tuple[int, ...]

    def __new__(cls, sizes: Iterable[int], axes: Iterable[Axis]) -> Pieces:
        sizes = tuple(sizes)
        self = super().__new__(cls, sum(sizes))
        self.sizes, self.axes = sizes, tuple(p for a in axes for p in a.primes())
        self.edges = (0, *accumulate(sizes))
        assert len(sizes) == ways(self.axes), f"{len(sizes)} pieces over {self.axes}"
        return self

    @staticmethod
    def of(sizes: Sequence[int], axes: Sequence[Axis]) -> int:
        """A size with these pieces; a plain one where chunks are the same."""
        return sum(sizes) if tuple(sizes) == _spans(sum(sizes), Axis.merge(axes)) else Pieces(sizes, axes)

    def common(self, axes: Sequence[Axis]) -> tuple[int, tuple[Axis, ...]]:
        """How many of its axes `axes` begin with, and what follows them (both in prime parts)."""
        primes = tuple(p for a in axes for p in a.primes())
        k = 0
        while k < min(len(primes), len(self.axes)) and primes[k] == self.axes[k]:
            k += 1
        return k, primes[k:]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and (self.sizes, self.axes) == (other.sizes, other.axes)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.sizes, self.axes))

    def __getnewargs__(self) -> tuple[tuple[int, ...], tuple[Axis, ...]]:  # type: ignore[override] # int has its own
        return self.sizes, self.axes


class Aligned(Placed):
    """The size of a factor that is cut where another one is, whatever the axes: between `scale * e + shift` - 1 and
    the next where `base` is cut between e - 1 and e.

    So what lies side by side in both is on one device: a padded dim, a slice, the result of a window. What is in front
    of the first element of `base` goes with that, and what is behind the last one with the last.

    Example:
        >>> data = Axis("data", 4)
        >>> padded = Aligned(10, 8, shift=1)
        >>> padded + 0, spans(padded, (data,)), spans(padded, data.primes()[:1])
        (10, (3, 2, 2, 3), (5, 5))
    """

    base: int
    scale: Fraction
    shift: Fraction
    _numbers: tuple[int, int, int, int]  # both, as whole numbers

    def __new__(cls, size: int, base: int, scale: Fraction | int = 1, shift: Fraction | int = 0) -> Aligned:
        self = super().__new__(cls, size)
        self.base, self.scale, self.shift = base, Fraction(scale), Fraction(shift)
        self._numbers = *self.scale.as_integer_ratio(), *self.shift.as_integer_ratio()
        return self

    def edge(self, of: int) -> int:
        """Where it is cut if `base` is cut in front of element `of`."""
        if of in (0, self.base + 0):
            return int(self) if of else 0
        times, over, more, under = self._numbers
        return min(max(-(-(times * under * of + more * over) // (over * under)), 0), int(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Aligned) and self.__getnewargs__() == other.__getnewargs__()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.__getnewargs__())

    def __getnewargs__(self) -> tuple[int, int, Fraction, Fraction]:  # type: ignore[override] # int has its own
        return int(self), self.base, self.scale, self.shift


def span(size: int, axes: Sequence[Axis], coords: Coords) -> tuple[int, int]:
    """The `(start, stop)` that the device at `coords` holds of a factor cut by `axes`: nested chunks, or as it says."""
    if isinstance(size, Aligned):
        low, high = span(size.base, Axis.merge(axes), coords)
        return size.edge(low), size.edge(high)
    start, stop = 0, int(size)
    if isinstance(size, Pieces):
        k, rest = size.common(axes)
        i = 0
        for axis in size.axes[:k]:
            i = i * axis.size + axis.coord(coords)
        together = ways(size.axes[k:])
        start, stop = size.edges[i * together], size.edges[(i + 1) * together]
        axes = Axis.merge(rest)
    for axis in axes:
        chunk = -(-(stop - start) // axis.size)
        # Each chunk is cut by its own length, so that its parts concatenate to it, the shorter last chunk's too.
        low = min(start + chunk * axis.coord(coords), stop)
        start, stop = low, min(low + chunk, stop)
    return start, stop


def chosen(size: int, axes: Sequence[Axis]) -> bool:
    """Whether `axes` cut `size` where it says, and not in chunks."""
    if isinstance(size, Aligned):
        axes = Axis.merge(axes)
        return _spans(size, axes) != _spans(int(size), axes)
    return isinstance(size, Pieces) and size.common(axes)[0] > 0


def even(size: int, axes: Sequence[Axis]) -> bool:
    """Whether every device holds as much, in the order of the axes."""
    return size % ways(axes) == 0 and not chosen(size, axes)


def nested(size: int, axes: Sequence[Axis], k: int) -> bool:
    """Whether cutting `size` by the first `k` of `axes`, prime parts, is a step on the way to cutting it by all.

    Parts of one mesh axis that stand together cut as one, so on an uneven factor a step may not end between them,
    unless the pieces are chosen.
    """
    if isinstance(size, Aligned):
        return nested(size.base, axes, k)
    if not 0 < k < len(axes) or even(size, axes) or len(Axis.merge(axes[k - 1 : k + 1])) == 2:
        return True
    return isinstance(size, Pieces) and k <= size.common(axes)[0]


def fullest(size: int, axes: Sequence[Axis]) -> int:
    """Elements on the device that holds most; `axes` are merged."""
    if isinstance(size, Aligned):
        return max(_spans(size, tuple(axes)))
    if isinstance(size, Pieces):
        k, rest = size.common(axes)
        together = ways(size.axes[k:])
        edges = size.edges[::together]
        size, axes = max(b - a for a, b in pairwise(edges)), Axis.merge(rest)
    for a in axes:
        size = -(-size // a.size)
    return size


@lru_cache(maxsize=4096)
def over(size: int, axes: tuple[Axis, ...]) -> int:
    """`size` as it is when cut over just `axes`: with one piece per device, or plain where chunks are the same.

    Example:
        >>> pod, data = Axis("pod", 2), Axis("data", 2)
        >>> over(Pieces((5, 3, 8, 0), (pod, data)), (pod,)), over(Pieces((5, 3, 7, 1), (pod, data)), (data,))
        (16, 16)
    """
    if not chosen(size, axes):
        return int(size)
    return Pieces.of(spans(size, axes), axes)


def spans(size: int, axes: Sequence[Axis]) -> tuple[int, ...]:
    """The lengths of all pieces of `size` cut over `axes` (of different mesh axes, or apart), major first."""
    lengths = []
    for i in range(ways(axes)):
        coords: dict[str, int] = {}
        for axis in reversed(axes):
            i, c = divmod(i, axis.size)
            coords[axis.name] = coords.get(axis.name, 0) + c * axis.post
        start, stop = span(size, axes, coords)
        lengths.append(stop - start)
    return tuple(lengths)


@lru_cache(maxsize=4096)
def _spans(size: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    return spans(size, axes)
