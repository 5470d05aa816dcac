"""Contiguous cuts of a dim, handed to the parts that the dim is made of."""

from __future__ import annotations

from collections.abc import Sequence


def spread(sizes: Sequence[int], ways: Sequence[int]) -> list[list[int]] | None:
    """Hand the cuts `ways` (primes, major first) to parts of `sizes` (major first): positions per part.

    Cutting the product of `sizes` in contiguous chunks is cutting its parts, major first, as long as every part but the
    last is cut evenly, completely used up before the next is touched; None otherwise.

    Example:
        >>> spread([4, 32], [2, 2, 2])
        [[0, 1], [2]]
        >>> spread([3, 5], [2]) is None
        True
    """
    shares: list[list[int]] = [[] for _ in sizes]
    part, rest = 0, sizes[0] if sizes else 1
    for i, n in enumerate(ways):
        while rest == 1 and part + 1 < len(sizes):
            part, rest = part + 1, sizes[part + 1]
        last = part == len(sizes) - 1
        if rest % n and not last:
            return None
        if rest % n and last and part > 0:
            # An uneven cut of a minor part is not a contiguous cut of the whole.
            return None
        shares[part].append(i)
        rest = rest // n if rest % n == 0 else -(-rest // n)
    return shares
