"""The same pieces on other devices: which axes a factor is sliced by first, and by which it is cut after."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardlib.sharding.mesh.axis import Axis, ways


def regrid(
    factors: dict[int, tuple[list[Axis], list[Axis]]], used: Collection[Axis]
) -> dict[int, tuple[list[Axis], list[Axis]]]:
    """{factor: (axes to slice by first, axes after)}, given {factor: (axes that leave, axes that come)}.

    Then every factor is cut as often before as after. Empty where that cannot be.
    """
    leaving = [a for leave, _ in factors.values() for a in leave]
    coming = [a for _, come in factors.values() for a in come]
    if any(a in used and a not in leaving for a in coming):
        return {}
    free, spare = [a for a in coming if a not in used], [a for a in leaving if a not in coming]
    out = {}
    for i, (leave, come) in factors.items():
        have, want = ways(leave), ways(come)
        new, rest = _taken(free, want / have), _taken(spare, have / want)
        if new is None and rest is None:
            return {}
        out[i] = (new or [], [*come, *(rest or [])])
    return out


def _taken(axes: list[Axis], product: float) -> list[Axis] | None:
    """Axes of this product, taken out of the list; None where it has none."""
    taken = []
    for a in axes:
        if product % a.size == 0:
            product /= a.size
            taken.append(a)
    if product != 1:
        return None
    axes[:] = [a for a in axes if a not in taken]
    return taken


def moving(pairs: Sequence[tuple[Sequence[Axis], Sequence[Axis]]]) -> list[Axis]:
    """The axes that tell other pieces apart after than before: on another factor, or with others behind them."""
    found = dict.fromkeys(a for pair in pairs for axes in pair for a in axes)
    return [a for a in found if any(_stride(a, before) != _stride(a, after) for before, after in pairs)]


def _stride(axis: Axis, axes: Sequence[Axis]) -> int:
    """How many pieces further a device's neighbor along `axis` is; 0 if it does not cut the factor."""
    return ways(axes[axes.index(axis) + 1 :]) if axis in axes else 0
