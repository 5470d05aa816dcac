"""The collectives of a `shard_map` body, as a user calls them.

`x` is a tensor or a pytree of tensors (None stays None); to the reductions a Python number is the same on all devices.
`axis` is a mesh axis, or a tuple of them (one group, numbered jointly, major first). All have tangents
(`torch.func.jvp`), and all but `pmax` and `pmin` gradients, of any order. A gradient that is taken inside a body is
that of all devices' results together, so of a loss that n devices share it is n times as large: take its `pmean`. Each
raises `ShardingError` outside a body, for axes that the mesh does not have and for what is neither tensor nor number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import pytree
from shardlib.ops.collectives import ppermute as permutation
from shardlib.primitives.body import Communication, current_body, group
from shardlib.primitives.form_dims import Piece

Axis = str | Sequence[str]


def psum(x: Any, axis: Axis) -> Any:
    """The sum of all devices' `x`, of any shape, on every device; of a number, the number of devices times it.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=4):
        ...     total = sl.shard_map(lambda x: sl.psum(x.sum(), "data"), in_specs="batch@data", out_specs="")
        ...     print(total(torch.arange(8.0)).full_tensor())
        tensor(28.)
    """
    _, axes, n = group("psum", axis)
    return _mapped("psum", Communication("all_reduce", axes, ("sum",)), x, lambda number: number * n)


def pmean(x: Any, axis: Axis) -> Any:
    """The mean of all devices' `x`, of any shape, on every device."""
    _, axes, n = group("pmean", axis)
    total = Communication("all_reduce", axes, ("sum",))
    return _mapped("pmean", lambda leaf: total(leaf) / n, x, lambda number: number)


def pmax(x: Any, axis: Axis) -> Any:
    """The elementwise maximum of all devices' `x`, on every device. It has no gradient, only tangents: detach x."""
    _, axes, _ = group("pmax", axis)
    return _mapped("pmax", Communication("all_reduce", axes, ("max",)), x, lambda number: number)


def pmin(x: Any, axis: Axis) -> Any:
    """The elementwise minimum of all devices' `x`, on every device. It has no gradient, only tangents: detach x."""
    _, axes, _ = group("pmin", axis)
    return _mapped("pmin", Communication("all_reduce", axes, ("min",)), x, lambda number: number)


def all_gather(x: Any, axis: Axis, dim: int = 0, tiled: bool = True) -> Any:
    """All devices' `x`, concatenated along `dim` (`tiled=False`: stacked in a new dim there), on every device."""
    _, axes, n = group("all_gather", axis)

    def gather(x: Tensor) -> Tensor:
        at = _dim("all_gather", x.dim() + (not tiled), dim)
        return Communication("all_gather", axes, (at, n))(x if tiled else x.unsqueeze(at))

    return _mapped("all_gather", gather, x)


def reduce_scatter(x: Any, axis: Axis, dim: int = 0) -> Any:
    """This device's piece, along `dim`, of the sum of all devices' `x`; n devices must divide that dim."""
    _, axes, n = group("reduce_scatter", axis)

    def scatter(x: Tensor) -> Tensor:
        at = _dim("reduce_scatter", x.dim(), dim)
        _divides("reduce_scatter", x, at, axes, n)
        return Communication("reduce_scatter", axes, (at, n))(x)

    return _mapped("reduce_scatter", scatter, x)


def all_to_all(x: Any, axis: Axis, split_dim: int, concat_dim: int) -> Any:
    """The pieces of `x` along `split_dim` go to the devices in order; what arrives is concatenated along `concat_dim`.

    `[n * a, b]` becomes `[a, n * b]` with `split_dim=0, concat_dim=1`; n devices must divide `split_dim`.
    """
    _, axes, n = group("all_to_all", axis)

    def exchange(x: Tensor) -> Tensor:
        split, concat = _dim("all_to_all", x.dim(), split_dim), _dim("all_to_all", x.dim(), concat_dim)
        _divides("all_to_all", x, split, axes, n)
        return Communication("all_to_all", axes, (split, concat, n))(x)

    return _mapped("all_to_all", exchange, x)


def ppermute(x: Any, axis: Axis, perm: Sequence[tuple[int, int]]) -> Any:
    """Each pair `(source, destination)` of `perm` sends `x`; a device that nobody sends to gets zeros.

    Raises `ShardingError` when a device sends, or receives, twice.
    """
    _, axes, n = group("ppermute", axis)
    pairs = [(int(a), int(b)) for a, b in perm]
    permutation.check(pairs, n)
    return _mapped("ppermute", Communication("ppermute", axes, (tuple(i for pair in pairs for i in pair),)), x)


def _mapped(call: str, of: Callable[[Tensor], Tensor], x: Any, of_number: Callable[[Any], Any] | None = None) -> Any:
    """`of` of every tensor in the pytree `x`, and `of_number` of every number, where there is one."""
    leaves, tree = pytree.tree_flatten(x)
    numbers = () if of_number is None else (int, float, complex)
    wrong = [
        f"{type(leaf).__name__} {leaf!r}" for leaf in leaves if not isinstance(leaf, (Tensor, type(None), *numbers))
    ]
    if wrong:
        raise ShardingError(
            f"{call} of what is no tensor",
            wrong,
            rule="collectives take tensors, in any pytree; psum, pmean, pmax and pmin take numbers, too",
            remedy="torch.tensor(number), or a container that is registered with torch.utils._pytree",
        )

    def one(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, Tensor):
            return leaf if leaf is None else of(leaf)
        assert of_number is not None, "other leaves were refused"
        if (body := current_body()) is not None and body.form is not None:
            raise ShardingError(
                f"{call} of the number {leaf!r} in the local form of a rule",
                rule="devices may hold pieces of other sizes, and other numbers",
                remedy="sl.piece(name).whole is the size of the whole; x.new_full((), number) is a tensor",
            )
        return of_number(leaf)

    return pytree.tree_unflatten([one(leaf) for leaf in leaves], tree)


def axis_index(axis: Axis) -> Tensor:
    """The coordinate of this device along `axis`, as an int64 tensor without dims."""
    body, axes, _ = group("axis_index", axis)
    if body.like is None:
        raise ShardingError(
            f"axis_index({axis!r}) in a shard_map without tensor arguments",
            rule="a body runs where its arguments are",
            remedy="pass it at least one tensor",
        )
    like: Tensor = body.like
    if body.form is not None:  # below autograd
        return torch.ops.shardlib.manual_axis_index(like, list(axes))  # type: ignore[no-any-return]
    return _AxisIndex.apply(like.detach(), axes)  # type: ignore[no-any-return,no-untyped-call]


def axis_size(axis: Axis) -> int:
    """The number of devices along `axis`."""
    return group("axis_size", axis)[2]


def piece(name: str) -> Piece:
    """Which elements of the dim `name` this device has, in the local form of a rule: `(offset, size, whole)`.

    Raises `ShardingError` elsewhere, and for a dim that the rule has not.
    """
    body = current_body()
    if body is None or body.form is None:
        raise ShardingError(
            f"piece({name!r}) outside any local form",
            rule="the dims of a rule are known in its local form: sl.rule(text, local=function)",
            remedy="in a shard_map body, x.shape is this device's, and sl.axis_index(axis) its place",
        )
    group("piece", name)
    return body.form.piece(name)


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
    def jvp(ctx: Any, *_: Any) -> None:
        return None

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
