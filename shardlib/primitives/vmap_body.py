"""The tensors of all devices, stacked: how a global tensor is taken apart, and put together again, and collectives,
which are arithmetic along the stacked dims.

This is how a `shard_map` runs in a program for one device, and where axes are left to the compiler. There a constraint
says that the stacked dims lie on the body's axes, and all the rest is inferred.
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


def cutting(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """The axes of the mesh that cut a tensor, in the order of the mesh."""
    used = {a.name for a in layout.axes}
    return tuple(name for name in mesh.axis_names if name in used)


def cut(x: Tensor, layout: Layout, local_shape: Sequence[int], mesh: Mesh, keep: int = 0) -> Tensor:
    """The shards of a whole tensor, with a dim in front for every axis that cuts it, in the order of the mesh.

    The first `keep` dims of x stay in front of these. The shards are memory of their own: what a body writes to its
    arguments does not reach the tensor.
    """
    axes = cutting(layout, mesh)
    sizes, order = _grid(layout, axes)
    pieces = x.reshape([*x.shape[:keep], *sizes]).permute([*range(keep), *(keep + i for i in order)]).clone()
    return pieces.reshape([*x.shape[:keep], *(mesh.axes[name] for name in axes), *local_shape])


def join(x: Tensor, layout: Layout, mesh: Mesh, keep: int = 0) -> Tensor:
    """The whole tensor of shards that are stacked as `cut` does."""
    axes = cutting(layout, mesh)
    sizes, order = _grid(layout, axes)
    pieces = x.reshape([*x.shape[:keep], *(sizes[i] for i in order)])
    back = [order.index(i) for i in range(len(order))]
    return pieces.permute([*range(keep), *(keep + i for i in back)]).reshape([*x.shape[:keep], *layout.shape])


def _grid(layout: Layout, axes: Sequence[str]) -> tuple[list[int], list[int]]:
    """The sizes of a tensor's dims where every factor is split, devices in front, and where `axes` and the rest are."""
    at: dict[str, int] = {}
    rest, sizes = [], list[int]()
    for f in layout.factors:
        for a in f.axes:
            at[a.name] = len(sizes)
            sizes.append(a.size)
        rest.append(len(sizes))
        sizes.append(f.size // group_size(f.axes))
    return sizes, [*(at[name] for name in axes), *rest]


def placed(x: Tensor, *axes: Sequence[str]) -> Tensor:
    """x, of which each leading dim lies on these axes (on none: it is whole)."""
    if not axes or not is_tracing():
        return x
    leading = [f"_@({' '.join(names)})" for names in axes]
    return constrain(x, " ".join([*leading, *["_?"] * (x.dim() - len(axes))]))


def collective(x: Tensor, stack: Sequence[str], axes: Sequence[str], kind: str, args: Sequence[Any]) -> Tensor:
    """One collective over mesh axes (jointly, major first), whose members x has in front, a dim for each of `stack`.

    The result has them again, in the same order, unless it is the same on all of them.

    Example:
        >>> import torch
        >>> collective(torch.tensor([1, 2, 3, 4]), ["data"], ["data"], "ppermute", [[0, 1, 1, 0]])
        tensor([2, 1, 0, 0])
    """
    k, order = len(axes), [stack.index(name) for name in axes]
    x = x.movedim(order, [*range(k)])
    sizes = x.shape[:k]
    x = _KINDS[kind](x.flatten(0, k - 1), axes, *args)
    return x if kind in SAME else x.reshape([*sizes, *x.shape[1:]]).movedim([*range(k)], order)


# Each takes x [member, ...], and dims of a member's tensor as numbers.


def _all_reduce(x: Tensor, axes: Sequence[str], reduce: str) -> Tensor:
    if reduce == "sum":
        return x.sum(0, dtype=x.dtype)
    return x.amax(0) if reduce == "max" else x.amin(0)


def _all_gather(x: Tensor, axes: Sequence[str], dim: int, n: int) -> Tensor:
    return placed(x, ()).movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(x: Tensor, axes: Sequence[str], dim: int, n: int) -> Tensor:
    return placed(_split(x.sum(0, dtype=x.dtype), dim, n), axes)


def _all_to_all(x: Tensor, axes: Sequence[str], split_dim: int, concat_dim: int, n: int) -> Tensor:
    pieces = placed(_split(x, 1 + split_dim, n), axes)  # [to, from, ...]
    return pieces.movedim(1, 1 + concat_dim).flatten(1 + concat_dim, 2 + concat_dim)


def _ppermute(x: Tensor, axes: Sequence[str], pairs: Sequence[int]) -> Tensor:
    return send_rows(x, pairs[::2], pairs[1::2])


def _split(x: Tensor, dim: int, n: int) -> Tensor:
    """The n pieces along a dim, in front."""
    return x.reshape([*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]]).movedim(dim, 0)


_KINDS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
}
SAME = {"all_reduce", "all_gather"}  # whose results all members share
DIMS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 2}  # how many of a call's arguments are dims
