"""Defines one step of a reshard, with its wire bytes.

Wire bytes are what one device sends under ring algorithms: all-gather out*(n-1)/n, reduce-scatter out*(n-1), all-reduce
2*out*(n-1)/n, all-to-all out*(n-1)/n, a permutation out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardlib.sharding.chunks import largest_shard
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.reshard.prices import Prices
from shardlib.sharding.split_axes import split_axes

if TYPE_CHECKING:
    from shardlib.sharding.reshard.refactor_exchange import RefactorExchange

Axes = tuple[Axis, ...]
FactorAxes = tuple[Axes, ...]
FactorSizes = tuple[tuple[int, ...], ...]  # the sizes of factors: per dim, or per fused factor


class Exchange(NamedTuple):
    """Axes that leave one factor for another."""

    axes: Axes
    factor: int
    to: int


@dataclass(frozen=True)
class Step:
    """One collective (or free local slice): `kind` over `axes`, on factor `factor` (and `to`, for all_to_all).

    An all_to_all with `exchanges` does all of them, in this order. One with a `crossing` changes the factors of a dim,
    and its `result` and `sizes` are those of the value's unfused factors.
    """

    kind: str  # slice, reduce_scatter, all_to_all, ppermute, all_reduce, all_gather
    axes: Axes
    factor: int
    to: int
    result: FactorAxes  # after it
    sizes: tuple[int, ...]  # of the factors, after it
    bytes: float  # on the wire, per device
    reduce: str = "sum"
    exchanges: tuple[Exchange, ...] = ()
    crossing: RefactorExchange | None = None

    def seconds(self, prices: Prices) -> float:
        return 0.0 if self.kind == "slice" else prices.comm_seconds(self.axes, self.bytes, self.kind)


def local_numel(sizes: tuple[int, ...], cut: FactorAxes) -> int:
    """Returns the number of elements on the device that holds most."""
    return math.prod(largest_shard(size, Axis.merge(axes)) for size, axes in zip(sizes, cut, strict=True))


def is_evenly_sharded(sizes: Sequence[int], axes: Sequence[Axis]) -> bool:
    """Returns whether `axes` shard a factor fused of factors of `sizes` evenly, and these with it."""
    ways = [a.size for a in axes]
    return math.prod(sizes) % math.prod(ways) == 0 and split_axes(sizes, ways) is not None
