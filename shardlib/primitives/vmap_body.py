"""A body on all devices at once: what they hold is stacked, a collective is arithmetic along the stacked dims.

A body that is written for one device runs under one `vmap` for each of its axes. What is the same along an axis is not
batched there; what differs is, and only that. This is how a `shard_map` runs in a program for one device, and how it
runs where axes are left to the compiler: then a constraint says that the stacked dims lie on the body's axes, and all
the rest is inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardlib.core.context import is_tracing
from shardlib.core.torch_private import is_batched, is_wrapped, level_of, unwrapped
from shardlib.ops.constraint import constrain
from shardlib.primitives.boundary import Passage, Stack
from shardlib.primitives.stacked_permute import send_rows
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import ways
from shardlib.sharding.mesh.mesh import Mesh


def cutting(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """The axes of the mesh that cut a tensor, in the order of the mesh."""
    used = {a.name for a in layout.axes}
    return tuple(name for name in mesh.axis_names if name in used)


def cut(x: Tensor, how: Passage, mesh: Mesh) -> Tensor:
    """The pieces of a whole tensor, with a dim in front for every axis that cuts it, in the order of the mesh.

    They are memory of their own: what a body writes to its arguments does not reach the tensor.
    """
    axes = cutting(how.layout, mesh)
    sizes, order = _grid(how.layout, axes)
    pieces = x.reshape(sizes).permute(order).clone()
    return _on(pieces.reshape([*(mesh.axes[name] for name in axes), *how.door.local_shape]), axes)


def join(x: Stack, how: Passage, mesh: Mesh) -> Tensor:
    """The whole tensor of pieces; of a piece that devices along an axis hold alike (one hopes) the mean."""
    axes, pieces = cutting(how.layout, mesh), _on(x.pieces, x.axes)
    for d, name in reversed([*enumerate(x.axes)]):
        if name not in axes:
            number = pieces.is_floating_point() or pieces.is_complex()
            pieces = pieces.mean(d) if number else pieces.select(d, 0)
    for d, name in enumerate(axes):
        if name not in x.axes:
            pieces = pieces.unsqueeze(d).expand(*pieces.shape[:d], mesh.axes[name], *pieces.shape[d:])
    sizes, order = _grid(how.layout, axes)
    pieces = pieces.reshape([sizes[i] for i in order])
    return pieces.permute([order.index(i) for i in range(len(order))]).reshape(how.layout.shape)


def _grid(layout: Layout, axes: Sequence[str]) -> tuple[list[int], list[int]]:
    """The sizes of a tensor's dims where every factor is split, devices in front, and where `axes` and the rest are."""
    at: dict[str, int] = {}
    rest, sizes = [], list[int]()
    for f in layout.factors:
        for a in f.axes:
            at[a.name] = len(sizes)
            sizes.append(a.size)
        rest.append(len(sizes))
        sizes.append(f.size // ways(f.axes))
    return sizes, [*(at[name] for name in axes), *rest]


def varying(x: Tensor, indices: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The axes of a body along which x may differ: where it is batched as the device's index is."""
    levels = set()
    while is_wrapped(x):
        if is_batched(x):
            levels.add(level_of(x))
        x = unwrapped(x)
    return tuple(name for name, index in indices.items() if level_of(index) in levels)


def _on(x: Tensor, axes: Sequence[str]) -> Tensor:
    """x, with a dim in front for each of these axes, which lies there."""
    return placed(x, *((name,) for name in axes))


def placed(x: Tensor, *axes: Sequence[str], back: Sequence[Sequence[str]] | None = None) -> Tensor:
    """x, of which each leading dim lies on these axes (on none: it is whole); its gradient, where `back` says else."""
    if not axes or not is_tracing():
        return x

    def spec(axes: Sequence[Sequence[str]]) -> str:
        return " ".join([*(f"_@({' '.join(names)})" for names in axes), *["_?"] * (x.dim() - len(axes))])

    return constrain(x, spec(axes), spec(axes if back is None else back))


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
    return _leave(placed(x, (), back=[axes]), axes, dim, n)


def _leave(x: Tensor, axes: Sequence[str], dim: int, n: int) -> Tensor:
    return x.movedim(0, dim).flatten(dim, dim + 1)


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
    "leave": _leave,  # a gathering of which nobody says that it has to be whole anywhere
}
SAME = {"all_reduce", "all_gather", "leave"}  # whose results all members share
