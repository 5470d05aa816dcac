"""The collectives of a `shard_map` body, as a user calls them.

`axis` is a mesh axis, or a tuple of them (one group, numbered jointly, major first). All but `pmax` and `pmin` are
differentiable, any number of times. Each raises `ShardingError` outside a body and for axes that the mesh does not
have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.errors import ShardingError
from shardlib.manual.body import Call, group
from shardlib.ops import ppermute as permutation

Axis = str | Sequence[str]


def psum(x: Tensor, axis: Axis) -> Tensor:
    """The sum of all devices' `x`, of any shape, on every device.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=4):
        ...     total = sl.shard_map(lambda x: sl.psum(x.sum(), "data"), in_specs="batch@data", out_specs="")
        ...     print(total(torch.arange(8.0)).full_tensor())
        tensor(28.)
    """
    _, axes, _ = group("psum", axis)
    return Call("all_reduce", axes, ("sum",))(x)


def pmean(x: Tensor, axis: Axis) -> Tensor:
    """The mean of all devices' `x`, of any shape, on every device."""
    _, axes, n = group("pmean", axis)
    return Call("all_reduce", axes, ("sum",))(x) / n


def pmax(x: Tensor, axis: Axis) -> Tensor:
    """The elementwise maximum of all devices' `x`, on every device. It has no gradient: detach its operand."""
    _, axes, _ = group("pmax", axis)
    return Call("all_reduce", axes, ("max",))(x)


def pmin(x: Tensor, axis: Axis) -> Tensor:
    """The elementwise minimum of all devices' `x`, on every device. It has no gradient: detach its operand."""
    _, axes, _ = group("pmin", axis)
    return Call("all_reduce", axes, ("min",))(x)


def all_gather(x: Tensor, axis: Axis, dim: int = 0, tiled: bool = True) -> Tensor:
    """All devices' `x`, concatenated along `dim` (`tiled=False`: stacked in a new dim there), on every device."""
    _, axes, n = group("all_gather", axis)
    if not tiled:
        dim = _dim("all_gather", x.dim() + 1, dim)
        x = x.unsqueeze(dim)
    return Call("all_gather", axes, (_dim("all_gather", x.dim(), dim), n))(x)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This device's piece, along `dim`, of the sum of all devices' `x`; n devices must divide that dim."""
    _, axes, n = group("reduce_scatter", axis)
    dim = _dim("reduce_scatter", x.dim(), dim)
    _divides("reduce_scatter", x, dim, axes, n)
    return Call("reduce_scatter", axes, (dim, n))(x)


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """The pieces of `x` along `split_dim` go to the devices in order; what arrives is concatenated along `concat_dim`.

    `[n * a, b]` becomes `[a, n * b]` with `split_dim=0, concat_dim=1`; n devices must divide `split_dim`.
    """
    _, axes, n = group("all_to_all", axis)
    split_dim, concat_dim = _dim("all_to_all", x.dim(), split_dim), _dim("all_to_all", x.dim(), concat_dim)
    _divides("all_to_all", x, split_dim, axes, n)
    return Call("all_to_all", axes, (split_dim, concat_dim, n))(x)


def ppermute(x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]]) -> Tensor:
    """Each pair `(source, destination)` of `perm` sends `x`; a device that nobody sends to gets zeros.

    Raises `ShardingError` when a device sends, or receives, twice.
    """
    _, axes, n = group("ppermute", axis)
    pairs = [(int(a), int(b)) for a, b in perm]
    permutation.check(pairs, n)
    return Call("ppermute", axes, (tuple(i for pair in pairs for i in pair),))(x)


def axis_index(axis: Axis) -> Tensor:
    """The coordinate of this device along `axis`, as an int64 tensor without dims."""
    body, axes, _ = group("axis_index", axis)
    if body.index is None:
        if body.like is None:
            raise ShardingError(
                f"axis_index({axis!r}) in a shard_map without tensor arguments",
                rule="a body runs where its arguments are",
                remedy="pass it at least one tensor",
            )
        like: Tensor = body.like
        return _AxisIndex.apply(like.detach(), axes)  # type: ignore[no-any-return,no-untyped-call]
    out = torch.zeros_like(body.index)
    for name in axes:
        minor = 1
        for other in body.mesh.axis_names[body.mesh.axis_names.index(name) + 1 :]:
            minor *= body.mesh.axes[other]
        n = body.mesh.axes[name]
        out = out * n + torch.div(body.index, minor, rounding_mode="floor") % n
    return out


def axis_size(axis: Axis) -> int:
    """The number of devices along `axis`."""
    return group("axis_size", axis)[2]


class _AxisIndex(torch.autograd.Function):
    """Carries the op through the transforms that `like` came through; the result has nothing to do with them."""

    @staticmethod
    def forward(like: Tensor, axes: tuple[str, ...]) -> Any:
        return torch.ops.shardlib.manual_axis_index(like, list(axes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[str, ...]], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], like: Tensor, axes: tuple[str, ...]) -> tuple[Tensor, None]:
        return _AxisIndex.apply(like, axes), None  # type: ignore[no-untyped-call]


def _dim(call: str, rank: int, dim: int) -> int:
    if not -rank <= dim < rank:
        raise ShardingError(f"{call} along dim {dim} of a local tensor of {rank} dims", rule="the dim exists")
    return dim % rank


def _divides(call: str, x: Tensor, dim: int, axes: Sequence[str], n: int) -> None:
    if x.shape[dim] % n:
        raise ShardingError(
            f"{call} of a local tensor of shape {list(x.shape)} along dim {dim}",
            [f"dim {dim} has size {x.shape[dim]}, {' x '.join(axes)} has {n} devices"],
            rule="each device gets an equal piece",
            remedy="pad that dim to a multiple, and cut the result",
        )
