"""Stacked shards of all devices: splitting and joining global tensors, and collectives along the stacked dims.

A `shard_map` runs so in a program for one device, and where the compiler shards some axes. In the second case a
constraint puts the stacked dims on the body's axes, and the compiler infers the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardlib.core.context import is_tracing
from shardlib.ops.constraint import constrain
from shardlib.primitives.stacked_permute import send_rows
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import group_size
from shardlib.sharding.mesh.mesh import Mesh


def sharding_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes that shard a tensor, in the order of the mesh."""
    used = {a.name for a in layout.axes}
    return tuple(name for name in mesh.axis_names if name in used)


def split_shards(x: Tensor, layout: Layout, local_shape: Sequence[int], mesh: Mesh, keep: int = 0) -> Tensor:
    """Splits a whole tensor into shards, with a leading dim for every axis that shards it, in the order of the mesh.

    The first `keep` dims of x stay in front of these. The shards have new memory: writes of a body to its arguments do
    not reach the tensor.
    """
    axes = sharding_axes(layout, mesh)
    sizes, order = _grid(layout, axes)
    shards = x.reshape([*x.shape[:keep], *sizes]).permute([*range(keep), *(keep + i for i in order)]).clone()
    return shards.reshape([*x.shape[:keep], *(mesh.axes[name] for name in axes), *local_shape])


def join_shards(x: Tensor, layout: Layout, mesh: Mesh, keep: int = 0) -> Tensor:
    """Joins shards, stacked as by `split_shards`, to the whole tensor."""
    axes = sharding_axes(layout, mesh)
    sizes, order = _grid(layout, axes)
    shards = x.reshape([*x.shape[:keep], *(sizes[i] for i in order)])
    inverse = [order.index(i) for i in range(len(order))]
    return shards.permute([*range(keep), *(keep + i for i in inverse)]).reshape([*x.shape[:keep], *layout.shape])


def _grid(layout: Layout, axes: Sequence[str]) -> tuple[list[int], list[int]]:
    """Returns dims that split every factor into devices and a local rest, and the order `axes`, then the rests."""
    at: dict[str, int] = {}
    rest, sizes = [], list[int]()
    for f in layout.factors:
        for a in f.axes:
            at[a.name] = len(sizes)
            sizes.append(a.size)
        rest.append(len(sizes))
        sizes.append(f.size // group_size(f.axes))
    return sizes, [*(at[name] for name in axes), *rest]


def constrain_leading(x: Tensor, *axes: Sequence[str]) -> Tensor:
    """Constrains each leading dim of x to its axes in a trace (no axes: the dim is whole)."""
    if not axes or not is_tracing():
        return x
    leading = [f"_@({' '.join(names)})" for names in axes]
    return constrain(x, " ".join([*leading, *["_?"] * (x.dim() - len(axes))]))


def run_collective(x: Tensor, stack: Sequence[str], axes: Sequence[str], kind: str, args: Sequence[Any]) -> Tensor:
    """Runs a collective over mesh axes (jointly, major first) on x, which has a leading dim for each of `stack`.

    The result has the same leading dims, unless it is equal on all members.
    """
    k, order = len(axes), [stack.index(name) for name in axes]
    x = x.movedim(order, [*range(k)])
    sizes = x.shape[:k]
    x = _KINDS[kind](x.flatten(0, k - 1), axes, *args)
    return x if kind in REPLICATED else x.reshape([*sizes, *x.shape[1:]]).movedim([*range(k)], order)


# Each function takes x [member, ...]; `dim` arguments count the dims of a member's tensor.


def _all_reduce(x: Tensor, axes: Sequence[str], reduce: str) -> Tensor:
    if reduce == "sum":
        return x.sum(0, dtype=x.dtype)
    return x.amax(0) if reduce == "max" else x.amin(0)


def _all_gather(x: Tensor, axes: Sequence[str], dim: int, n: int) -> Tensor:
    return constrain_leading(x, ()).movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(x: Tensor, axes: Sequence[str], dim: int, n: int) -> Tensor:
    return constrain_leading(_split(x.sum(0, dtype=x.dtype), dim, n), axes)


def _all_to_all(x: Tensor, axes: Sequence[str], split_dim: int, concat_dim: int, n: int) -> Tensor:
    parts = constrain_leading(_split(x, 1 + split_dim, n), axes)  # [to, from, ...]
    return parts.movedim(1, 1 + concat_dim).flatten(1 + concat_dim, 2 + concat_dim)


def _ppermute(x: Tensor, axes: Sequence[str], pairs: Sequence[int]) -> Tensor:
    return send_rows(x, pairs[::2], pairs[1::2])


def _split(x: Tensor, dim: int, n: int) -> Tensor:
    """Splits a dim into n parts, counted by a leading dim."""
    return x.reshape([*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]]).movedim(dim, 0)


_KINDS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
}
REPLICATED = {"all_reduce", "all_gather"}  # collectives whose results are equal on all members
DIMS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 2}  # the number of leading arguments that are dims
