"""Decides whether an op can run on the local shards of its operands, without resharding.

Most eager ops can, and the rule alone decides it: every factor is sharded in the same way wherever it occurs, and is in
every result. Other ops are compiled like programs of `jit`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.rules.rule import Labels, Path, Rule
from shardlib.sharding.chunks import ShardSizes, shard_range
from shardlib.sharding.layout import Dim, Factor, Layout
from shardlib.sharding.mesh.axis import Axis, Coords
from shardlib.sharding.placement import FactorNames
from shardlib.tensor.tensor_meta import Form

Part = tuple[Dim, tuple[str | None, ...]]  # the sharding of one factor of a rule, and its names


@dataclass(frozen=True)
class LocalFit:
    """Layouts and names of the results, and the integer arguments that are local sizes."""

    results: tuple[tuple[Layout, FactorNames], ...]
    ints: tuple[tuple[Path, int, Dim], ...]  # the path of each, a constant, and factors: the size is their product
    axes: tuple[Axis, ...]  # that shard any factor

    def local_ints(self, coords: Coords) -> tuple[int, ...]:
        return tuple(k * math.prod(_local_size(f, coords) for f in dim) for _, k, dim in self.ints)


def _local_size(f: Factor, coords: Coords) -> int:
    if not f.axes:
        return int(f.size)
    start, stop = shard_range(f.size, f.axes, coords)
    return stop - start


def fit_locally(rule: Rule, operands: Sequence[Form]) -> LocalFit | None:
    """Returns the results' layouts for operands in these forms; None if an operand must be resharded."""
    parts: dict[str, Part] = {}
    for labels, form in zip(rule.operands, operands, strict=True):
        if not _read_operand(labels, form, rule, parts):
            return None
    sharded = [name for name, (dim, _) in parts.items() if _is_sharded(dim)]
    kept = [{name for dim in labels for name in dim} for labels in rule.results] if sharded else []
    for name in sharded:
        if name in rule.whole or name in rule.local.factors or name in rule.ties.ring:
            return None
        for names in kept:
            if name not in names:
                return None
    axes = [a for name in sharded for f in parts[name][0] for a in f.axes]
    if len({a.name for a in axes}) < len(axes):
        primes = [p for a in axes for p in a.primes()]
        if len(set(primes)) != len(primes):
            return None
    results = tuple(_result_layout(labels, rule, parts) for labels in rule.results)
    ints: tuple[tuple[Path, int, Dim], ...] = ()
    if sharded and rule.ints:  # all of them: the 0 of an empty shard and a remaining -1 would be ambiguous
        ints = tuple(
            [
                (path, k, tuple([f for name in names for f in _part(rule, parts, name)[0]]))
                for path, (k, names) in rule.ints.items()
            ]
        )
    return LocalFit(results, ints, tuple(axes))


def _is_sharded(dim: Dim) -> bool:
    for f in dim:  # noqa: SIM110  faster than any()
        if f.axes:
            return True
    return False


def _read_operand(labels: Labels, form: Form, rule: Rule, parts: dict[str, Part]) -> bool:
    """Adds an operand's sharding of the rule's factors to `parts`; False if factors do not match or operands differ."""
    for names, dim, dim_names in zip(labels, form.layout.dims, form.names, strict=True):
        own: dict[str, Part]
        if not _is_sharded(dim):
            kept = dim_names if len(names) == len(dim_names) == 1 else (None,)
            own = {x: ((Factor(rule.sizes[x]),), kept) for x in names}
        elif len(names) == 1:
            own = {names[0]: (dim, dim_names)}
        elif len(names) == len(dim) and all(rule.sizes[x] == f.size for x, f in zip(names, dim, strict=True)):
            own = {x: ((f,), (dim_names[i],)) for i, (x, f) in enumerate(zip(names, dim, strict=True))}
        elif (
            names
            and len(dim) == 1
            and not isinstance(dim[0].size, ShardSizes)
            and rule.sizes[names[0]] % dim[0].ways == 0
        ):
            rest = {x: ((Factor(rule.sizes[x]),), (None,)) for x in names[1:]}
            own = {names[0]: ((Factor(rule.sizes[names[0]], dim[0].axes),), (None,)), **rest}
        else:
            return False
        for x, part in own.items():
            if x not in parts:
                parts[x] = part
            elif parts[x][0] != part[0] and (_is_sharded(parts[x][0]) or _is_sharded(part[0])):
                return False
    return True


def _part(rule: Rule, parts: dict[str, Part], name: str) -> Part:
    return parts.get(name) or ((Factor(rule.sizes[name]),), (None,))


def _result_layout(labels: Labels, rule: Rule, parts: dict[str, Part]) -> tuple[Layout, FactorNames]:
    """Returns a result's canonical layout, with names for the dims whose factors it keeps."""
    dims, names = [], []
    for dim in labels:
        dim_parts = [_part(rule, parts, x) for x in dim]
        factors = tuple([f for part, _ in dim_parts for f in part]) or (Factor(1),)
        dim_names = tuple([n for _, own in dim_parts for n in own]) or (None,)
        canonical = _canonical(factors)
        dims.append(canonical)
        names.append(dim_names if canonical == factors else (None,) * len(canonical))
    return Layout(tuple(dims)), tuple(names)


def _canonical(dim: Dim) -> Dim:
    """Returns `Layout.canonical` of one dim, with shortcuts for simple dims."""
    if not _is_sharded(dim):
        return dim if len(dim) == 1 else (Factor(math.prod(f.size for f in dim)),)
    if len(dim) == 1 and len(dim[0].axes) == 1 and dim[0].ways > 1:
        return dim
    return Layout((dim,)).canonical.dims[0]
