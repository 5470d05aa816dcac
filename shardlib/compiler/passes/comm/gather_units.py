"""Groups gathers of weights into units: the layers that a program repeats."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_LONGEST = 64  # weights of one layer


def units(keys: Sequence[Hashable], sizes: Sequence[int], least: float) -> list[int]:
    """Returns the number of each gather's unit, in the order of their first readers.

    `keys` are equal for gathers that layers repeat. Each repetition of a sequence of keys is a unit, and so is a gather
    that does not repeat. Adjacent units of fewer than `least` bytes are merged.

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
    numbers: list[int] = []
    unit, held = 0, 0
    for end in ends:
        size = sum(sizes[len(numbers) : end])
        numbers += [unit] * (end - len(numbers))
        held += size
        if held >= least:
            unit, held = unit + 1, 0
    return numbers


def _period(row: Sequence[int], i: int) -> int:
    """Returns the length of the sequence at `i` that repeats at once; 0 if none does."""
    for n in range(1, min(_LONGEST, (len(row) - i) // 2) + 1):
        if row[i] == row[i + n] and row[i : i + n] == row[i + n : i + 2 * n]:
            return n
    return 0
