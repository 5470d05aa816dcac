"""Plans permutations: shards move to other devices unchanged, perhaps after a slice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from shardlib.sharding.mesh.axis import Axis, group_size

T = TypeVar("T")


def plan_permutation(
    factors: dict[int, tuple[list[Axis], list[Axis]]], used: Collection[Axis]
) -> dict[int, tuple[list[Axis], list[Axis]]]:
    """Maps {factor: (axes to remove, axes to add)} to {factor: (axes to slice by first, axes after the permutation)}.

    A permutation keeps the number of shards of every factor. Returns {} if that is impossible.
    """
    leaving = [a for leave, _ in factors.values() for a in leave]
    coming = [a for _, come in factors.values() for a in come]
    if any(a in used and a not in leaving for a in coming):
        return {}
    free, spare = [a for a in coming if a not in used], [a for a in leaving if a not in coming]
    out = {}
    for i, (leave, come) in factors.items():
        have, want = group_size(leave), group_size(come)
        new, rest = _take_axes(free, want / have), _take_axes(spare, have / want)
        if new is None and rest is None:
            return {}
        out[i] = (new or [], [*come, *(rest or [])])
    return out


def _take_axes(axes: list[Axis], product: float) -> list[Axis] | None:
    """Removes axes of this product of sizes from the list and returns them; None if there are none."""
    taken = []
    for a in axes:
        if product % a.size == 0:
            product /= a.size
            taken.append(a)
    if product != 1:
        return None
    axes[:] = [a for a in axes if a not in taken]
    return taken


def changed_axes(pairs: Sequence[tuple[Sequence[T], Sequence[T]]], size: Callable[[T], int]) -> list[T]:
    """Returns the axes along which other shards lie after than before: on another factor, or in front of other axes.

    `pairs` holds the axes of each factor before and after; `size` returns the size of an axis.
    """
    axes_of_pairs = dict.fromkeys(a for pair in pairs for axes in pair for a in axes)
    before, after = (_strides([pair[side] for pair in pairs], size) for side in (0, 1))
    return [a for a in axes_of_pairs if before.get(a) != after.get(a)]


def _strides(factors: Sequence[Sequence[T]], size: Callable[[T], int]) -> dict[T, tuple[int, int]]:
    """Maps each axis to the factor that it shards, and to the distance in shards between neighbors along it."""
    strides = {}
    for i, axes in enumerate(factors):
        stride = 1
        for axis in reversed(axes):
            strides[axis] = i, stride
            stride *= size(axis)
    return strides
