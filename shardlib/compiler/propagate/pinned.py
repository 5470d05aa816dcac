"""Writes fixed layouts down on factors of dims, locks these, and reads the layouts again once no factor is split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.dim_factors import DimFactor, Dims, shares
from shardlib.compiler.propagate.propagation import AxisRequest, Propagation
from shardlib.sharding.chunks import ShardSizes, restrict_size
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.reshard import FactorAxes

Key = Value | int | Op  # what is fixed: an input or a constraint's result, an output by its number, the door of a body
Parts = list[
    list[list[DimFactor]] | None
]  # per dim, per factor of a fixed layout: its leaves; None where it has no factor


def twin_of(f: Propagation, value: Value) -> Value:
    twin = Value(value.name, value.shape, value.dtype, None)
    f.twins[twin] = f.twins.get(value, value)
    return twin


def set_apart(f: Propagation, key: Key, value: Value, fx: FixedLayout, parts: Parts) -> None:
    """Gives a fixed layout a value of its own where its shards differ from those of the factors of its dims."""
    dims = []
    for d, (groups, factors) in enumerate(zip(parts, fx.layout.dims, strict=True)):
        dim: list[DimFactor] = []
        for group, factor in zip(groups or (), factors, strict=True):
            for leaf, axes, size in shared_out(f.dims, group, factor):
                if axes and fx.exact[d] and restrict_size(f.dims.size(leaf), axes) != restrict_size(size, axes):
                    (other,) = f.dims.new(int(size))
                    if isinstance(size, ShardSizes):
                        f.dims.choose(other, size, 0)
                    f.same[other], leaf = leaf, other
                dim.append(leaf)
        dims.append(tuple(dim))
    if tuple(dims) != f.value[value]:
        twin = f.apart[key] = twin_of(f, value)
        f.value[twin] = tuple(dims)


def shared_out(
    dims: Dims, group: Sequence[DimFactor], factor: Factor
) -> Iterator[tuple[DimFactor, tuple[Axis, ...], int]]:
    """Yields the dim factors of a fixed layout's factor, each with its mesh axes and its size in that layout."""
    leaves = dims.leaves(group)
    primes = [p for a in factor.axes for p in a.primes()]
    pieces = factor.size if isinstance(factor.size, ShardSizes) else None
    locks = shares([dims.size(x) for x in leaves], (tuple(p.size for p in primes), pieces)) if leaves else []
    assert locks is not None, "a locked factor was split where its cut does not allow it"
    feed = iter(primes)
    for leaf, (ways, size) in zip(leaves, locks, strict=True):
        yield leaf, tuple(next(feed) for _ in ways), int(dims.size(leaf)) if size is None else size


def write_down(dims: Dims, raw: list[list[DimFactor]], layout: Layout) -> Parts:
    """Split a value's dims as a layout says and lock them; leaves per factor, None where one cannot.

    Pieces that the layout has chosen are its classes', unless an earlier one has chosen others.
    """
    out: Parts = []
    for leaves, factors in zip(raw, layout.dims, strict=True):
        parts = dims.refine(leaves, [x.size for x in factors])
        out.append(parts)
        for part, factor in zip(parts or [], factors, strict=bool(parts)):
            ways = [p.size for a in factor.axes for p in a.primes()]
            leaves_of_part = dims.leaves(part)
            pieces = factor.size if isinstance(factor.size, ShardSizes) else None
            locks = shares([dims.size(x) for x in leaves_of_part], (tuple(ways), pieces)) if ways else None
            if ways and leaves_of_part and locks is None:
                out[-1] = None
            for leaf, (mine, size) in zip(leaves_of_part, locks or [], strict=bool(locks)):
                if mine:
                    dims.lock(leaf, mine, size)
                if size is not None:
                    dims.choose(leaf, size, next(dims.order))
    return out


def settle(f: Propagation, fixed: FixedLayout, parts: Parts, asked: list[tuple[DimFactor, AxisRequest]]) -> FactorAxes:
    """Returns the fixed layout on the final factors; records names, and in `asked` the axes that it requests."""
    cut: list[tuple[Axis, ...]] = []
    for d, (groups, factors) in enumerate(zip(parts, fixed.layout.dims, strict=True)):
        assert groups is not None, f"{fixed.source}: dim {d} is not made of its own factors"
        for group, factor, name in zip(groups, factors, fixed.names[d] or (None,) * len(factors), strict=True):
            leaves = f.dims.leaves(group)
            for leaf, axes, _ in shared_out(f.dims, group, factor):
                cut.append(axes)
                asked += [(leaf, AxisRequest(a, fixed.source)) for a in axes]
            if name and len(leaves) == 1:
                f.names.setdefault(leaves[0], name)
    return tuple(cut)


def opened(f: Propagation, dims: tuple[tuple[DimFactor, ...], ...], cut: FactorAxes, fixed: FixedLayout) -> FactorAxes:
    """Gives open dims the axes that their factors request, unless the tensor uses them in another dim."""
    if not any(fixed.open):
        return cut
    used = {a for axes in cut for a in axes}
    flat = [(d, leaf) for d, leaves in enumerate(dims) for leaf in leaves]
    out = []
    for (d, leaf), axes in zip(flat, cut, strict=True):
        if fixed.open[d]:
            for want in f.requests.get(f.same.get(leaf, leaf), ()):
                ways = want.axis.size
                for a in axes:
                    ways *= a.size
                if want.axis not in used and f.dims.size(leaf) >= ways:
                    axes = (*axes, want.axis)
                    used.add(want.axis)
        out.append(axes)
    return tuple(out)
