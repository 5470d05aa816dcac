"""Writes the spec of a weight's dim that is made of factors, such as heads, and is sharded over an axis."""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.split_axes import split_axes


def shard_factors(sizes: Sequence[int], part: int, name: str, axis: str, ways: int) -> str:
    """Returns the spec of a dim of these factors, sharded from factor `part` on, which is called `name`.

    If the axis divides the leading factors, chunks of the dim are chunks of its factors. Otherwise chunks would end
    inside a head, and all devices would compute all heads; then the factor itself is sharded, unevenly. Once each
    device has one element of a factor, the rest of the axis shards the next factor.

    Example:
        >>> shard_factors([12, 64], 0, "in", "tensor", 4), shard_factors([12, 64], 0, "in", "tensor", 8)
        ('in@tensor', '(in@tensor f1=64)')
        >>> shard_factors([4, 7, 128], 0, "out", "tensor", 8)
        '(out@tensor:(1)4 f1=7@tensor:(4)2 f2=128)'
        >>> shard_factors([3, 12, 64], 1, "out", "tensor", 8)
        '(f0=3 out@tensor f2=64)'
    """
    primes = Axis(axis, ways).primes()
    if ways == 1 or (not part and split_axes(sizes, [p.size for p in primes]) is not None):
        return f"{name}@{axis}"
    factors: list[tuple[int, tuple[Axis, ...]]] = []
    for i, size in enumerate(sizes):
        own = _axes_for_factor(size, primes) if i >= part else ()
        primes = primes[len(own) :]
        if factors and not own and not factors[-1][1]:
            factors[-1] = factors[-1][0] * size, ()
        else:
            factors.append((size, own))
    first = next(i for i, (_, axes) in enumerate(factors) if axes)
    words = [name if i == first else f"f{i}={size}" for i, (size, _) in enumerate(factors)]
    at = ["".join(f"@{axis}" for axis in Axis.merge(axes)) for _, axes in factors]
    return f"({' '.join(map(''.join, zip(words, at, strict=True)))})"


def _axes_for_factor(size: int, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Returns the axes that shard a factor: as many as leave one element per device, or all."""
    for k, axis in enumerate(axes):
        if size == 1:
            return axes[:k]
        if size % axis.size:
            break
        size //= axis.size
    return axes
