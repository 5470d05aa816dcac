"""Errors for ops outside `jit` that ShardedTensors do not support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def refuse_operator(op: Any, tensors: Sequence[torch.Tensor]) -> NoReturn:
    raise ShardingError(
        f"{op} on ShardedTensors",
        [typeof(x) for x in tensors],
        rule="outside jit, ops of ATen and of torch.library run, not operators that take functions",
        remedy="jit the function that calls it",
    )


def refuse_meshes(op: Any, sharded: Sequence[ShardedTensor]) -> NoReturn:
    raise ShardingError(
        f"{op} takes tensors on {len({x._form.mesh for x in sharded})} meshes",
        [f"{typeof(x)} on {x.mesh}" for x in sharded],
        rule="all tensors of a program live on one mesh; outside jit, numbers (tensors without dims) may come from "
        "another one, if they need no gradient",
        remedy="place one again: shard(x.full_tensor(), spec) inside `with` the other's mesh",
    )


def refuse_storage(op: Any, tensors: Sequence[torch.Tensor]) -> NoReturn:
    raise ShardingError(
        f"{op} on a ShardedTensor",
        [typeof(x) for x in tensors],
        rule="a ShardedTensor is strided, keeps its size, and has no storage of its own",
        remedy="make a new tensor: torch.zeros_like(x), torch.cat([x, y]), x[:n]",
    )


def refuse_inplace_view(op: Any, x: torch.Tensor) -> NoReturn:
    """Refuses to make a view with history another view: gradients of later writes would get a wrong layout."""
    name = schema_of(op).name.removeprefix("aten::")
    raise ShardingError(
        f"{name} of a view whose gradient is recorded: {typeof(x)}",
        rule="a view with history stays the view that it is",
        remedy=f"make another view: y = x.{name.removesuffix('_')}(...)",
    )


def refuse_recorded(op: Any, tensors: Sequence[torch.Tensor]) -> NoReturn:
    raise ShardingError(
        f"{op} of ShardedTensors is recorded by torch.fx (make_fx; torch.func.linearize records, too)",
        [typeof(x) for x in tensors],
        rule="outside jit an op runs on shards at once, and its result would be a constant of the recorded graph",
        remedy="sl.jit records programs of ShardedTensors; torch.func.jvp gives what linearize does",
    )


def refuse_mask(shape: Sequence[int], dim: int, indexed: Sequence[int], at: int) -> NoReturn:
    """Raises the error of torch for a mask that does not fit the indexed tensor."""
    raise IndexError(
        f"The shape of the mask {list(shape)} at index {dim} does not match the shape of the indexed tensor "
        f"{list(indexed)} at index {at}"
    )


def refuse_meta(op: Any, tensors: Sequence[torch.Tensor]) -> NoReturn:
    raise ShardingError(
        f"{op} takes meta tensors and others",
        [f"{typeof(x)} {'is on meta' if x.is_meta else f'lives on {x.device}'}" for x in tensors],
        rule="a meta tensor has a shape and no values",
        remedy="make values first: torch.empty_like(x, device=mesh.device), module.to_empty(device=mesh.device)",
    )


def refuse_devices(op: Any, sharded: Sequence[ShardedTensor], others: Sequence[torch.device]) -> NoReturn:
    raise ShardingError(
        f"{op} takes a ShardedTensor to another device",
        [f"{typeof(x)} lives on {x.mesh}, on {x.mesh.device}" for x in sharded]
        + [f"{device} is asked for" for device in others],
        rule="a mesh says which devices its tensors live on",
        remedy=f"x.full_tensor().to({str(others[0])!r}), or place it on a mesh of such devices",
    )


def refuse_collective(name: str, tensors: Sequence[str]) -> NoReturn:
    raise ShardingError(
        f"{name} on a ShardedTensor",
        tensors,
        rule="collectives of torch.distributed take a rank's own tensors; a ShardedTensor is the whole, and its sums "
        "and copies are ordinary ops (x.sum(), x.redistribute(spec))",
        remedy="x.to_local() for this rank's shard alone, x.full_tensor() for the whole, sl.psum and the others in a "
        "shard_map",
    )
