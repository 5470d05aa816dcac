"""Collectives where the local tensors of all devices are stacked along dim 0, in the order of ranks.

A body that is written for one device runs on all of them at once under vmap; there a collective is plain arithmetic
along the stacked dim. This is how a `shard_map` runs in a program for one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.meshes.mesh import Mesh
from shardlib.specs.layout import Layout


def depth() -> int:
    """How many transforms of torch.func the running code is inside of."""
    return int(torch._C._functorch.get_dynamic_layer_stack_depth())


def cut(x: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The pieces of a whole tensor on all devices, stacked."""
    return torch.stack([layout.scatter(x, coords) for coords in mesh.all_coords()])


def join(x: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The whole tensor of stacked pieces; of a piece that several devices hold (alike, one hopes) the mean."""
    used = {a.name for a in layout.axes}
    idle = [d for d, name in enumerate(mesh.axis_names) if name not in used]
    grid = x.reshape([*mesh.axes.values(), *x.shape[1:]])
    if x.is_floating_point() or x.is_complex():
        grid = grid.mean(idle, keepdim=True) if idle else grid
    else:
        for d in idle:
            grid = grid.narrow(d, 0, 1)
    # Device dims, then the dims of one piece split in their factors; every device dim goes in front of what it cuts.
    rank, sizes, order = len(mesh.axes), [], []
    at = rank
    for f in layout.factors:
        order += [mesh.axis_names.index(a.name) for a in f.axes]
        order.append(at)
        sizes.append(f.size // math.prod(a.size for a in f.axes))
        at += 1
    grid = grid.reshape([*grid.shape[:rank], *sizes])
    return grid.permute(*idle, *order).reshape(layout.shape)


def collective(x: Tensor, mesh: Mesh, axes: Sequence[str], kind: str, args: Sequence[Any]) -> Tensor:
    """One collective over the mesh axes `axes` (jointly, major first), on every group of devices.

    Example:
        >>> collective(torch.tensor([1, 2, 3, 4]), Mesh(data=2, tensor=2), ["tensor"], "all_reduce", ("sum",))
        tensor([3, 3, 7, 7])
    """
    grid = list(mesh.axes.values())
    g, k = len(grid) - len(axes), len(axes)
    here, there = [mesh.axis_names.index(name) for name in axes], list(range(g, g + k))
    x = x.reshape([*grid, *x.shape[1:]]).movedim(here, there)
    members = x.shape[g : g + k]
    x = _KINDS[kind](x.flatten(g, g + k - 1), g, *args)
    x = x.reshape([*x.shape[:g], *members, *x.shape[g + 1 :]])
    return x.movedim(there, here).flatten(0, len(grid) - 1)


# Each takes x [groups.., member, ...] with the members' dim at g; the dims of a member's tensor follow it.


def _all_reduce(x: Tensor, g: int, reduce: str) -> Tensor:
    if reduce == "sum":
        out = x.sum(g, keepdim=True, dtype=x.dtype)
    else:
        out = x.amax(g, keepdim=True) if reduce == "max" else x.amin(g, keepdim=True)
    return out.expand_as(x)


def _all_gather(x: Tensor, g: int, dim: int, n: int) -> Tensor:
    out = torch.cat(x.unbind(g), g + dim)
    return torch.stack([out] * n, g)


def _reduce_scatter(x: Tensor, g: int, dim: int, n: int) -> Tensor:
    return torch.stack(x.sum(g, dtype=x.dtype).chunk(n, g + dim), g)


def _all_to_all(x: Tensor, g: int, split_dim: int, concat_dim: int, n: int) -> Tensor:
    pieces = x.chunk(n, g + 1 + split_dim)
    return torch.stack([torch.cat(piece.unbind(g), g + concat_dim) for piece in pieces], g)


def _ppermute(x: Tensor, g: int, pairs: Sequence[int]) -> Tensor:
    source = dict(zip(pairs[1::2], pairs[::2], strict=True))
    members = x.unbind(g)
    return torch.stack([members[source[i]] if i in source else torch.zeros_like(m) for i, m in enumerate(members)], g)


_KINDS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
}
