"""The range of elements that each device holds of a factor sharded over axes.

A factor is sharded in equal chunks, in shard sizes that the user chose (its size is then a `ShardSizes`), or along the
shards of another factor (`AlignedSize`). `shard_range` is the one function that defines who holds what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from shardlib.sharding.mesh.axis import Axis, Coords, group_size


class UnchunkedSize(int):
    """A size with shards other than chunks. It never equals a plain number, so that caches keep the two apart."""

    def __getnewargs__(self) -> Any:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bool(self.__getnewargs__() == other.__getnewargs__())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.__getnewargs__())


class ShardSizes(UnchunkedSize):
    """The size of a factor with chosen shard sizes: over `axes` (prime parts, major first) they are `sizes`.

    Its value is their sum. Over a prefix of `axes`, neighboring shards are joined; over further axes, every shard is
    split in chunks; over axes that do not begin like `axes`, the whole factor is. So `ShardSizes` behave like chunks:
    dropping the minor axis is an all-gather, adding one is a local slice.

    Example:
        >>> data = Axis("data", 4)
        >>> batch = ShardSizes((5, 3, 8, 0), (data,))
        >>> batch + 0, [shard_range(batch, (data,), {"data": i}) for i in range(4)]
        (16, [(0, 5), (5, 8), (8, 16), (16, 16)])
    """

    sizes: tuple[int, ...]
    axes: tuple[Axis, ...]
    edges: tuple[int, ...]

    def __new__(cls, sizes: Iterable[int], axes: Iterable[Axis]) -> ShardSizes:
        sizes = tuple(sizes)
        self = super().__new__(cls, sum(sizes))
        self.sizes, self.axes = sizes, tuple(p for a in axes for p in a.primes())
        self.edges = (0, *accumulate(sizes))
        assert len(sizes) == group_size(self.axes), f"{len(sizes)} shards over {self.axes}"
        return self

    @staticmethod
    def make_size(sizes: Sequence[int], axes: Sequence[Axis]) -> int:
        """Returns a size with these shards; a plain int if chunks are the same."""
        return sum(sizes) if tuple(sizes) == _spans(sum(sizes), Axis.merge(axes)) else ShardSizes(sizes, axes)

    def common(self, axes: Sequence[Axis]) -> tuple[int, tuple[Axis, ...]]:
        """Returns the length of the prefix that `axes` share with the size's own, and the rest of `axes`, in primes."""
        primes = tuple(p for a in axes for p in a.primes())
        k = 0
        while k < min(len(primes), len(self.axes)) and primes[k] == self.axes[k]:
            k += 1
        return k, primes[k:]

    def __getnewargs__(self) -> Any:
        return self.sizes, self.axes


class AlignedSize(UnchunkedSize):
    """The size of a factor that is sharded along another one, `base`, over all axes.

    A shard of `base` that starts at element e has its counterpart start at `scale * e + shift`. So a padded dim, a
    slice, or the result of a window lies on the device of its operand. Elements in front of the first element of `base`
    belong to its first shard, elements behind the last one to the last shard.

    Example:
        >>> data = Axis("data", 4)
        >>> padded = AlignedSize(10, 8, shift=1)
        >>> padded + 0, shard_sizes(padded, (data,)), shard_sizes(padded, data.primes()[:1])
        (10, (3, 2, 2, 3), (5, 5))
    """

    base: int
    scale: Fraction
    shift: Fraction
    _numbers: tuple[int, int, int, int]  # numerators and denominators of `scale` and `shift`

    def __new__(cls, size: int, base: int, scale: Fraction | int = 1, shift: Fraction | int = 0) -> AlignedSize:
        self = super().__new__(cls, size)
        self.base, self.scale, self.shift = base, Fraction(scale), Fraction(shift)
        self._numbers = *self.scale.as_integer_ratio(), *self.shift.as_integer_ratio()
        return self

    def edge(self, base_edge: int) -> int:
        """Returns the first element of the shard whose counterpart in `base` starts at `base_edge`."""
        if base_edge in (0, self.base + 0):
            return int(self) if base_edge else 0
        scale, scale_under, shift, shift_under = self._numbers
        position = -(-(scale * shift_under * base_edge + shift * scale_under) // (scale_under * shift_under))
        return min(max(position, 0), int(self))

    def __getnewargs__(self) -> Any:
        return int(self), self.base, self.scale, self.shift


def shard_range(size: int, axes: Sequence[Axis], coords: Coords) -> tuple[int, int]:
    """Returns the `(start, stop)` that the device at `coords` holds of a factor sharded over `axes`."""
    if isinstance(size, AlignedSize):
        low, high = shard_range(size.base, Axis.merge(axes), coords)
        return size.edge(low), size.edge(high)
    start, stop = 0, int(size)
    if isinstance(size, ShardSizes):
        k, rest = size.common(axes)
        i = 0
        for axis in size.axes[:k]:
            i = i * axis.size + axis.coord(coords)
        together = group_size(size.axes[k:])
        start, stop = size.edges[i * together], size.edges[(i + 1) * together]
        axes = Axis.merge(rest)
    for axis in axes:
        chunk = -(-(stop - start) // axis.size)
        # A chunk is split by its own length, so that its parts concatenate to it, also in the shorter last chunk.
        low = min(start + chunk * axis.coord(coords), stop)
        start, stop = low, min(low + chunk, stop)
    return start, stop


def is_unchunked(size: int, axes: Sequence[Axis]) -> bool:
    """Returns whether `axes` shard `size` in other shards than chunks."""
    if isinstance(size, AlignedSize):
        axes = Axis.merge(axes)
        return _spans(size, axes) != _spans(int(size), axes)
    return isinstance(size, ShardSizes) and size.common(axes)[0] > 0


def is_even(size: int, axes: Sequence[Axis]) -> bool:
    """Returns whether all shards are chunks of one size."""
    return size % group_size(axes) == 0 and not is_unchunked(size, axes)


def is_nested(size: int, axes: Sequence[Axis], k: int) -> bool:
    """Returns whether the shards of `size` over all `axes` (prime parts) lie inside its shards over the first `k`.

    Adjacent parts of one mesh axis shard as one axis. So the shards of an uneven factor are not nested at a boundary
    between them, unless their sizes are chosen.
    """
    if isinstance(size, AlignedSize):
        return is_nested(size.base, axes, k)
    if not 0 < k < len(axes) or is_even(size, axes) or len(Axis.merge(axes[k - 1 : k + 1])) == 2:
        return True
    return isinstance(size, ShardSizes) and k <= size.common(axes)[0]


def largest_shard(size: int, axes: Sequence[Axis]) -> int:
    """Returns the size of the largest shard; `axes` are merged."""
    if isinstance(size, AlignedSize):
        return max(_spans(size, tuple(axes)))
    if isinstance(size, ShardSizes):
        k, rest = size.common(axes)
        together = group_size(size.axes[k:])
        edges = size.edges[::together]
        size, axes = max(b - a for a, b in pairwise(edges)), Axis.merge(rest)
    for a in axes:
        size = -(-size // a.size)
    return size


@lru_cache(maxsize=4096)
def restrict_size(size: int, axes: tuple[Axis, ...]) -> int:
    """Returns `size` for sharding over just `axes`: with one shard per device, or an int if chunks are the same."""
    if not is_unchunked(size, axes):
        return int(size)
    return ShardSizes.make_size(shard_sizes(size, axes), axes)


def shard_sizes(size: int, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Returns the lengths of all shards of `size` over `axes` (no two adjacent parts of one axis), major first."""
    lengths = []
    for i in range(group_size(axes)):
        coords: dict[str, int] = {}
        for axis in reversed(axes):
            i, c = divmod(i, axis.size)
            coords[axis.name] = coords.get(axis.name, 0) + c * axis.post
        start, stop = shard_range(size, axes, coords)
        lengths.append(stop - start)
    return tuple(lengths)


@lru_cache(maxsize=4096)
def _spans(size: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    return shard_sizes(size, axes)
