"""Splits tensors into this process's shards, and checks shards from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import memory_of
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Coords, first_replicas
from shardlib.sharding.mesh.mesh import Mesh


@dataclass(frozen=True)
class LocalShard:
    """One device's shard: its rank, coordinates and tensor."""

    rank: int
    coords: Coords
    data: torch.Tensor


def split_into_shards(x: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """Returns this process's shards of a whole tensor, equal ones shared; they may be views of `x`."""
    if mesh.is_elsewhere:
        return [torch.empty(layout.local_shape(c), dtype=x.dtype, device="meta") for c in mesh.own_coords()]
    x = x.resolve_conj().resolve_neg()  # messages copy bytes without the conj and neg bits
    coords = mesh.own_coords()
    if layout.is_replicated:
        return [x] * len(coords)
    first = first_replicas(coords, layout.axes)
    shards = {i: layout.scatter(x, coords[i]).contiguous() for i in dict.fromkeys(first)}
    return [shards[i] for i in first]


def is_cpu_scalar(x: torch.Tensor) -> bool:
    """True for a CPU tensor without dims, which torch combines with tensors of any device."""
    return x.device.type == "cpu" and not x.dim()


def place_scalar(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Returns a CPU scalar on the mesh's device, filled by a kernel without synchronization; other tensors as is."""
    if mesh.device != "cpu" and is_cpu_scalar(x):
        return torch.full(x.shape, x.item(), dtype=x.dtype, device=mesh.device)
    return x


def split_into_owned_shards(
    x: torch.Tensor, layout: Layout, mesh: Mesh, donated: bool = False
) -> tuple[torch.Tensor, ...]:
    """Returns this process's shards of a whole tensor in memory of their own; equal ones are shared.

    A `donated` tensor's memory is kept if a shard fills it; otherwise a copy keeps less memory alive.
    """
    copies: dict[int, torch.Tensor] = {}
    shards = split_into_shards(x, layout, mesh)
    memory = memory_of(x.untyped_storage())
    for shard in shards:
        if id(shard) not in copies:
            storage = shard.untyped_storage()
            is_own = memory_of(storage) != memory or donated
            fills = storage.nbytes() == shard.numel() * shard.itemsize
            copies[id(shard)] = shard if is_own and fills else shard.clone(memory_format=torch.contiguous_format)
    return tuple(copies[id(shard)] for shard in shards)


def device_of(shards: Sequence[torch.Tensor], mesh: Mesh) -> torch.device:
    """Returns the device of a tensor with these shards of this process, also if another stage has the values."""
    return torch.empty(0, device=mesh.device).device if mesh.is_elsewhere else shards[0].device


def refuse_misfits(name: str, shards: Sequence[Any], layout: Layout, mesh: Mesh) -> None:
    """Raises `ShardingError` unless these are this process's shards of a tensor of this layout on this mesh."""
    for a in (*layout.axes, *layout.pending_axes):
        if mesh.axes.get(a.name) != a.axis_size:
            raise ShardingError(
                f"{name} is not on {mesh}",
                [
                    f"axis {a.name} has size {a.axis_size} in the layout, "
                    f"{mesh.axes.get(a.name, 'no such axis')} in the mesh"
                ],
                rule="a layout names axes of its mesh, by their sizes",
                remedy="make the layout with mesh.axis(name)",
            )
    device = "meta" if mesh.is_elsewhere else torch.device(mesh.device).type
    all_coords = mesh.own_coords() if mesh.kind == "distributed" else mesh.all_coords()
    ranks = [mesh.rank] if mesh.kind == "distributed" else [mesh.rank_of(coords) for coords in all_coords]
    first = next((shard.dtype for shard in shards if isinstance(shard, torch.Tensor)), None)
    faults = []
    if len(shards) != len(ranks):
        faults.append(f"there are {len(shards)}, this process holds {len(ranks)} of {mesh}")
    for rank, coords, shard in zip(ranks, all_coords, shards, strict=False):
        shape = layout.local_shape(coords)
        if type(shard) not in (torch.Tensor, torch.nn.Parameter) or shard.layout != torch.strided:
            faults.append(f"rank {rank}: a {type(shard).__name__}, which is no plain tensor")
        elif tuple(shard.shape) != shape:
            faults.append(f"rank {rank}: shape {list(shard.shape)}, where {layout} has {list(shape)}")
        elif shard.dtype != first:
            faults.append(f"rank {rank}: {shard.dtype}, where the first shard is {first}")
        elif shard.device.type != device:
            faults.append(f"rank {rank}: on {shard.device}, where the mesh is on {device}")
    if faults:
        raise ShardingError(
            f"{name} is given shards that do not fit",
            faults,
            rule="there is a plain tensor for each device of this process, of its local shape, all of one dtype",
            remedy="shard(x, spec) splits a whole tensor into shards that fit",
        )


def refuse_valueless(program: str, mesh: Mesh, tensors: Iterable[tuple[str, Any]]) -> None:
    """Raises `ShardingError` for named meta tensors that a program with collectives would read."""
    if mesh.kind == "virtual":
        return
    if wrong := [f"{name} of shape {list(x.shape)}" for name, x in tensors if x.device.type == "meta"]:
        raise ShardingError(
            f"{program} on {mesh} communicates, and is given tensors without values",
            wrong,
            rule="collectives read the memory of tensors, and meta tensors have none",
            remedy="sl.materialize(module), or torch.empty_like(x, device='cpu'); step.plan(...) needs no values",
        )
