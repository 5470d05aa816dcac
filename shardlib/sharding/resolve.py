"""Resolves the dims of a spec for a shape and a mesh: to a layout, or to a list of faults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import EllipsisType

from shardlib.sharding.grammar import SpecDim, SpecFactor
from shardlib.sharding.layout import Factor, Layout, ShardSizes
from shardlib.sharding.mesh.axis import Axis, group_size, parse_axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.mesh.mesh_format import did_you_mean
from shardlib.sharding.placement import FixedLayout

Dims = tuple[SpecDim | EllipsisType, ...]


@dataclass(frozen=True)
class Fault:
    """One fault of a spec, the rule that it breaks, and the remedy."""

    text: str
    rule: str
    remedy: str


_UNSHARDED = SpecDim((SpecFactor(None),))
_SIZES = (
    "the sizes of a dim's factors multiply to the dim",
    "give sizes by name, as in einops; one of a dim's factors may be left to be inferred",
)
_PIECES = (
    "chosen shard sizes are one for every device along the dim's axes, and add up to the dim",
    "write batch@data=[5 3 8 0], with 0 for an empty shard",
)
_STRICT = "on a strict mesh a logical name has a rule, or says its axes itself"
_PARTS = (
    "a mesh axis splits into parts of its primes, smallest first, and shards a tensor once",
    "write axis:(pre)size, where pre is the product of the parts before it: tensor:(1)2 and tensor:(2)8 make 16",
)


@lru_cache(maxsize=16384)
def resolve_dims(
    dims: Dims, shape: tuple[int, ...], mesh: Mesh | None, sizes: tuple[tuple[str, int | tuple[int, ...]], ...]
) -> FixedLayout | tuple[Fault, ...]:
    """Returns the layout of a tensor of `shape` on `mesh`, or the faults; without a mesh nothing is sharded.

    `sizes` lists the name of a factor with its size, or with its shard sizes.
    """
    faults: list[Fault] = []
    names = [f.name for dim in dims if isinstance(dim, SpecDim) for f in dim.factors if f.name]
    for name, size in sizes:
        if name not in names:
            hint = did_you_mean(name, names)
            text, rules = (size, _SIZES) if isinstance(size, int) else (_listed(size), _PIECES)
            faults.append(Fault(f"{name}={text} is given, but the spec has no {name!r}{hint}", *rules))
    pieces = {name: size for name, size in sizes if isinstance(size, tuple)}
    factor_sizes = {name: size for name, size in sizes if not isinstance(size, tuple)}
    dims = tuple(_with_pieces(dim, pieces, faults) if isinstance(dim, SpecDim) else dim for dim in dims)
    axes = _AxisFinder(mesh, faults)
    aligned = _aligned(dims, len(shape))
    if aligned is None:
        faults.append(_wrong_rank(dims, shape))
        for i, dim in enumerate(dim for dim in dims if isinstance(dim, SpecDim)):
            for f in dim.factors:
                axes.find(f, i)
        return tuple(faults)
    layout = []
    for i, (dim, size) in enumerate(zip(aligned, shape, strict=True)):
        factor_axes = [axes.find(f, i) for f in dim.factors]
        parts = _find_sizes(dim, i, size, factor_sizes, faults)
        layout.append(
            tuple(
                Factor(n, _fit_axes(n, over))
                if f.pieces is None or mesh is None
                else _shard_in_pieces(f, n, over, f"dim {i} `{f}`", faults)
                for f, n, over in zip(dim.factors, parts, factor_axes, strict=True)
            )
        )
    if faults:
        return tuple(faults)
    names_of = tuple(tuple(f.name for f in dim.factors) for dim in aligned)
    exact = tuple(any(f.pieces is not None for f in dim.factors) for dim in aligned)
    return FixedLayout(Layout(tuple(layout)), names_of, tuple(dim.open for dim in aligned), exact)


def find_dim_axes(dims: Dims, rank: int, mesh: Mesh) -> list[tuple[Axis, ...]] | tuple[Fault, ...]:
    """Returns the axes over which each dim is sharded, without regard to its size, or the faults."""
    faults: list[Fault] = []
    axes, aligned = _AxisFinder(mesh, faults), _aligned(dims, rank)
    if aligned is None:
        return (_wrong_rank(dims, (0,) * rank),)
    dim_axes = [tuple(a for f in dim.factors for a in axes.find(f, i)) for i, dim in enumerate(aligned)]
    return tuple(faults) if faults else dim_axes


def _aligned(dims: Dims, rank: int) -> tuple[SpecDim, ...] | None:
    """Returns one `SpecDim` per dim of the tensor; None if the rank does not fit."""
    missing = rank - sum(dim is not ... for dim in dims)
    if missing < 0 or (missing and ... not in dims):
        return None
    spread = ((dim,) if isinstance(dim, SpecDim) else (_UNSHARDED,) * missing for dim in dims)
    return tuple(dim for dims in spread for dim in dims)


def _wrong_rank(dims: Dims, shape: tuple[int, ...]) -> Fault:
    named = sum(dim is not ... for dim in dims)
    least = "at least " if ... in dims else ""
    return Fault(
        f"the spec has {least}{_count(named)}, the tensor has {_count(len(shape))}",
        "a spec has as many dims as the tensor",
        "write `_` for a dim that stays whole, `...` for any number of them",
    )


def _count(n: int) -> str:
    return f"{n} dim" if n == 1 else f"{n} dims"


def _with_pieces(dim: SpecDim, pieces: Mapping[str, tuple[int, ...]], faults: list[Fault]) -> SpecDim:
    """Returns the dim with the shard sizes that the call passes by name."""
    factors = []
    for f in dim.factors:
        sizes = pieces.get(f.name) if f.name else None
        if sizes is not None and f.pieces is not None and sizes != f.pieces:
            faults.append(
                Fault(f"{f.name}={_listed(sizes)} is given, the spec says {f.name}={_listed(f.pieces)}", *_PIECES)
            )
        factors.append(f if sizes is None else replace(f, pieces=sizes))
    return replace(dim, factors=tuple(factors))


def _shard_in_pieces(f: SpecFactor, size: int, axes: tuple[Axis, ...], user: str, faults: list[Fault]) -> Factor:
    """Shards a factor of `size` over `axes` in the shard sizes of its spec; `user` names it in faults."""
    pieces, before = f.pieces or (), len(faults)
    devices = group_size(axes)
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in pieces):
        faults.append(Fault(f"{user}: {', '.join(str(n) for n in pieces)} are not sizes", *_PIECES))
    elif not axes and not f.axes:
        faults.append(Fault(f"{user}: it is not sharded, so it has no shard sizes", *_PIECES))
    elif axes and len(pieces) != devices:
        over = " x ".join(map(str, axes))
        faults.append(Fault(f"{user}: it has {len(pieces)} shard sizes, {over} has {devices} devices", *_PIECES))
    elif size == sum(pieces) == 1:
        rule = "a dim of size 1 is replicated: it broadcasts against dims of any size"
        faults.append(Fault(f"{user}: it has size 1", rule, "leave its shard sizes out"))
    return Factor(size, axes) if len(faults) > before or not axes else Factor(ShardSizes(pieces, axes), axes)


def _listed(pieces: tuple[int, ...]) -> str:
    return f"[{' '.join(map(str, pieces))}]"


class _AxisFinder:
    """Finds the mesh axes of factors and their faults; no axis may shard two factors."""

    def __init__(self, mesh: Mesh | None, faults: list[Fault]) -> None:
        self.mesh, self.faults = mesh, faults
        self.users: dict[str, list[tuple[Axis, str]]] = {}

    def find(self, factor: SpecFactor, dim: int) -> tuple[Axis, ...]:
        mesh, names, user = self.mesh, factor.axes, f"dim {dim} `{factor}`"
        if mesh is None:
            return ()
        if names is None:
            if mesh.strict and factor.name and factor.name not in mesh.rules:
                hint = did_you_mean(factor.name, mesh.rules)
                remedy = f"give it one, rules={{{factor.name!r}: None}} where it stays whole, or write {factor.name}@()"
                self.faults.append(Fault(f"{user}: {factor.name!r} has no rule{hint}", _STRICT, remedy))
                return ()
            to = mesh.rules.get(factor.name) if factor.name else None
            names = (to,) if isinstance(to, str) else to or ()
            user += f" (by the rule {factor.name} -> {' '.join(names)})" if names else ""
        usable = (self._find_usable(mesh, name, user) for name in names)
        return Axis.merge(axis for axis in usable if axis is not None)

    def _find_usable(self, mesh: Mesh, text: str, user: str) -> Axis | None:
        name, pre, size = parse_axis(text)
        if name not in mesh.axes:
            logical = f"; {name!r} is a name with a rule, which a spec in text takes: '{name} ...'"
            hint = logical if name in mesh.rules else did_you_mean(name, mesh.axes)
            fault = f"{user}: the mesh has no axis {name!r}{hint}"
            if name == mesh.stage_axis:
                fault = f"{user}: {name!r} is the axis of stages, which shards no tensor"
            use = f"use one of {', '.join(mesh.axes)}"
            self.faults.append(Fault(fault, "a spec names axes of its mesh", use))
            return None
        axis = mesh.axis(name)
        if size is not None:
            if (part := axis.part(pre, size)) is None:
                primes = " x ".join(str(p.size) for p in axis.primes()) or "1"
                fault = f"{user}: {text} is no part of {name!r}, whose {axis.size} devices are {primes}"
                self.faults.append(Fault(fault, *_PARTS))
                return None
            axis = part
        for other, by in self.users.get(name, ()):
            if not set(axis.primes() or (axis,)).isdisjoint(other.primes() or (other,)):
                self._add_clash(axis, other, user, by)
                return None
        self.users.setdefault(name, []).append((axis, user))
        return axis

    def _add_clash(self, axis: Axis, other: Axis, user: str, by: str) -> None:
        drop = "drop one of the two, or override a rule with `name@()`"
        if axis == other:
            twice = f"twice by {user}" if by == user else f"by {by} and by {user}"
            self.faults.append(Fault(f"axis {str(axis)!r} is used {twice}", "a mesh axis shards a tensor once", drop))
        else:
            fault = f"{other} is used by {by} and {axis} by {user}: they overlap"
            self.faults.append(Fault(fault, _PARTS[0], drop))


def _find_sizes(dim: SpecDim, i: int, size: int, factor_sizes: Mapping[str, int], faults: list[Fault]) -> list[int]:
    """Returns the size of every factor of one dim; after a fault, placeholders with which resolving continues."""
    dim_faults: list[Fault] = []
    stated = [_find_size(f, size if len(dim.factors) == 1 else None, factor_sizes, dim_faults) for f in dim.factors]
    if fault := _misfit([f.name or "_" for f in dim.factors], stated, size):
        dim_faults.append(Fault(fault, *_SIZES))
    faults += [replace(f, text=f"dim {i} `{dim}`: {f.text}") for f in dim_faults]
    if fault:
        return [1] * len(stated)
    rest = math.prod(n for n in stated if n is not None)
    return [size // rest if n is None else n for n in stated]


def _find_size(f: SpecFactor, dim_size: int | None, factor_sizes: Mapping[str, int], faults: list[Fault]) -> int | None:
    """Returns the size of a factor if the call, the spec or its shard sizes state it.

    `dim_size` is the size of the dim if the factor is the whole dim.
    """
    keyword = factor_sizes.get(f.name) if f.name else None
    if keyword is not None and f.size is not None and keyword != f.size:
        faults.append(Fault(f"{f.name}={keyword} is given, the spec says {f.name}={f.size}", *_SIZES))
    size = f.size if keyword is None else keyword
    if f.pieces is None or not all(isinstance(n, int) for n in f.pieces):
        return size
    total = sum(f.pieces)
    if (expected := dim_size if size is None else size) is None:
        return total
    if total != expected:
        text = f"the dim has size {dim_size}" if size is None else f"{f.name or '_'} has size {size}"
        faults.append(Fault(f"{' + '.join(map(str, f.pieces))} = {total}, {text}", *_PIECES))
    return size


def _misfit(names: Sequence[str], sizes: Sequence[int | None], size: int) -> str:
    """Says why factors of these sizes do not make a dim of `size`; one of them may be None, to be inferred."""
    stated = [f"{name}={n}" for name, n in zip(names, sizes, strict=True) if n is not None]
    missing = [name for name, n in zip(names, sizes, strict=True) if n is None]
    if any(n is not None and (not isinstance(n, int) or n < 0) for n in sizes):
        return f"{', '.join(stated)} is not a size"
    if len(missing) > 1:
        return f"the sizes of {', '.join(missing)} are not known (the dim has size {size})"
    product = math.prod(n for n in sizes if n is not None)
    makes = f" = {product}" if len(stated) > 1 else ""
    if not missing and product != size:
        return f"{' * '.join(stated)}{makes}, the dim has size {size}"
    if missing and (product == 0 or size % product):
        return f"{' * '.join(stated)}{makes} does not divide the dim's size {size}"
    return ""


def _fit_axes(size: int, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Returns the axes that shard a factor; an axis that is a larger multiple of the remaining size gives only a part.

    A part consists of primes of the axis, major first, so that two parts of one axis share no devices or whole primes.
    """
    fitted: list[Axis] = []
    for axis in axes:
        if 0 < size < axis.size and axis.size % size == 0:
            part: list[Axis] = []
            for prime in axis.primes():
                if size % prime.size == 0:
                    part.append(prime)
                    size //= prime.size
            fitted += Axis.merge(part)
            continue
        if axis.size > 1 or axis.whole:
            fitted.append(axis)
        size = -(-size // axis.size)
    return tuple(fitted)
