"""Writes pinned layouts down on factors of dims, locks these, and reads the layouts again once no factor is split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardlib.compiler.graph.ir import Value
from shardlib.compiler.propagate.dim_factors import DimFactor, FactorClasses, divide_lock
from shardlib.compiler.propagate.pins import PinKey
from shardlib.compiler.propagate.propagation import AxisRequest, FactorDims, Propagation
from shardlib.sharding.chunks import ShardSizes, restrict_size
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.reshard import FactorAxes

# Per dim, per factor of a pinned layout: its dim factors. None for a dim that cannot be split like the layout.
Parts = list[list[list[DimFactor]] | None]


def make_twin(propagation: Propagation, value: Value) -> Value:
    """Makes a value for a pin in other factors, or other shards, than its value has."""
    twin = Value(value.name, value.shape, value.dtype, None)
    propagation.twins[twin] = propagation.twins.get(value, value)
    return twin


def add_twin(propagation: Propagation, key: PinKey, value: Value, fixed: FixedLayout, parts: Parts) -> None:
    """Adds a twin for a pin whose shards differ from those of the factors of its value."""
    dims = []
    for d, (groups, factors) in enumerate(zip(parts, fixed.layout.dims, strict=True)):
        dim: list[DimFactor] = []
        for group, layout_factor in zip(groups or (), factors, strict=True):
            for factor, axes, size in distribute_factor(propagation.dims, group, layout_factor):
                own = factor
                present = propagation.dims.size(factor)
                if axes and fixed.exact[d] and restrict_size(present, axes) != restrict_size(size, axes):
                    (own,) = propagation.dims.new(int(size))
                    if isinstance(size, ShardSizes):
                        propagation.dims.choose(own, size)
                    propagation.same[own] = factor
                dim.append(own)
        dims.append(tuple(dim))
    if tuple(dims) != propagation.value[value]:
        twin = propagation.pin_twins[key] = make_twin(propagation, value)
        propagation.value[twin] = tuple(dims)


def distribute_factor(
    dims: FactorClasses, group: Sequence[DimFactor], layout_factor: Factor
) -> Iterator[tuple[DimFactor, tuple[Axis, ...], int]]:
    """Yields the dim factors of a layout's factor, each with its mesh axes and its size in that layout."""
    factors = dims.resolve(group)
    primes = [p for a in layout_factor.axes for p in a.primes()]
    chosen = layout_factor.size if isinstance(layout_factor.size, ShardSizes) else None
    sizes = [dims.size(x) for x in factors]
    locks = divide_lock(sizes, (tuple(p.size for p in primes), chosen)) if factors else []
    assert locks is not None, "a locked factor was split where its sharding does not allow it"
    feed = iter(primes)
    for factor, (ways, size) in zip(factors, locks, strict=True):
        yield factor, tuple(next(feed) for _ in ways), int(dims.size(factor)) if size is None else size


def lock_layout(dims: FactorClasses, raw: list[list[DimFactor]], layout: Layout) -> Parts:
    """Splits a value's dims like a layout and locks them; returns the dim factors of each factor of the layout.

    Shard sizes that the layout chooses are those of its factor classes, unless an earlier layout has chosen others.
    """
    out: Parts = []
    for dim, factors in zip(raw, layout.dims, strict=True):
        parts = dims.refine(dim, [x.size for x in factors])
        out.append(parts)
        for part, factor in zip(parts or [], factors, strict=bool(parts)):
            ways = [p.size for a in factor.axes for p in a.primes()]
            resolved = dims.resolve(part)
            chosen = factor.size if isinstance(factor.size, ShardSizes) else None
            locks = divide_lock([dims.size(x) for x in resolved], (tuple(ways), chosen)) if ways else None
            if ways and resolved and locks is None:
                out[-1] = None
            for dim_factor, (own_ways, size) in zip(resolved, locks or [], strict=bool(locks)):
                if own_ways:
                    dims.lock(dim_factor, own_ways, size)
                if size is not None:
                    dims.choose(dim_factor, size)
    return out


def read_pin(
    propagation: Propagation, fixed: FixedLayout, parts: Parts, requests: list[tuple[DimFactor, AxisRequest]]
) -> FactorAxes:
    """Returns the axes of a pin on the final factors; records names, and adds the axes to `requests`."""
    out: list[tuple[Axis, ...]] = []
    for d, (groups, factors) in enumerate(zip(parts, fixed.layout.dims, strict=True)):
        assert groups is not None, f"{fixed.source}: dim {d} is not made of its own factors"
        for group, layout_factor, name in zip(groups, factors, fixed.names[d] or (None,) * len(factors), strict=True):
            resolved = propagation.dims.resolve(group)
            for factor, axes, _ in distribute_factor(propagation.dims, group, layout_factor):
                out.append(axes)
                requests += [(factor, AxisRequest(a, fixed.source)) for a in axes]
            if name and len(resolved) == 1:
                propagation.names.setdefault(resolved[0], name)
    return tuple(out)


def fill_open_dims(
    propagation: Propagation, dims: FactorDims, factor_axes: FactorAxes, fixed: FixedLayout
) -> FactorAxes:
    """Gives open dims the axes that their factors request, unless the tensor uses them in another dim."""
    if not any(fixed.open):
        return factor_axes
    used = {a for axes in factor_axes for a in axes}
    flat = [(d, factor) for d, factors in enumerate(dims) for factor in factors]
    out = []
    for (d, factor), axes in zip(flat, factor_axes, strict=True):
        if fixed.open[d]:
            for request in propagation.requests.get(propagation.same.get(factor, factor), ()):
                ways = request.axis.size
                for a in axes:
                    ways *= a.size
                if request.axis not in used and propagation.dims.size(factor) >= ways:
                    axes = (*axes, request.axis)
                    used.add(request.axis)
        out.append(axes)
    return tuple(out)
