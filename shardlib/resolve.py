"""The dims of a spec + shape + mesh -> a layout, or everything that does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType

from shardlib.grammar import SpecDim, SpecFactor
from shardlib.layout import Axis, Factor, Layout
from shardlib.mesh import Mesh
from shardlib.meshtext import did_you_mean

Dims = tuple[SpecDim | EllipsisType, ...]


@dataclass(frozen=True)
class Fault:
    """One thing that does not fit, the rule that it breaks, and what to do about it."""

    text: str
    rule: str
    remedy: str


@dataclass(frozen=True)
class Fit:
    """The layout, and per dim the names of its factors and whether it is open."""

    layout: Layout
    names: tuple[tuple[str | None, ...], ...]
    open: tuple[bool, ...]


_WHOLE = SpecDim((SpecFactor(None),))
_SIZES = (
    "the sizes of a dim's factors multiply to the dim",
    "give sizes by name, as in einops; one of a dim's factors may be left to be inferred",
)


@lru_cache(maxsize=16384)
def fit(dims: Dims, shape: tuple[int, ...], mesh: Mesh, sizes: tuple[tuple[str, int], ...]) -> Fit | tuple[Fault, ...]:
    """What the spec of these dims gives a tensor of `shape` on `mesh`, with the `sizes` of factors by name."""
    faults: list[Fault] = []
    given, names = dict(sizes), [f.name for dim in dims if isinstance(dim, SpecDim) for f in dim.factors if f.name]
    for name, size in sizes:
        if name not in names:
            hint = did_you_mean(name, names)
            faults.append(Fault(f"{name}={size} is given, but the spec has no {name!r}{hint}", *_SIZES))
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
        layout.append(tuple(Factor(n, _fitted(n, cut)) for n, cut in zip(parts, cuts, strict=True)))
    if faults:
        return tuple(faults)
    names_of = tuple(tuple(f.name for f in dim.factors) for dim in aligned)
    return Fit(Layout(tuple(layout)), names_of, tuple(dim.open for dim in aligned))


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


class _Axes:
    """Finds the mesh axes of factors, and the faults in them."""

    def __init__(self, mesh: Mesh, faults: list[Fault]) -> None:
        self.mesh, self.faults = mesh, faults
        self.users: dict[str, str] = {}

    def of(self, factor: SpecFactor, dim: int) -> tuple[Axis, ...]:
        names, user = factor.axes, f"dim {dim} `{factor}`"
        if names is None:
            to = self.mesh.rules.get(factor.name) if factor.name else None
            names = (to,) if isinstance(to, str) else to or ()
            user += f" (by the rule {factor.name} -> {' '.join(names)})" if names else ""
        return tuple(self.mesh.axis(name) for name in names if self.usable(name, user))

    def usable(self, name: str, user: str) -> bool:
        if name not in self.mesh.axes:
            text = f"{user}: the mesh has no axis {name!r}{did_you_mean(name, self.mesh.axes)}"
            use = f"use one of {', '.join(self.mesh.axes)}"
            self.faults.append(Fault(text, "a spec names axes of its mesh", use))
            return False
        if name in self.users:
            twice = f"twice by {user}" if self.users[name] == user else f"by {self.users[name]} and by {user}"
            text = f"axis {name!r} is used {twice}"
            rule = "a mesh axis cuts a tensor once"
            self.faults.append(Fault(text, rule, "drop one of the two, or override a rule with `name@()`"))
            return False
        self.users[name] = user
        return True


def _sizes(dim: SpecDim, i: int, size: int, given: Mapping[str, int], faults: list[Fault]) -> list[int]:
    """The size of every factor of one dim; after a fault, sizes that only serve to go on."""
    known: list[int | None] = []
    for f in dim.factors:
        word = given.get(f.name) if f.name else None
        if word is not None and f.size is not None and word != f.size:
            faults.append(Fault(f"dim {i} `{dim}`: {f.name}={word} is given, the spec says {f.name}={f.size}", *_SIZES))
        known.append(f.size if word is None else word)
    told = [f"{f.name or '_'}={n}" for f, n in zip(dim.factors, known, strict=True) if n is not None]
    product, unknown = math.prod(n for n in known if n is not None), known.count(None)
    fault = ""
    if any(n is not None and (not isinstance(n, int) or n < 0) for n in known):
        fault = f"{', '.join(told)} is not a size"
    elif unknown > 1:
        lost = [f"{f.name or '_'}" for f, n in zip(dim.factors, known, strict=True) if n is None]
        fault = f"the sizes of {', '.join(lost)} are not known (the dim has size {size})"
    elif unknown == 0 and product != size:
        makes = f" = {product}" if len(told) > 1 else ""
        fault = f"{' * '.join(told)}{makes}, the dim has size {size}"
    elif unknown == 1 and (product == 0 or size % product):
        makes = f" = {product}" if len(told) > 1 else ""
        fault = f"{' * '.join(told)}{makes} does not divide the dim's size {size}"
    if fault:
        faults.append(Fault(f"dim {i} `{dim}`: {fault}", *_SIZES))
        return [1] * len(known)
    return [size // product if n is None else n for n in known]


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
