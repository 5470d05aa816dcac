"""One op on operands that fit already: then it runs on the pieces as they are, and nothing moves.

Most eager ops are of this kind, and a rule says so by itself: every factor is cut in the same way wherever it occurs,
and is in every result. No decision is to be made, so nothing is searched, lowered or generated. Everything else goes
the way of `jit`'s programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.rules.rule import Labels, Path, Rule
from shardlib.sharding.chunks import Pieces, span
from shardlib.sharding.layout import Dim, Factor, Layout
from shardlib.sharding.mesh.axis import Axis, Coords
from shardlib.sharding.placement import Names
from shardlib.tensor.tensor_meta import Form

Part = tuple[Dim, tuple[str | None, ...]]  # the pieces of one factor of a rule, and their names


@dataclass(frozen=True)
class Fit:
    """Layouts and names of the results, and for every integer that is a local size: what it is a product of."""

    results: tuple[tuple[Layout, Names], ...]
    ints: tuple[tuple[Path, int, Dim], ...]
    axes: tuple[Axis, ...]  # that anything is cut by

    def local_ints(self, coords: Coords) -> tuple[int, ...]:
        """The integers of one device, in the order of `ints`."""
        return tuple(k * math.prod(_length(f, coords) for f in dim) for _, k, dim in self.ints)


def _length(f: Factor, coords: Coords) -> int:
    if not f.axes:
        return int(f.size)
    start, stop = span(f.size, f.axes, coords)
    return stop - start


def fit(rule: Rule, operands: Sequence[Form]) -> Fit | None:
    """How the op runs on operands in these forms without moving anything; None if it cannot."""
    parts: dict[str, Part] = {}
    for labels, form in zip(rule.operands, operands, strict=True):
        if not _read(labels, form, rule, parts):
            return None
    cut = [name for name, (dim, _) in parts.items() if _is_cut(dim)]
    kept = [{name for dim in labels for name in dim} for labels in rule.results] if cut else []
    for name in cut:
        if name in rule.whole or name in rule.local_factors or name in rule.rounds:
            return None
        for names in kept:
            if name not in names:
                return None
    axes = [a for name in cut for f in parts[name][0] for a in f.axes]
    if len({a.name for a in axes}) < len(axes):
        primes = [p for a in axes for p in a.primes()]
        if len(set(primes)) != len(primes):
            return None
    results = tuple(_written(labels, rule, parts) for labels in rule.results)
    ints: tuple[tuple[Path, int, Dim], ...] = ()
    if cut and rule.ints:  # an empty shard's 0 beside a -1 left over would mean nothing: all of them, or none
        ints = tuple(
            [
                (path, k, tuple([f for name in names for f in _part(rule, parts, name)[0]]))
                for path, (k, names) in rule.ints.items()
            ]
        )
    return Fit(results, ints, tuple(axes))


def _is_cut(dim: Dim) -> bool:
    for f in dim:  # noqa: SIM110  at every first call
        if f.axes:
            return True
    return False


def _read(labels: Labels, form: Form, rule: Rule, parts: dict[str, Part]) -> bool:
    """Note how an operand's dims cut the rule's factors; False if they do not say, or contradict another operand."""
    for names, dim, called in zip(labels, form.layout.dims, form.names, strict=True):
        said: dict[str, Part]
        if not _is_cut(dim):
            said = {x: ((Factor(rule.sizes[x]),), called if len(names) == len(called) == 1 else (None,)) for x in names}
        elif len(names) == 1:
            said = {names[0]: (dim, called)}
        elif len(names) == len(dim) and all(rule.sizes[x] == f.size for x, f in zip(names, dim, strict=True)):
            said = {x: ((f,), (called[i],)) for i, (x, f) in enumerate(zip(names, dim, strict=True))}
        elif (
            names and len(dim) == 1 and not isinstance(dim[0].size, Pieces) and rule.sizes[names[0]] % dim[0].ways == 0
        ):
            rest = {x: ((Factor(rule.sizes[x]),), (None,)) for x in names[1:]}
            said = {names[0]: ((Factor(rule.sizes[names[0]], dim[0].axes),), (None,)), **rest}
        else:
            return False
        for x, part in said.items():
            if x not in parts:
                parts[x] = part
            elif parts[x][0] != part[0] and (_is_cut(parts[x][0]) or _is_cut(part[0])):
                return False
    return True


def _part(rule: Rule, parts: dict[str, Part], name: str) -> Part:
    return parts.get(name) or ((Factor(rule.sizes[name]),), (None,))


def _written(labels: Labels, rule: Rule, parts: dict[str, Part]) -> tuple[Layout, Names]:
    """A result's layout in its shortest form, with the names that this form keeps apart."""
    dims, names = [], []
    for dim in labels:
        found = [_part(rule, parts, x) for x in dim]
        factors = tuple([f for part, _ in found for f in part]) or (Factor(1),)
        called = tuple([n for _, mine in found for n in mine]) or (None,)
        short = _shortest(factors)
        dims.append(short)
        names.append(called if short == factors else (None,) * len(short))
    return Layout(tuple(dims)), tuple(names)


def _shortest(dim: Dim) -> Dim:
    """`Layout.canonical` of one dim, at once where there is little to melt."""
    if not _is_cut(dim):
        return dim if len(dim) == 1 else (Factor(math.prod(f.size for f in dim)),)
    if len(dim) == 1 and len(dim[0].axes) == 1 and dim[0].ways > 1:
        return dim
    return Layout((dim,)).canonical.dims[0]
