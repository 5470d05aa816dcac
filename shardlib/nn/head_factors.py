"""How a dim of a weight that is made of factors, heads say, is cut over an axis: flat, or on the factors."""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.split_axes import spread


def factored(sizes: Sequence[int], part: int, name: str, axis: str, ways: int) -> str:
    """The word of a spec for a dim of these factors, cut from factor `part` on, which is called `name`.

    Chunks of the dim are chunks of its factors where the axis divides what stands in front. Elsewhere they end inside a
    head, and all devices would have to do all heads: then the factor is cut as it is, unevenly. What is left of the
    axis by a factor of which each device has one is the next one's.

    Example:
        >>> factored([12, 64], 0, "in", "tensor", 4), factored([12, 64], 0, "in", "tensor", 8)
        ('in@tensor', '(in@tensor f1=64)')
        >>> factored([4, 7, 128], 0, "out", "tensor", 8)
        '(out@tensor:(1)4 f1=7@tensor:(4)2 f2=128)'
        >>> factored([3, 12, 64], 1, "out", "tensor", 8)
        '(f0=3 out@tensor f2=64)'
    """
    primes = Axis(axis, ways).primes()
    if ways == 1 or (not part and spread(sizes, [p.size for p in primes]) is not None):
        return f"{name}@{axis}"
    cuts: list[tuple[int, tuple[Axis, ...]]] = []
    for i, size in enumerate(sizes):
        mine = _share(size, primes) if i >= part else ()
        primes = primes[len(mine) :]
        if cuts and not mine and not cuts[-1][1]:
            cuts[-1] = cuts[-1][0] * size, ()
        else:
            cuts.append((size, mine))
    first = next(i for i, (_, axes) in enumerate(cuts) if axes)
    words = [name if i == first else f"f{i}={size}" for i, (size, _) in enumerate(cuts)]
    at = ["".join(f"@{axis}" for axis in Axis.merge(axes)) for _, axes in cuts]
    return f"({' '.join(map(''.join, zip(words, at, strict=True)))})"


def _share(size: int, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes that cut a factor: as many as leave one on each device, or all."""
    for k, axis in enumerate(axes):
        if size == 1:
            return axes[:k]
        if size % axis.size:
            break
        size //= axis.size
    return axes
