"""Relaxes annotations of inputs and outputs whose shards do not fit the factors that ops inside the program use.

A fused weight `[d, 3f@t]` is split in three inside, and 12 heads of 64 columns do not fit 8 shards of 96. Such a dim
may keep its annotation outside, while another factor requests its axes inside. Then it is exchanged once, at the input
or output, instead of at every op between.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.pinned import Key
from shardlib.compiler.propagate.propagation import AxisRequest, Propagation
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.reshard import FactorAxes

Loose = Mapping[Key, frozenset[int]]  # of inputs and outputs: the dims that stand apart


def tight(f: Propagation, said: Mapping[Key, tuple[Value, FixedLayout]]) -> Loose:
    """The cut dims of inputs and outputs that refused a split, or are cut on a factor that some op picks from while
    there is another."""
    found: dict[Key, frozenset[int]] = {}
    if f.dims.chosen:
        return found
    refused, no = {*f.dims.leaves(f.dims.refused)}, picked(f)
    for key, (value, _) in said.items() if refused or no else ():
        if key in f.apart or not (key in f.outputs or (key in f.fixed and value.op is None)):
            continue
        feed = iter((f.outputs[key] if isinstance(key, int) else f.fixed[value])[0])
        dims = [[(leaf, next(feed)) for leaf in dim] for dim in f.value[value]]
        mine = frozenset(
            d
            for d, dim in enumerate(dims)
            if any(axes for _, axes in dim)
            and (
                not refused.isdisjoint(f.value[value][d])
                or (any(axes and leaf in no for leaf, axes in dim) and any(leaf not in no for leaf, _ in dim))
            )
        )
        if mine:
            found[key] = mine
    return found


def matter(f: Propagation, graph: Graph) -> bool:
    """Returns whether cuts that stand in the way are there for arithmetic: in some op, or in all if none has other
    dims, nothing else is annotated to be cut by their axes. Where something is, as FSDP's batch, such a dim is stored
    in pieces and made whole anyway."""
    cuts: dict[DimFactor, set[Axis]] = {}
    beside: set[DimFactor] = set()
    for key, dims in f.tight.items():
        value, cut = (graph.outputs[key], f.outputs[key][0]) if isinstance(key, int) else _input(f, key)
        axes = iter(cut)
        for d, dim in enumerate(f.value[value]):
            asked = {a for _ in dim for a in next(axes)}
            cuts |= {leaf: cuts.get(leaf, set()) | asked for leaf in dim if d in dims}
            beside.update(dim)
    stored = False
    for labels in f.labels.values() if cuts else ():
        here = {leaf for leaves in labels.values() for leaf in leaves}
        if mine := here & cuts.keys():
            others = {w.axis for x in here - mine for w in f.requests.get(x, ()) if not w.offered}
            free = any(not cuts[leaf] <= others for leaf in mine)
            if free and here - beside:
                return True
            stored |= not free
    return bool(cuts) and not stored


def _input(f: Propagation, key: Value | Op) -> tuple[Value, FactorAxes]:
    assert isinstance(key, Value)
    return key, f.fixed[key][0]


def wanted(
    f: Propagation, value: Value, dims: frozenset[int], fx: FixedLayout
) -> Iterator[tuple[DimFactor, AxisRequest]]:
    """What the dims of a value want that stand apart as they are fixed: of the factors that no op picks from, the first
    that takes most of the axes."""
    no = picked(f)
    for d in sorted(dims):
        axes = [p for factor in fx.layout.dims[d] for a in factor.axes for p in a.primes()]
        rooms = [(leaf, _room(f.dims.size(leaf), axes)) for leaf in f.value[value][d] if leaf not in no]
        leaf, n = max(rooms, key=lambda room: room[1], default=(-1, 0))
        yield from ((leaf, AxisRequest(a, fx.source)) for a in axes[:n])


def _room(size: int, axes: Sequence[Axis]) -> int:
    """Returns how many of the axes, major first, a factor of this size has room for."""
    return sum(n <= size for n in accumulate((a.size for a in axes), operator.mul))


def picked(f: Propagation) -> set[DimFactor]:
    """Factors of which some op needs the whole, or takes a part that one device has."""
    found: set[DimFactor] = set()
    for op, labels in f.labels.items():
        rule = op.rule
        assert rule is not None
        alone = [x for x in rule.local.factors if x not in rule.ties.follows and rule.reduce.get(x) == "sum"]
        for x in (*f.whole[op], *alone):
            found.update(labels.get(x, ()))
    return found
