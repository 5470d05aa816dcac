"""One step of a reshard, and its wire bytes.

Wire bytes are what one device sends under ring algorithms: all-gather out*(n-1)/n, reduce-scatter out*(n-1), all-reduce
2*out*(n-1)/n, all-to-all out*(n-1)/n, a permutation out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardlib.sharding.chunks import fullest
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.reshard.prices import Prices
from shardlib.sharding.split_axes import spread

if TYPE_CHECKING:
    from shardlib.sharding.reshard.refactor_exchange import Crossing

Axes = tuple[Axis, ...]
Cut = tuple[Axes, ...]
Leaves = tuple[tuple[int, ...], ...]  # the sizes of leaves: per dim, or per factor


class Exchange(NamedTuple):
    """Axes that leave one factor for another."""

    axes: Axes
    factor: int
    to: int


@dataclass(frozen=True)
class Step:
    """One collective (or free local slice): `kind` over `axes`, on factor `factor` (and `to`, for all_to_all).

    An all_to_all over the axes of several `exchanges` is all of them, in this order; one with a `crossing` is that, and
    its factors are all leaves of the value.
    """

    kind: str  # slice, reduce_scatter, all_to_all, ppermute, all_reduce, all_gather
    axes: Axes
    factor: int
    to: int
    result: Cut
    sizes: tuple[int, ...]  # of the factors, after it
    bytes: float  # on the wire, per device
    reduce: str = "sum"
    exchanges: tuple[Exchange, ...] = ()
    crossing: Crossing | None = None  # of the leaves of a dim

    def seconds(self, prices: Prices) -> float:
        return 0.0 if self.kind == "slice" else prices.sent(self.axes, self.bytes, self.kind)


def local_numel(sizes: tuple[int, ...], cut: Cut) -> int:
    """Elements on the fullest device."""
    return math.prod(fullest(size, Axis.merge(axes)) for size, axes in zip(sizes, cut, strict=True))


def fits(leaves: Sequence[int], axes: Sequence[Axis]) -> bool:
    """Whether a factor made of `leaves` can be cut evenly by `axes`, and the leaves with it."""
    cuts = [a.size for a in axes]
    return math.prod(leaves) % math.prod(cuts) == 0 and spread(leaves, cuts) is not None
