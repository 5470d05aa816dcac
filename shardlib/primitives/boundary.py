"""The boundary of a `shard_map` body: the shardings of its global arguments and results.

A spec and a global shape (of an argument) determine the local shape, and a spec and a local shape (of a result) the
global one. All devices run code of one set of shapes, so only here an axis must divide the dim that it shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.core.tree_paths import flatten_with_path
from shardlib.sharding.grammar import SpecDim
from shardlib.sharding.layout import Layout, ShardSizes
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.spec import P, Spec, resolve_many
from shardlib.sharding.tree_prefix import SpecLike, broadcast_prefix

Axes = list[list[tuple[str, ...]]]  # per dim and factor, the mesh axes that a spec asks for


@dataclass(frozen=True)
class Boundary:
    """The sharding of a global tensor at a body's boundary.

    * `unmentioned`: the body's axes that do not shard it; `copies`: the number of devices along them.
    * `claim`: names a result that must be equal on all devices along the unmentioned axes; else empty.
    """

    spec: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    unmentioned: tuple[str, ...]
    copies: int
    claim: str = ""

    def batched(self, n: int) -> Boundary:
        spec = f"_ {self.spec}".rstrip()
        return replace(self, spec=spec, global_shape=(n, *self.global_shape), local_shape=(n, *self.local_shape))


@dataclass(frozen=True)
class PlacedBoundary:
    """The boundary of a tensor, with the tensor's layout."""

    boundary: Boundary
    layout: Layout


def bind_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], specs: Any, mesh: Mesh, manual: Sequence[str], label: str
) -> list[PlacedBoundary | None]:
    """Returns the boundary of each leaf of the global `(args, kwargs)`; None for leaves that are no tensors.

    `specs` is a prefix tree of them; `label` names the specs in errors.
    """
    names = [f"args{pytree.keystr(path)}" for path, _ in flatten_with_path(args)[0]]
    keywords = flatten_with_path(list(kwargs.values()))[0]
    names += [f"{[*kwargs][path[0].idx]}{pytree.keystr(path[1:])}" for path, _ in keywords]
    trees = [*args, *kwargs.values()]
    tree_specs = [*specs[0], *map(specs[1].get, kwargs)] if isinstance(specs, tuple) else [specs] * len(trees)
    tree_names = [*(f"args[{i}]" for i in range(len(args))), *kwargs]
    flat = broadcast_prefix(tree_specs, trees, label, names=tree_names)
    return _place_tensors(trees, flat, mesh, manual, label, names, inside=False)


def bind_results(
    out: Any, specs: Any, mesh: Mesh, manual: Sequence[str], call: str, *, claim: bool
) -> list[PlacedBoundary | None]:
    """Returns the boundary of each leaf that one device returned; None for leaves that are no tensors.

    With `claim` the boundaries claim that devices along unmentioned axes return equal results.
    """
    names = [f"result{pytree.keystr(path)}" for path, _ in flatten_with_path(out)[0]]
    flat = broadcast_prefix([specs], [out], f"{call} out_specs", names=["the result"])
    bind_results = _place_tensors(out, flat, mesh, manual, f"{call} out_specs", names, inside=True)
    for i, (name, result) in enumerate(zip(names, bind_results, strict=True)):
        if claim and result is not None and result.boundary.copies > 1:
            bind_results[i] = replace(result, boundary=replace(result.boundary, claim=f"{call}: {name}"))
    return bind_results


def _place_tensors(
    tree: Any,
    specs: Sequence[SpecLike],
    mesh: Mesh,
    manual: Sequence[str],
    label: str,
    names: Sequence[str],
    *,
    inside: bool,
) -> list[PlacedBoundary | None]:
    leaves = list(zip(names, pytree.tree_leaves(tree), strict=True))
    items = {i: (*leaf, spec) for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)) if _is_tensor(leaf[1])}
    closed = {i: (name, x, spec) for i, (name, x, spec) in items.items() if spec is not None and not _is_open(spec)}
    if len(closed) < len(items):
        raise ShardingError(
            f"{label} leave something open",
            [
                f"{name} of shape {list(x.shape)} has " + (f"the open spec {str(spec)!r}" if spec else "no spec")
                for i, (name, x, spec) in items.items()
                if i not in closed
            ],
            rule="per-device code needs to know the shapes that it works on",
            remedy='write P() (or `_` per dim) for a tensor that every device has whole, "name@axis" for a cut dim',
        )
    axes = {i: _requested_axes(Spec.convert(spec), len(x.shape), mesh) for i, (_, x, spec) in closed.items()}
    shapes = {i: _global_shape(x.shape, axes[i], mesh) if inside else tuple(x.shape) for i, (_, x, _) in closed.items()}
    requests = [(name, shapes[i], spec, None) for i, (name, _, spec) in closed.items()]
    resolved = dict(zip(closed, resolve_many(requests, mesh, call=label), strict=True)) if requests else {}
    others = [
        f"{name} of shape {list(x.shape)} with spec {str(spec)!r} names {axis!r}"
        for i, (name, x, spec) in closed.items()
        for axis in dict.fromkeys(a.partition(":")[0] for dim in axes[i] for names in dim for a in names)
        if axis not in manual
    ]
    if others:
        raise ShardingError(
            f"{label} name axes over which the body is not manual",
            others,
            rule=f"the specs say how axis_names, {', '.join(map(repr, manual))}, cut the tensors; how other axes do is "
            "left to the compiler",
            remedy="leave that dim whole in the spec; shard(x, spec), outside the body or in it, says what cuts it",
        )
    uneven = [
        f"{name} of shape {list(shapes[i])} with spec {str(spec)!r}: {fault}"
        for i, (name, _, spec) in closed.items()
        for fault in _find_uneven(resolved[i].layout, axes[i], mesh)
    ]
    if uneven:
        raise ShardingError(
            f"{label} do not divide the tensors",
            uneven,
            rule="every device runs the same code on the same shapes, so axes must divide what they cut",
            remedy="pad the tensor to a multiple, or leave that dim whole",
        )
    return [_place(resolved[i], axes[i], mesh, manual) if i in resolved else None for i in range(len(leaves))]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_open(spec: str | P | Spec) -> bool:
    return any(isinstance(dim, SpecDim) and dim.open for dim in Spec.convert(spec).dims)


def _global_shape(shape: Sequence[int], axes: Axes, mesh: Mesh) -> tuple[int, ...]:
    if len(axes) != len(shape):  # `resolve_many` raises the error
        return tuple(shape)
    return tuple(
        size * _count_devices([a for f in dim for a in f], mesh) for size, dim in zip(shape, axes, strict=True)
    )


def _find_uneven(layout: Layout, axes: Axes, mesh: Mesh) -> Iterator[str]:
    for d, (dim, dim_axes) in enumerate(zip(layout.dims, axes, strict=True)):
        for factor, names in zip(dim, dim_axes, strict=True):
            part = f"dim {d}" if len(dim) == 1 else f"a factor of dim {d}"
            if isinstance(factor.size, ShardSizes):
                yield f"{part} has pieces of {', '.join(map(str, factor.pieces))}"
            elif parts := [name for name in names if ":" in name]:
                yield f"{part} is cut over {' x '.join(parts)}, where a body sees whole axes"
            elif factor.size % _count_devices(names, mesh):
                yield f"{part} has size {factor.size}, {' x '.join(names)} has {_count_devices(names, mesh)} devices"


def _place(fixed: FixedLayout, axes: Axes, mesh: Mesh, manual: Sequence[str]) -> PlacedBoundary:
    local_shape = tuple(
        math.prod(f.size // _count_devices(names, mesh) for f, names in zip(dim, dim_axes, strict=True))
        for dim, dim_axes in zip(fixed.layout.dims, axes, strict=True)
    )
    used = {a for dim in axes for names in dim for a in names}
    idle = tuple(a for a in mesh.axis_names if a in manual and a not in used)
    copies = _count_devices(idle, mesh)
    return PlacedBoundary(Boundary(str(fixed.spec), fixed.layout.shape, local_shape, idle, copies), fixed.layout)


def _count_devices(names: Sequence[str], mesh: Mesh) -> int:
    """Counts the devices along these axes; ignores axes that do not exist, which are reported elsewhere."""
    return math.prod(mesh.axes.get(name, 1) for name in names)


def _requested_axes(spec: Spec, rank: int, mesh: Mesh) -> Axes:
    """Returns the mesh axes that a spec asks for, per dim and factor, without regard to sizes."""
    axes: Axes = []
    for dim in spec.dims:
        if isinstance(dim, SpecDim):
            axes.append([_rule_axes(f.name, mesh) if f.axes is None else f.axes for f in dim.factors])
        else:  # an ellipsis
            axes += [[()] for _ in range(rank - len(spec.dims) + 1)]
    return axes


def _rule_axes(name: str | None, mesh: Mesh) -> tuple[str, ...]:
    axes = mesh.rules.get(name) if name else None
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
