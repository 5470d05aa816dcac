"""The pieces of a tensor that this process holds: cut from a whole one, owned, or given by others and checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import memory_of
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import alike
from shardlib.sharding.mesh.mesh import Mesh


def cut_up(x: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """The pieces of a whole tensor that this process holds, equal pieces shared: some may be views of `x`, or `x`."""
    x = x.resolve_conj().resolve_neg()  # bits that say so would not travel with the bytes
    coords = mesh.own_coords()
    if layout.is_replicated:
        return [x] * len(coords)
    first = alike(coords, layout.axes)
    made = {i: layout.scatter(x, coords[i]).contiguous() for i in dict.fromkeys(first)}
    return [made[i] for i in first]


def is_number(x: torch.Tensor) -> bool:
    """Whether a plain tensor is a number on the CPU: torch takes those beside tensors of any device."""
    return x.device.type == "cpu" and not x.dim()


def there(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """A plain tensor on the mesh's device; a number on the CPU is written there by a kernel, which nobody waits for."""
    if mesh.device != "cpu" and is_number(x):
        return torch.full(x.shape, x.item(), dtype=x.dtype, device=mesh.device)
    return x


def owned(x: torch.Tensor, layout: Layout, mesh: Mesh, donated: bool = False) -> tuple[torch.Tensor, ...]:
    """The pieces of a whole tensor that this process holds, in memory of their own; equal pieces are shared.

    What was `donated` is kept where it fills its memory, and copied where that would keep more alive than is shown.
    """
    made: dict[int, torch.Tensor] = {}
    pieces = cut_up(x, layout, mesh)
    memory = memory_of(x.untyped_storage())
    for piece in pieces:
        if id(piece) not in made:
            held = piece.untyped_storage()
            mine = memory_of(held) != memory or donated
            fills = held.nbytes() == piece.numel() * piece.itemsize
            made[id(piece)] = piece if mine and fills else piece.clone(memory_format=torch.contiguous_format)
    return tuple(made[id(piece)] for piece in pieces)


def refuse_misfits(what: str, pieces: Sequence[Any], layout: Layout, mesh: Mesh) -> None:
    """Raise `ShardingError` unless a process holds these pieces of a tensor of this layout on this mesh."""
    for a in (*layout.axes, *layout.pending_axes):
        if mesh.axes.get(a.name) != a.of:
            raise ShardingError(
                f"{what} is not on {mesh}",
                [f"axis {a.name} has size {a.of} in the layout, {mesh.axes.get(a.name, 'no such axis')} in the mesh"],
                rule="a layout names axes of its mesh, by their sizes",
                remedy="make the layout with mesh.axis(name)",
            )
    ranks = range(mesh.size) if mesh.kind != "distributed" else [mesh.rank]
    first = next((piece.dtype for piece in pieces if isinstance(piece, torch.Tensor)), None)
    faults = []
    if len(pieces) != len(ranks):
        faults.append(f"there are {len(pieces)}, this process holds {len(ranks)} of {mesh}")
    for rank, piece in zip(ranks, pieces, strict=False):
        shape = layout.local_shape(mesh.coords(rank))
        if type(piece) not in (torch.Tensor, torch.nn.Parameter) or piece.layout != torch.strided:
            faults.append(f"rank {rank}: a {type(piece).__name__}, which is no plain tensor")
        elif tuple(piece.shape) != shape:
            faults.append(f"rank {rank}: shape {list(piece.shape)}, where {layout} has {list(shape)}")
        elif piece.dtype != first:
            faults.append(f"rank {rank}: {piece.dtype}, where the first piece is {first}")
        elif piece.device.type != torch.device(mesh.device).type:
            faults.append(f"rank {rank}: on {piece.device}, where the mesh is on {mesh.device}")
    if faults:
        raise ShardingError(
            f"{what} is given pieces that do not fit",
            faults,
            rule="there is a plain tensor for each device of this process, of its local shape, all of one dtype",
            remedy="shard(x, spec) cuts a whole tensor into pieces that fit",
        )


def refuse_valueless(what: str, mesh: Mesh, tensors: Iterable[tuple[str, Any]]) -> None:
    """Raise `ShardingError` for meta tensors, each with its name, that a program with collectives would read."""
    if mesh.kind == "virtual":
        return
    if wrong := [f"{name} of shape {list(x.shape)}" for name, x in tensors if x.device.type == "meta"]:
        raise ShardingError(
            f"{what} on {mesh} communicates, and is given tensors without values",
            wrong,
            rule="collectives read the memory of tensors, and meta tensors have none",
            remedy="sl.materialize(module), or torch.empty_like(x, device='cpu'); step.plan(...) needs no values",
        )
