"""The doors of a `shard_map`: how the global tensors in front of and behind a body lie on the devices.

A spec, and either the global shape (arguments) or the local one (results), give the other. Per-device code has one
set of shapes, so here, unlike anywhere else, an axis must divide what it cuts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import pytree
from shardlib.core.tree_paths import flatten_with_path
from shardlib.sharding.grammar import SpecDim
from shardlib.sharding.layout import Layout, ShardSizes
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.spec import P, Spec, resolve_many
from shardlib.sharding.tree_prefix import SpecLike, broadcast_prefix

Axes = list[list[tuple[str, ...]]]  # per dim and factor, the mesh axes that a spec asks for


@dataclass(frozen=True)
class Door:
    """How a global tensor is cut for a body: over which axes it is not, and how many devices those are.

    `claim`, of a result, names it where those devices have to return the same.
    """

    spec: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    unmentioned: tuple[str, ...]
    copies: int
    claim: str = ""

    def batched(self, n: int) -> Door:
        spec = f"_ {self.spec}".rstrip()
        return replace(self, spec=spec, global_shape=(n, *self.global_shape), local_shape=(n, *self.local_shape))


@dataclass(frozen=True)
class Passage:
    """How one global tensor lies on the devices, for the compiler and in full."""

    door: Door
    layout: Layout


def arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], specs: Any, mesh: Mesh, manual: Sequence[str], what: str
) -> list[Passage | None]:
    """A cut per leaf of the global `(args, kwargs)`, of which `specs` is a prefix; None for what is no tensor."""
    given = flatten_with_path(args)[0], flatten_with_path(list(kwargs.values()))[0]
    names = [f"args{pytree.keystr(path)}" for path, _ in given[0]]
    names += [f"{[*kwargs][path[0].idx]}{pytree.keystr(path[1:])}" for path, _ in given[1]]
    trees = [*args, *kwargs.values()]
    one_each = [*specs[0], *map(specs[1].get, kwargs)] if isinstance(specs, tuple) else [specs] * len(trees)
    called = [*(f"args[{i}]" for i in range(len(args))), *kwargs]
    flat = broadcast_prefix(one_each, trees, what, names=called)
    return _cuts(trees, flat, mesh, manual, what, names, inside=False)


def results(out: Any, specs: Any, mesh: Mesh, manual: Sequence[str], who: str, *, claim: bool) -> list[Passage | None]:
    """A cut per leaf of what one device returned; None for leaves that are no tensors.

    With `claim` they say that devices along axes which are not named return the same.
    """
    names = [f"result{pytree.keystr(path)}" for path, _ in flatten_with_path(out)[0]]
    flat = broadcast_prefix([specs], [out], f"{who} out_specs", names=["the result"])
    cuts = _cuts(out, flat, mesh, manual, f"{who} out_specs", names, inside=True)
    if not claim:
        return cuts
    return [
        cut and replace(cut, door=replace(cut.door, claim=f"{who}: {name}" if cut.door.copies > 1 else ""))
        for name, cut in zip(names, cuts, strict=True)
    ]


def _cuts(
    tree: Any,
    specs: Sequence[SpecLike],
    mesh: Mesh,
    manual: Sequence[str],
    what: str,
    names: Sequence[str],
    *,
    inside: bool,
) -> list[Passage | None]:
    leaves = list(zip(names, pytree.tree_leaves(tree), strict=True))
    items = {i: (*leaf, spec) for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)) if _is_tensor(leaf[1])}
    closed = {i: (name, x, spec) for i, (name, x, spec) in items.items() if spec is not None and not _is_open(spec)}
    if len(closed) < len(items):
        raise ShardingError(
            f"{what} leave something open",
            [
                f"{name} of shape {list(x.shape)} has " + (f"the open spec {str(spec)!r}" if spec else "no spec")
                for i, (name, x, spec) in items.items()
                if i not in closed
            ],
            rule="per-device code needs to know the shapes that it works on",
            remedy='write P() (or `_` per dim) for a tensor that every device has whole, "name@axis" for a cut dim',
        )
    axes = {i: _axes(Spec.convert(spec), len(x.shape), mesh) for i, (_, x, spec) in closed.items()}
    shapes = {i: _global_shape(x.shape, axes[i], mesh) if inside else tuple(x.shape) for i, (_, x, _) in closed.items()}
    asked = [(name, shapes[i], spec, None) for i, (name, _, spec) in closed.items()]
    resolved = dict(zip(closed, resolve_many(asked, mesh, call=what), strict=True)) if asked else {}
    others = [
        f"{name} of shape {list(x.shape)} with spec {str(spec)!r} names {axis!r}"
        for i, (name, x, spec) in closed.items()
        for axis in dict.fromkeys(a.partition(":")[0] for dim in axes[i] for names in dim for a in names)
        if axis not in manual
    ]
    if others:
        raise ShardingError(
            f"{what} name axes over which the body is not manual",
            others,
            rule=f"the specs say how axis_names, {', '.join(map(repr, manual))}, cut the tensors; how other axes do is "
            "left to the compiler",
            remedy="leave that dim whole in the spec; shard(x, spec), outside the body or in it, says what cuts it",
        )
    uneven = [
        f"{name} of shape {list(shapes[i])} with spec {str(spec)!r}: {fault}"
        for i, (name, _, spec) in closed.items()
        for fault in _uneven(resolved[i].layout, axes[i], mesh)
    ]
    if uneven:
        raise ShardingError(
            f"{what} do not divide the tensors",
            uneven,
            rule="every device runs the same code on the same shapes, so axes must divide what they cut",
            remedy="pad the tensor to a multiple, or leave that dim whole",
        )
    return [_cut(resolved[i], axes[i], mesh, manual) if i in resolved else None for i in range(len(leaves))]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_open(spec: str | P | Spec) -> bool:
    return any(isinstance(dim, SpecDim) and dim.open for dim in Spec.convert(spec).dims)


def _global_shape(shape: Sequence[int], axes: Axes, mesh: Mesh) -> tuple[int, ...]:
    if len(axes) != len(shape):  # the spec does not fit, as will be said in full when it is resolved
        return tuple(shape)
    return tuple(size * _ways([a for f in dim for a in f], mesh) for size, dim in zip(shape, axes, strict=True))


def _uneven(layout: Layout, axes: Axes, mesh: Mesh) -> Iterator[str]:
    for d, (dim, cuts) in enumerate(zip(layout.dims, axes, strict=True)):
        for factor, names in zip(dim, cuts, strict=True):
            part = f"dim {d}" if len(dim) == 1 else f"a factor of dim {d}"
            if isinstance(factor.size, ShardSizes):
                yield f"{part} has pieces of {', '.join(map(str, factor.pieces))}"
            elif parts := [name for name in names if ":" in name]:
                yield f"{part} is cut over {' x '.join(parts)}, where a body sees whole axes"
            elif factor.size % _ways(names, mesh):
                yield f"{part} has size {factor.size}, {' x '.join(names)} has {_ways(names, mesh)} devices"


def _cut(r: FixedLayout, axes: Axes, mesh: Mesh, manual: Sequence[str]) -> Passage:
    dims = zip(r.layout.dims, axes, strict=True)
    local = [[f.size // _ways(names, mesh) for f, names in zip(dim, cuts, strict=True)] for dim, cuts in dims]
    used = {a for dim in axes for names in dim for a in names}
    idle = tuple(a for a in mesh.axis_names if a in manual and a not in used)
    door = Door(str(r.spec), r.layout.shape, tuple(map(math.prod, local)), idle, _ways(idle, mesh))
    return Passage(door, r.layout)


def _ways(names: Sequence[str], mesh: Mesh) -> int:
    """How many devices there are along these axes (those that exist: others are reported elsewhere)."""
    return math.prod(mesh.axes.get(name, 1) for name in names)


def _axes(spec: Spec, rank: int, mesh: Mesh) -> Axes:
    """The mesh axes that a spec asks for, per dim and factor, as it says and whatever the sizes are."""

    whole: list[tuple[str, ...]] = [()]

    def dims() -> Iterator[list[tuple[str, ...]]]:
        for dim in spec.dims:
            if isinstance(dim, SpecDim):
                yield [_named(f.name, mesh) if f.axes is None else f.axes for f in dim.factors]
            else:
                yield from (whole for _ in range(rank - len(spec.dims) + 1))

    return list(dims())


def _named(name: str | None, mesh: Mesh) -> tuple[str, ...]:
    to = mesh.rules.get(name) if name else None
    return (to,) if isinstance(to, str) else tuple(to or ())
