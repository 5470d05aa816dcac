"""The dims of a spec + shape + mesh -> a layout, or everything that does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import EllipsisType

from shardlib.sharding.grammar import SpecDim, SpecFactor
from shardlib.sharding.layout import Factor, Layout, Pieces
from shardlib.sharding.mesh.axis import Axis, split_name, ways
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.mesh.mesh_format import did_you_mean
from shardlib.sharding.placement import Fixed

Dims = tuple[SpecDim | EllipsisType, ...]


@dataclass(frozen=True)
class Fault:
    """One thing that does not fit, the rule that it breaks, and what to do about it."""

    text: str
    rule: str
    remedy: str


_WHOLE = SpecDim((SpecFactor(None),))
_SIZES = (
    "the sizes of a dim's factors multiply to the dim",
    "give sizes by name, as in einops; one of a dim's factors may be left to be inferred",
)
_PIECES = (
    "chosen pieces are one size for every device along the dim's axes, and add up to the dim",
    "write batch@data=[5 3 8 0], with 0 for a device that holds nothing",
)
_STRICT = "on a strict mesh a logical name has a rule, or says its axes itself"
_PARTS = (
    "a mesh axis is cut into parts by its primes, smallest first, and cuts a tensor once",
    "write axis:(pre)size, where pre is the product of the parts before it: tensor:(1)2 and tensor:(2)8 make 16",
)


@lru_cache(maxsize=16384)
def fit(
    dims: Dims, shape: tuple[int, ...], mesh: Mesh | None, sizes: tuple[tuple[str, int | tuple[int, ...]], ...]
) -> Fixed | tuple[Fault, ...]:
    """What the spec of these dims gives a tensor of `shape` on `mesh`; outside any (None), nothing is cut.

    `sizes` has by name the size of a factor, or the sizes of its pieces.
    """
    faults: list[Fault] = []
    names = [f.name for dim in dims if isinstance(dim, SpecDim) for f in dim.factors if f.name]
    for name, size in sizes:
        if name not in names:
            hint = did_you_mean(name, names)
            told, rules = (size, _SIZES) if isinstance(size, int) else (_listed(size), _PIECES)
            faults.append(Fault(f"{name}={told} is given, but the spec has no {name!r}{hint}", *rules))
    pieces = {name: size for name, size in sizes if isinstance(size, tuple)}
    given = {name: size for name, size in sizes if not isinstance(size, tuple)}
    dims = tuple(_with_pieces(dim, pieces, faults) if isinstance(dim, SpecDim) else dim for dim in dims)
    axes = _Axes(mesh, faults)
    aligned = _aligned(dims, len(shape))
    if aligned is None:
        faults.append(_wrong_rank(dims, shape))
        for i, dim in enumerate(dim for dim in dims if isinstance(dim, SpecDim)):
            for f in dim.factors:
                axes.of(f, i)
        return tuple(faults)
    layout = []
    for i, (dim, size) in enumerate(zip(aligned, shape, strict=True)):
        cuts = [axes.of(f, i) for f in dim.factors]
        parts = _sizes(dim, i, size, given, faults)
        layout.append(
            tuple(
                Factor(n, _fitted(n, cut))
                if f.pieces is None or mesh is None
                else _cut(f, n, cut, f"dim {i} `{f}`", faults)
                for f, n, cut in zip(dim.factors, parts, cuts, strict=True)
            )
        )
    if faults:
        return tuple(faults)
    names_of = tuple(tuple(f.name for f in dim.factors) for dim in aligned)
    exact = tuple(any(f.pieces is not None for f in dim.factors) for dim in aligned)
    return Fixed(Layout(tuple(layout)), names_of, tuple(dim.open for dim in aligned), exact)


def cuts(dims: Dims, rank: int, mesh: Mesh) -> list[tuple[Axis, ...]] | tuple[Fault, ...]:
    """The axes over which each dim is cut, whatever its size."""
    faults: list[Fault] = []
    axes, aligned = _Axes(mesh, faults), _aligned(dims, rank)
    if aligned is None:
        return (_wrong_rank(dims, (0,) * rank),)
    found = [tuple(a for f in dim.factors for a in axes.of(f, i)) for i, dim in enumerate(aligned)]
    return tuple(faults) if faults else found


def _aligned(dims: Dims, rank: int) -> tuple[SpecDim, ...] | None:
    """One `SpecDim` per dim of the tensor; None when the rank does not fit."""
    missing = rank - sum(dim is not ... for dim in dims)
    if missing < 0 or (missing and ... not in dims):
        return None
    spread = ((dim,) if isinstance(dim, SpecDim) else (_WHOLE,) * missing for dim in dims)
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
    """The dim with the pieces that are given by name."""
    factors = []
    for f in dim.factors:
        told = pieces.get(f.name) if f.name else None
        if told is not None and f.pieces is not None and told != f.pieces:
            faults.append(
                Fault(f"{f.name}={_listed(told)} is given, the spec says {f.name}={_listed(f.pieces)}", *_PIECES)
            )
        factors.append(f if told is None else replace(f, pieces=told))
    return replace(dim, factors=tuple(factors))


def _cut(f: SpecFactor, size: int, axes: tuple[Axis, ...], what: str, faults: list[Fault]) -> Factor:
    """A factor of `size` cut over `axes` into the pieces that it says."""
    pieces, before = f.pieces or (), len(faults)
    devices = ways(axes)
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in pieces):
        faults.append(Fault(f"{what}: {', '.join(str(n) for n in pieces)} are not sizes", *_PIECES))
    elif not axes and not f.axes:
        faults.append(Fault(f"{what}: it is not cut, so it has no pieces", *_PIECES))
    elif axes and len(pieces) != devices:
        over = " x ".join(map(str, axes))
        faults.append(Fault(f"{what}: it has {len(pieces)} pieces, {over} has {devices} devices", *_PIECES))
    elif size == sum(pieces) == 1:
        rule = "a dim of size 1 is whole everywhere: it stands beside dims of any size"
        faults.append(Fault(f"{what}: it has size 1", rule, "leave its pieces out"))
    return Factor(size, axes) if len(faults) > before or not axes else Factor(Pieces(pieces, axes), axes)


def _listed(pieces: tuple[int, ...]) -> str:
    return f"[{' '.join(map(str, pieces))}]"


class _Axes:
    """Finds the mesh axes of factors, and the faults in them."""

    def __init__(self, mesh: Mesh | None, faults: list[Fault]) -> None:
        self.mesh, self.faults = mesh, faults
        self.users: dict[str, list[tuple[Axis, str]]] = {}

    def of(self, factor: SpecFactor, dim: int) -> tuple[Axis, ...]:
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
        found = (self._usable(mesh, name, user) for name in names)
        return Axis.merge(axis for axis in found if axis is not None)

    def _usable(self, mesh: Mesh, text: str, user: str) -> Axis | None:
        name, pre, size = split_name(text)
        if name not in mesh.axes:
            logical = f"; {name!r} is a name with a rule, which a spec in text takes: '{name} ...'"
            hint = logical if name in mesh.rules else did_you_mean(name, mesh.axes)
            fault = f"{user}: the mesh has no axis {name!r}{hint}"
            use = f"use one of {', '.join(mesh.axes)}"
            self.faults.append(Fault(fault, "a spec names axes of its mesh", use))
            return None
        axis = mesh.axis(name)
        if size is not None:
            if (part := axis.part(pre, size)) is None:
                made = " x ".join(str(p.size) for p in axis.primes()) or "1"
                fault = f"{user}: {text} is no part of {name!r}, whose {axis.size} devices are {made}"
                self.faults.append(Fault(fault, *_PARTS))
                return None
            axis = part
        for other, by in self.users.get(name, ()):
            if not set(axis.primes() or (axis,)).isdisjoint(other.primes() or (other,)):
                self._clash(axis, other, user, by)
                return None
        self.users.setdefault(name, []).append((axis, user))
        return axis

    def _clash(self, axis: Axis, other: Axis, user: str, by: str) -> None:
        drop = "drop one of the two, or override a rule with `name@()`"
        if axis == other:
            twice = f"twice by {user}" if by == user else f"by {by} and by {user}"
            self.faults.append(Fault(f"axis {str(axis)!r} is used {twice}", "a mesh axis cuts a tensor once", drop))
        else:
            fault = f"{other} is used by {by} and {axis} by {user}: they overlap"
            self.faults.append(Fault(fault, _PARTS[0], drop))


def _sizes(dim: SpecDim, i: int, size: int, given: Mapping[str, int], faults: list[Fault]) -> list[int]:
    """The size of every factor of one dim; after a fault, sizes that only serve to go on."""
    found: list[Fault] = []
    known = [_size(f, size if len(dim.factors) == 1 else None, given, found) for f in dim.factors]
    if fault := _misfit([f.name or "_" for f in dim.factors], known, size):
        found.append(Fault(fault, *_SIZES))
    faults += [replace(f, text=f"dim {i} `{dim}`: {f.text}") for f in found]
    if fault:
        return [1] * len(known)
    rest = math.prod(n for n in known if n is not None)
    return [size // rest if n is None else n for n in known]


def _size(f: SpecFactor, whole: int | None, given: Mapping[str, int], faults: list[Fault]) -> int | None:
    """What the call, the spec or its pieces say of a factor's size; `whole` is the dim's, where it is all of that."""
    word = given.get(f.name) if f.name else None
    if word is not None and f.size is not None and word != f.size:
        faults.append(Fault(f"{f.name}={word} is given, the spec says {f.name}={f.size}", *_SIZES))
    size = f.size if word is None else word
    if f.pieces is None or not all(isinstance(n, int) for n in f.pieces):
        return size
    total = sum(f.pieces)
    if (wanted := whole if size is None else size) is None:
        return total
    if total != wanted:
        said = f"the dim has size {whole}" if size is None else f"{f.name or '_'} has size {size}"
        faults.append(Fault(f"{' + '.join(map(str, f.pieces))} = {total}, {said}", *_PIECES))
    return size


def _misfit(names: Sequence[str], known: Sequence[int | None], size: int) -> str:
    """Why factors of these sizes, of which one may be unknown, do not make a dim of `size`; or nothing."""
    told = [f"{name}={n}" for name, n in zip(names, known, strict=True) if n is not None]
    lost = [name for name, n in zip(names, known, strict=True) if n is None]
    if any(n is not None and (not isinstance(n, int) or n < 0) for n in known):
        return f"{', '.join(told)} is not a size"
    if len(lost) > 1:
        return f"the sizes of {', '.join(lost)} are not known (the dim has size {size})"
    product = math.prod(n for n in known if n is not None)
    makes = f" = {product}" if len(told) > 1 else ""
    if not lost and product != size:
        return f"{' * '.join(told)}{makes}, the dim has size {size}"
    if lost and (product == 0 or size % product):
        return f"{' * '.join(told)}{makes} does not divide the dim's size {size}"
    return ""


def _fitted(size: int, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes that cut a factor: of an axis larger than what is left, and a multiple of it, only a part.

    Parts are made of the axis's primes, major first: so two parts of one axis have nothing, or whole primes, in common.
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
