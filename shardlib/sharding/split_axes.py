"""Distributes the axes over a dim among the factors of the dim."""

from __future__ import annotations

from collections.abc import Sequence


def split_axes(sizes: Sequence[int], ways: Sequence[int]) -> list[list[int]] | None:
    """Distributes the axis sizes `ways` (primes, major first) over factors of `sizes` (major first).

    Returns the positions in `ways` for each factor. Chunks of the product of `sizes` are chunks of its factors if every
    factor is divided evenly, and down to one element before the next factor is; None otherwise.

    Example:
        >>> split_axes([4, 32], [2, 2, 2])
        [[0, 1], [2]]
        >>> split_axes([3, 5], [2]) is None
        True
    """
    positions: list[list[int]] = [[] for _ in sizes]
    part, rest = 0, sizes[0] if sizes else 1
    for i, n in enumerate(ways):
        while rest == 1 and part + 1 < len(sizes):
            part, rest = part + 1, sizes[part + 1]
        last = part == len(sizes) - 1
        if rest % n and not last:
            return None
        if rest % n and last and part > 0:
            # Uneven chunks of a minor factor are not contiguous chunks of the product.
            return None
        positions[part].append(i)
        rest = rest // n if rest % n == 0 else -(-rest // n)
    return positions
