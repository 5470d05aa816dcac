"""The collectives of a `shard_map` body, as a user calls them.

`x` is a tensor or a pytree of tensors (None stays None). Reductions also take Python numbers, equal on all devices.
`axis` is a mesh axis, or a tuple of them (one group, numbered jointly, major first). All have tangents
(`torch.func.jvp`), and all but `pmax` and `pmin` have gradients, of any order. A gradient inside a body belongs to the
sum of all devices' results: if n devices share a loss, its gradient is n times as large; take its `pmean`. All raise
`ShardingError` outside a body, for axes that the mesh does not have, and for leaves that are no tensors or numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.ops.collectives import ppermute as permutation
from shardlib.primitives.body import Communication, current_body, resolve_group
from shardlib.primitives.form_dims import Piece

Axis = str | Sequence[str]


def psum(x: Any, axis: Axis) -> Any:
    """Returns the sum of all devices' `x`, of any shape, on every device; for a number, its product with the devices.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=4):
        ...     total = sl.shard_map(lambda x: sl.psum(x.sum(), "data"), in_specs="batch@data", out_specs="")
        ...     print(total(torch.arange(8.0)).full_tensor())
        tensor(28.)
    """
    _, axes, n = resolve_group("psum", axis)
    return _map_tensors("psum", Communication("all_reduce", axes, ("sum",)), x, lambda number: number * n)


def pmean(x: Any, axis: Axis) -> Any:
    """Returns the mean of all devices' `x`, of any shape, on every device.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     step = sl.shard_map(lambda x: sl.pmean(x.mean(), "data"), in_specs="n@data", out_specs="")
        ...     print(step(torch.arange(8.0)).full_tensor())
        tensor(3.5000)
    """
    _, axes, n = resolve_group("pmean", axis)
    total = Communication("all_reduce", axes, ("sum",))
    return _map_tensors("pmean", lambda leaf: total(leaf) / n, x, lambda number: number)


def pmax(x: Any, axis: Axis) -> Any:
    """Returns the elementwise maximum of all devices' `x`. It has tangents, but no gradient: detach x.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     step = sl.shard_map(lambda x: sl.pmax(x, "data"), in_specs="n@data", out_specs="n")
        ...     print(step(torch.arange(4.0)).full_tensor())
        tensor([2., 3.])
    """
    _, axes, _ = resolve_group("pmax", axis)
    return _map_tensors("pmax", Communication("all_reduce", axes, ("max",)), x, lambda number: number)


def pmin(x: Any, axis: Axis) -> Any:
    """Returns the elementwise minimum of all devices' `x`. It has tangents, but no gradient: detach x.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     step = sl.shard_map(lambda x: sl.pmin(x, "data"), in_specs="n@data", out_specs="n")
        ...     print(step(torch.arange(4.0)).full_tensor())
        tensor([0., 1.])
    """
    _, axes, _ = resolve_group("pmin", axis)
    return _map_tensors("pmin", Communication("all_reduce", axes, ("min",)), x, lambda number: number)


def all_gather(x: Any, axis: Axis, dim: int = 0, tiled: bool = True) -> Any:
    """Concatenates all devices' `x` along `dim` (`tiled=False`: stacks them in a new dim), on every device.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     stack = sl.shard_map(lambda x: sl.all_gather(x, "data", tiled=False), "n@data", out_specs="device n")
        ...     print(stack(torch.arange(4)).full_tensor())
        tensor([[0, 1],
                [2, 3]])
    """
    _, axes, n = resolve_group("all_gather", axis)

    def gather(x: Tensor) -> Tensor:
        at = _normalize_dim("all_gather", x.dim() + (not tiled), dim)
        return Communication("all_gather", axes, (at, n))(x if tiled else x.unsqueeze(at))

    return _map_tensors("all_gather", gather, x)


def reduce_scatter(x: Any, axis: Axis, dim: int = 0) -> Any:
    """Returns this device's shard, along `dim`, of the sum of all devices' `x`; n devices must divide that dim.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     step = sl.shard_map(lambda x: sl.reduce_scatter(x, "data"), in_specs="n@data", out_specs="n@data")
        ...     print(step(torch.arange(4)).full_tensor())
        tensor([2, 4])
    """
    _, axes, n = resolve_group("reduce_scatter", axis)

    def scatter(x: Tensor) -> Tensor:
        at = _normalize_dim("reduce_scatter", x.dim(), dim)
        _check_divisible("reduce_scatter", x, at, axes, n)
        return Communication("reduce_scatter", axes, (at, n))(x)

    return _map_tensors("reduce_scatter", scatter, x)


def all_to_all(x: Any, axis: Axis, split_dim: int, concat_dim: int) -> Any:
    """Sends parts of `x` along `split_dim` to the devices, in order, and concatenates arrivals along `concat_dim`.

    `[n * a, b]` becomes `[a, n * b]` with `split_dim=0, concat_dim=1`; n devices must divide `split_dim`.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     columns = sl.shard_map(lambda x: sl.all_to_all(x, "data", 1, 0), "n@data d", out_specs="n d@data")
        ...     print(sl.typeof(columns(torch.ones(4, 6))))
        f32[4, 6@data]
    """
    _, axes, n = resolve_group("all_to_all", axis)

    def exchange(x: Tensor) -> Tensor:
        split, concat = (_normalize_dim("all_to_all", x.dim(), dim) for dim in (split_dim, concat_dim))
        _check_divisible("all_to_all", x, split, axes, n)
        return Communication("all_to_all", axes, (split, concat, n))(x)

    return _map_tensors("all_to_all", exchange, x)


def ppermute(x: Any, axis: Axis, perm: Sequence[tuple[int, int]]) -> Any:
    """Sends `x` along each pair `(source, destination)` of `perm`; a device that receives nothing gets zeros.

    Raises `ShardingError` if a device sends, or receives, twice.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     swap = sl.shard_map(lambda x: sl.ppermute(x, "data", [(0, 1), (1, 0)]), "n@data", out_specs="n@data")
        ...     print(swap(torch.arange(4)).full_tensor())
        tensor([2, 3, 0, 1])
    """
    _, axes, n = resolve_group("ppermute", axis)
    pairs = [(int(a), int(b)) for a, b in perm]
    permutation.check(pairs, n)
    return _map_tensors("ppermute", Communication("ppermute", axes, (tuple(i for pair in pairs for i in pair),)), x)


def _map_tensors(
    call: str, on_tensor: Callable[[Tensor], Tensor], x: Any, on_number: Callable[[Any], Any] | None = None
) -> Any:
    """Applies `on_tensor` to every tensor in the pytree `x`, and `on_number` to every number; None refuses numbers."""
    leaves, tree = pytree.tree_flatten(x)
    numbers = () if on_number is None else (int, float, complex)
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

    def map_leaf(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, Tensor):
            return leaf if leaf is None else on_tensor(leaf)
        assert on_number is not None, "other leaves were refused"
        if (body := current_body()) is not None and body.form is not None:
            raise ShardingError(
                f"{call} of the number {leaf!r} in the local form of a rule",
                rule="devices may hold pieces of other sizes, and other numbers",
                remedy="sl.piece(name).whole is the size of the whole; x.new_full((), number) is a tensor",
            )
        return on_number(leaf)

    return pytree.tree_unflatten([map_leaf(leaf) for leaf in leaves], tree)


def axis_index(axis: Axis) -> Tensor:
    """Returns the coordinate of this device along `axis`, as an int64 tensor without dims.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     step = sl.shard_map(lambda x: x + 10 * sl.axis_index("data"), in_specs="n@data", out_specs="n@data")
        ...     print(step(torch.arange(4)).full_tensor())
        tensor([ 0,  1, 12, 13])
    """
    body, axes, _ = resolve_group("axis_index", axis)
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
    """Returns the number of devices along `axis`.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     step = sl.shard_map(lambda x: x / sl.axis_size("data"), in_specs="n@data", out_specs="n@data")
        ...     print(step(torch.arange(4.0)).full_tensor())
        tensor([0.0000, 0.5000, 1.0000, 1.5000])
    """
    return resolve_group("axis_size", axis)[2]


def piece(name: str) -> Piece:
    """Returns `(offset, size, whole)` of this device's elements of the dim `name`, in the local form of a rule.

    Raises `ShardingError` elsewhere, and for a dim that the rule does not have.

    Example:
        >>> import shardlib as sl
        >>> def shard_of_range(x):
        ...     return x + torch.arange(sl.piece("n").size) + sl.piece("n").offset
        >>> @sl.rule("n -> n | n:local", local=shard_of_range)
        ... @torch.library.custom_op("docs::add_range", mutates_args=())
        ... def add_range(x: torch.Tensor) -> torch.Tensor:
        ...     return x + torch.arange(len(x))
        >>> _ = add_range.register_fake(torch.empty_like)
        >>> with sl.Mesh(data=2):
        ...     print(sl.jit(add_range, in_specs="n@data")(torch.zeros(4)).full_tensor())
        tensor([0., 1., 2., 3.])
    """
    body = current_body()
    if body is None or body.form is None:
        raise ShardingError(
            f"piece({name!r}) outside any local form",
            rule="the dims of a rule are known in its local form: sl.rule(text, local=function)",
            remedy="in a shard_map body, x.shape is this device's, and sl.axis_index(axis) its place",
        )
    resolve_group("piece", name)
    return body.form.piece(name)


class _AxisIndex(torch.autograd.Function):
    """Passes the op through the transforms of `like`, on which the result does not depend."""

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


def _normalize_dim(call: str, rank: int, dim: int) -> int:
    if not -rank <= dim < rank:
        raise ShardingError(f"{call} along dim {dim} of a local tensor of {rank} dims", rule="the dim exists")
    return dim % rank


def _check_divisible(call: str, x: Tensor, dim: int, axes: Sequence[str], n: int) -> None:
    if x.shape[dim] % n:
        raise ShardingError(
            f"{call} of a local tensor of shape {list(x.shape)} along dim {dim}",
            [f"dim {dim} has size {x.shape[dim]}, {' x '.join(axes)} has {n} devices"],
            rule="each device gets an equal piece",
            remedy="pad that dim to a multiple, and cut the result",
        )
