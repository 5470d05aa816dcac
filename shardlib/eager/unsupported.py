"""What ops outside `jit` are refused for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import schema_of
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def operator(op: Any, tensors: Sequence[torch.Tensor]) -> NoReturn:
    """Refuse an operator that takes functions."""
    raise ShardingError(
        f"{op} on ShardedTensors",
        [typeof(x) for x in tensors],
        rule="outside jit, ops of ATen and of torch.library run, not operators that take functions",
        remedy="jit the function that calls it",
    )


def meshes(op: Any, sharded: Sequence[ShardedTensor]) -> NoReturn:
    """Refuse tensors of several meshes."""
    raise ShardingError(
        f"{op} takes tensors on {len({x._form.mesh for x in sharded})} meshes",
        [f"{typeof(x)} on {x.mesh}" for x in sharded],
        rule="all tensors of a program live on one mesh; outside jit, numbers (tensors without dims) may come from "
        "another one, if they need no gradient",
        remedy="place one again: shard(x.full_tensor(), spec) inside `with` the other's mesh",
    )


def storage(op: Any, tensors: Sequence[torch.Tensor]) -> NoReturn:
    """Refuse what speaks of storages and of other layouts."""
    raise ShardingError(
        f"{op} on a ShardedTensor",
        [typeof(x) for x in tensors],
        rule="a tensor in pieces is strided, keeps its size, and has no storage of its own",
        remedy="make a new tensor: torch.zeros_like(x), torch.cat([x, y]), x[:n]",
    )


def turn(op: Any, x: torch.Tensor) -> NoReturn:
    """Refuse to make a view with history another view in place: gradients of later writes would be laid out wrongly."""
    name = schema_of(op).name.removeprefix("aten::")
    raise ShardingError(
        f"{name} of a view whose gradient is recorded: {typeof(x)}",
        rule="a view with history stays the view that it is",
        remedy=f"make another view: y = x.{name.removesuffix('_')}(...)",
    )


def recorded(op: Any, tensors: Sequence[torch.Tensor]) -> NoReturn:
    """Refuse what torch.fx records."""
    raise ShardingError(
        f"{op} of ShardedTensors is recorded by torch.fx (make_fx; torch.func.linearize records, too)",
        [typeof(x) for x in tensors],
        rule="outside jit an op runs on pieces at once, and its result would be a constant of the recorded graph",
        remedy="sl.jit records programs of tensors in pieces; torch.func.jvp gives what linearize does",
    )


def mask(shape: Sequence[int], dim: int, of: Sequence[int], at: int) -> NoReturn:
    """Refuse a mask of another shape than what it is for, as torch does."""
    raise IndexError(
        f"The shape of the mask {list(shape)} at index {dim} does not match the shape of the indexed tensor {list(of)} "
        f"at index {at}"
    )


def meta(op: Any, tensors: Sequence[torch.Tensor]) -> NoReturn:
    """Refuse values and none in one call."""
    raise ShardingError(
        f"{op} takes meta tensors and others",
        [f"{typeof(x)} {'is on meta' if x.is_meta else f'lives on {x.device}'}" for x in tensors],
        rule="a meta tensor has a shape and no values",
        remedy="make values first: torch.empty_like(x, device=mesh.device), module.to_empty(device=mesh.device)",
    )


def devices(op: Any, sharded: Sequence[ShardedTensor], others: Sequence[torch.device]) -> NoReturn:
    """Refuse to take a tensor to a device that is not the mesh's."""
    raise ShardingError(
        f"{op} takes a ShardedTensor to another device",
        [f"{typeof(x)} lives on {x.mesh}, on {x.mesh.device}" for x in sharded]
        + [f"{device} is asked for" for device in others],
        rule="a mesh says which devices its tensors live on",
        remedy=f"x.full_tensor().to({str(others[0])!r}), or place it on a mesh of such devices",
    )


def collective(what: str, found: Sequence[str]) -> NoReturn:
    """Refuse a collective of torch.distributed that takes these ShardedTensors."""
    raise ShardingError(
        f"{what} on a ShardedTensor",
        found,
        rule="collectives of torch.distributed take a rank's own tensors; a ShardedTensor is the whole, and its sums "
        "and copies are ordinary ops (x.sum(), x.redistribute(spec))",
        remedy="x.to_local() for this rank's piece alone, x.full_tensor() for the whole, sl.psum and the others in a "
        "shard_map",
    )
