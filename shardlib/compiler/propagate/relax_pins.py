"""Relaxes annotations of inputs and outputs whose shards do not fit the factors that ops inside the program use.

A fused weight `[d, 3f@t]` is split in three inside, and 12 heads of 64 columns do not fit 8 shards of 96. Such a dim
may keep its annotation outside, while another factor requests its axes inside. Then it is exchanged once, at the input
or output, instead of at every op between.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate

from shardlib.compiler.graph.ir import Graph, Value
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.pins import PinKey
from shardlib.compiler.propagate.propagation import AxisRequest, Propagation, RelaxedDims
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.reshard import FactorAxes


def find_misfits(propagation: Propagation, graph: Graph) -> RelaxedDims:
    """Returns the sharded dims of inputs and outputs that refused a split, or that could be sharded on better factors.

    A factor is worse than another one of its dim if some op needs all of it, or picks elements of it.
    """
    misfits: dict[PinKey, frozenset[int]] = {}
    if propagation.dims.chosen:
        return misfits
    refused, unshardable = {*propagation.dims.resolve(propagation.dims.refused)}, find_unshardable(propagation)
    for key, value, factor_axes in _pinned_ends(propagation, graph) if refused or unshardable else ():
        feed = iter(factor_axes)
        dims = [[(factor, next(feed)) for factor in dim] for dim in propagation.value[value]]
        mine = frozenset(
            d
            for d, dim in enumerate(dims)
            if any(axes for _, axes in dim)
            and (
                not refused.isdisjoint(propagation.value[value][d])
                or (any(axes and x in unshardable for x, axes in dim) and any(x not in unshardable for x, _ in dim))
            )
        )
        if mine:
            misfits[key] = mine
    return misfits


def _pinned_ends(propagation: Propagation, graph: Graph) -> Iterator[tuple[PinKey, Value, FactorAxes]]:
    """Yields the pinned inputs and outputs that have no twin, with their axes."""
    for value, (axes, _) in propagation.pinned_values.items():
        if value.op is None and value not in propagation.pin_twins and value not in propagation.twins:
            yield value, value, axes
    for i, (axes, _) in propagation.outputs.items():
        if i not in propagation.pin_twins:
            yield i, graph.outputs[i], axes


def would_split_compute(propagation: Propagation, misfits: RelaxedDims, graph: Graph) -> bool:
    """Returns whether arithmetic is to be shared out by the axes of `misfits`.

    That is so if, in some op, no other annotated factor takes these axes; in all ops, if each has only dims of misfits.
    Where another one takes them, as FSDP's batch, such a dim is only stored in shards, and gathered anyway.
    """
    axes_of: dict[DimFactor, set[Axis]] = {}
    neighbors: set[DimFactor] = set()
    for key, value, factor_axes in _pinned_ends(propagation, graph):
        axes = iter(factor_axes)
        for d, dim in enumerate(propagation.value[value]) if key in misfits else ():
            requested = {a for _ in dim for a in next(axes)}
            axes_of |= {factor: axes_of.get(factor, set()) | requested for factor in dim if d in misfits[key]}
            neighbors.update(dim)
    stored = False
    for labels in propagation.labels.values() if axes_of else ():
        op_factors = {factor for factors in labels.values() for factor in factors}
        if mine := op_factors & axes_of.keys():
            requests = [request for x in op_factors - mine for request in propagation.requests.get(x, ())]
            others = {request.axis for request in requests if not request.offered}
            free = any(not axes_of[factor] <= others for factor in mine)
            if free and op_factors - neighbors:
                return True
            stored |= not free
    return bool(axes_of) and not stored


def request_elsewhere(
    propagation: Propagation, value: Value, dims: frozenset[int], fixed: FixedLayout
) -> Iterator[tuple[DimFactor, AxisRequest]]:
    """Yields the requests of relaxed dims.

    They go to the first factor with room for most axes, among those that `find_unshardable` leaves.
    """
    unshardable = find_unshardable(propagation)
    for d in sorted(dims):
        axes = [prime for factor in fixed.layout.dims[d] for a in factor.axes for prime in a.primes()]
        factors = [x for x in propagation.value[value][d] if x not in unshardable]
        rooms = [(x, _room(propagation.dims.size(x), axes)) for x in factors]
        factor, n = max(rooms, key=lambda room: room[1], default=(-1, 0))
        yield from ((factor, AxisRequest(a, fixed.source)) for a in axes[:n])


def _room(size: int, axes: Sequence[Axis]) -> int:
    """Returns how many of the axes, major first, a factor of this size has room for."""
    return sum(n <= size for n in accumulate((a.size for a in axes), operator.mul))


def find_unshardable(propagation: Propagation) -> set[DimFactor]:
    """Returns the factors that some op needs whole, or picks elements from that lie on one device."""
    factors: set[DimFactor] = set()
    for op, labels in propagation.labels.items():
        rule = op.rule
        assert rule is not None
        alone = [x for x in rule.local.factors if x not in rule.ties.follows and rule.reduce.get(x) == "sum"]
        for x in (*propagation.whole[op], *alone):
            factors.update(labels.get(x, ()))
    return factors
