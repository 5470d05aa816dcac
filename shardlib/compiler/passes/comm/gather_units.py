"""Which gathers of weights belong together: a layer's, where the program repeats itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_LONGEST = 64  # weights of one layer


def units(keys: Sequence[Hashable], sizes: Sequence[int], least: float) -> list[int]:
    """The number of the unit of each gather, in the order in which they are first read.

    `keys` are alike for what layers repeat. A unit is what is followed by the same again, as often as it is; units of
    fewer than `least` bytes are joined. What does not repeat is a unit by itself.

    Example:
        >>> units(["table", "q", "k", "q", "k", "q", "k", "head"], [1] * 8, 1)
        [0, 1, 1, 2, 2, 3, 3, 4]
        >>> units("abab", [1] * 4, 4), units("abc", [5, 1, 1], 2)
        ([0, 0, 0, 0], [0, 1, 1])
    """
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    row = [number[key] for key in keys]
    ends: list[int] = []
    i = 0
    while i < len(row):
        period = _period(row, i)
        ends.append(i := i + (period or 1))
        while period and row[i : i + period] == row[i - period : i]:
            ends.append(i := i + period)
    found: list[int] = []
    unit, held = 0, 0
    for end in ends:
        size = sum(sizes[len(found) : end])
        found += [unit] * (end - len(found))
        held += size
        if held >= least:
            unit, held = unit + 1, 0
    return found


def _period(row: Sequence[int], i: int) -> int:
    """How many of them are followed by the same; 0: nothing repeats here."""
    for n in range(1, min(_LONGEST, (len(row) - i) // 2) + 1):
        if row[i] == row[i + n] and row[i : i + n] == row[i + n : i + 2 * n]:
            return n
    return 0
