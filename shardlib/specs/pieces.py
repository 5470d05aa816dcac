"""The elements that a device holds of a factor cut over axes.

A factor is cut in chunks, or where somebody chose: its size is then `Pieces`, a number that knows the pieces. `span` is
the one place that says who holds what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from shardlib.meshes.axis import Axis, Coords


class Pieces(int):
    """The size of a factor whose pieces are chosen: over `axes` (prime parts, major first) they are `sizes`.

    It counts as their sum. Over fewer of the axes, neighbouring pieces stay together; over more, every piece is cut in
    chunks; over others first, the whole factor is. So what holds of chunks holds here: dropping the minor axis is an
    all-gather, adding one is a local slice. Equal only to a size with the same pieces, never to a plain number: what is
    remembered for the one must not be taken for the other.

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
        assert len(sizes) == math.prod(a.size for a in self.axes), f"{len(sizes)} pieces over {self.axes}"
        return self

    @staticmethod
    def of(sizes: Sequence[int], axes: Sequence[Axis]) -> int:
        """A size with these pieces; a plain one where chunks are the same."""
        return sum(sizes) if tuple(sizes) == _chunks(sum(sizes), Axis.merge(axes)) else Pieces(sizes, axes)

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


def span(size: int, axes: Sequence[Axis], coords: Coords) -> tuple[int, int]:
    """The `(start, stop)` that the device at `coords` holds of a factor cut by `axes` (nested chunks, or `Pieces`)."""
    start, stop = 0, int(size)
    if isinstance(size, Pieces):
        k, rest = size.common(axes)
        i = 0
        for axis in size.axes[:k]:
            i = i * axis.size + axis.coord(coords)
        together = math.prod(a.size for a in size.axes[k:])
        start, stop = size.edges[i * together], size.edges[(i + 1) * together]
        axes = Axis.merge(rest)
    for axis in axes:
        chunk = -(-(stop - start) // axis.size)
        # Each chunk is cut by its own length, so that its parts concatenate to it, the shorter last chunk's too.
        low = min(start + chunk * axis.coord(coords), stop)
        start, stop = low, min(low + chunk, stop)
    return start, stop


def chosen(size: int, axes: Sequence[Axis]) -> bool:
    """Whether pieces that somebody chose decide how `axes` cut `size`."""
    return isinstance(size, Pieces) and size.common(axes)[0] > 0


def even(size: int, axes: Sequence[Axis]) -> bool:
    """Whether every device holds as much, in the order of the axes."""
    return size % math.prod(a.size for a in axes) == 0 and not chosen(size, axes)


def nested(size: int, axes: Sequence[Axis], k: int) -> bool:
    """Whether cutting `size` by the first `k` of `axes`, prime parts, is a step on the way to cutting it by all.

    Parts of one mesh axis that stand together cut as one, so on an uneven factor a step may not end between them,
    unless the pieces are chosen.
    """
    if not 0 < k < len(axes) or even(size, axes) or len(Axis.merge(axes[k - 1 : k + 1])) == 2:
        return True
    return isinstance(size, Pieces) and k <= size.common(axes)[0]


def fullest(size: int, axes: Sequence[Axis]) -> int:
    """Elements on the device that holds most; `axes` are merged."""
    if isinstance(size, Pieces):
        k, rest = size.common(axes)
        together = math.prod(a.size for a in size.axes[k:])
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
    for i in range(math.prod(a.size for a in axes)):
        coords: dict[str, int] = {}
        for axis in reversed(axes):
            i, c = divmod(i, axis.size)
            coords[axis.name] = coords.get(axis.name, 0) + c * axis.post
        start, stop = span(size, axes, coords)
        lengths.append(stop - start)
    return tuple(lengths)


@lru_cache(maxsize=4096)
def _chunks(size: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    return spans(size, axes)
