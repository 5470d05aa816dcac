"""What `torch.distributed.checkpoint` asks of a tensor: which boxes of the whole this process holds, and where.

A piece is one box where every dim is cut in contiguous ranges; where a factor in the middle of a dim is cut, it is
several. Boxes, not layouts, are stored: so a checkpoint loads into any layout on any mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardlib.core.errors import ShardingError
from shardlib.distributed import world
from shardlib.sharding.chunks import shard_range
from shardlib.sharding.layout import Dim, Layout
from shardlib.sharding.mesh.axis import Coords, first_replicas
from shardlib.tensor import view_aliases
from shardlib.tensor.host_offload import stored_shards
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


class Range(NamedTuple):
    """A range of a dim that a device holds: where it starts in the whole and in the piece, and how long it is."""

    start: int
    local: int
    length: int


Box = tuple[Range, ...]  # a run per dim


def boxes(layout: Layout, coords: Coords) -> Iterator[Box]:
    """The boxes of the whole that the device at `coords` holds; of a whole without elements, the whole.

    Example:
        >>> from shardlib.sharding.mesh.axis import Axis
        >>> layout = Layout.parse("(2 4@t 3), 5", {"t": 2})
        >>> [[tuple(run) for run in box] for box in boxes(layout, {"t": 1})]
        [[(6, 0, 6), (0, 0, 5)], [(18, 6, 6), (0, 0, 5)]]
    """
    if not math.prod(layout.shape):  # a box that a checkpoint knows the tensor by
        return iter([tuple(Range(0, 0, n) for n in layout.shape)])
    return itertools.product(*(tuple(_ranges(dim, coords)) for dim in layout.dims))


def _ranges(dim: Dim, coords: Coords) -> Iterator[Range]:
    held = [shard_range(f.size, f.axes, coords) for f in dim]
    # All that is behind the last factor that is cut stays together.
    k = max((k for k, (f, (a, b)) in enumerate(zip(dim, held, strict=True)) if b - a < f.size), default=0)
    inner = math.prod(int(f.size) for f in dim[k + 1 :])
    start, stop = held[k]
    length = (stop - start) * inner
    for i, outer in enumerate(itertools.product(*(range(*s) for s in held[:k]))):
        at = 0
        for f, n in zip(dim, outer, strict=False):
            at = at * int(f.size) + n
        if length:
            yield Range((at * int(dim[k].size) + start) * inner, i * length, length)


def write_items(x: ShardedTensor, name: str, _: Any = None) -> list[WriteItem]:
    """What this process has to store; devices that hold the same say the same, and one of them is asked to."""
    _refuse_before_ranks_meet(x)
    items = []
    for box, piece in _held(x).items():
        properties = TensorProperties.create_from_tensor(piece)
        data = TensorWriteData(_chunk(box), properties, torch.Size(x.shape))
        items.append(WriteItem(MetadataIndex(name, _chunk(box).offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def chunk_list(x: ShardedTensor) -> list[ChunkStorageMetadata]:
    """What this process wants to read. From here on `x` has pieces of its own, which the reader fills.

    Raises `ShardingError` for a view: the tensor that it shows a part of would not change.
    """
    _refuse_before_ranks_meet(x)
    if x.__dict__.get("_path"):
        raise ShardingError(
            f"{typeof(x)} is a view, and cannot be loaded into",
            rule="a checkpoint is loaded into the tensor that has the memory",
            remedy="load into that tensor, or into a copy (x.clone())",
        )
    first = first_replicas(x.mesh.own_coords(), x.sharding.axes)
    own = {i: x._locals[i].clone() for i in dict.fromkeys(first)}  # who holds the same shares what is read
    pieces = tuple(own[i] for i in first)
    view_aliases.assign_shards(x, pieces, pieces)
    return [_chunk(box) for box in _held(x)]


def _refuse_before_ranks_meet(x: ShardedTensor) -> None:
    """Without a process group torch takes every process for the only one, and all write the same files."""
    if x.mesh.kind == "distributed" and not world.initialized():
        raise ShardingError(
            f"{typeof(x)} is in a checkpoint that this rank would make alone",
            ["torch.distributed is not initialized, so each rank takes itself for the only process"],
            rule="ranks save and load a checkpoint together",
            remedy="torch.distributed.init_process_group() first (or read mesh.device_mesh, which does it)",
        )


def tensor_shard(x: ShardedTensor, index: MetadataIndex) -> torch.Tensor:
    """The box of that offset, as a view of the piece that it is in."""
    for box, piece in _held(x).items():
        if not x.numel():
            return piece.new_empty(x.shape)
        if index.offset is None or _chunk(box).offsets == index.offset:
            for d, run in enumerate(box):
                piece = piece.narrow(d, run.local, run.length)
            return piece
    raise ShardingError(f"{typeof(x)} has no piece at {index.offset}, which {index.fqn} is asked for here")


def _held(x: ShardedTensor) -> dict[Box, torch.Tensor]:
    """The boxes of all pieces of this process, each with one of the pieces that have it."""
    if x.sharding.pending:
        raise ShardingError(
            f"{typeof(x)} is a pending sum, and cannot be stored",
            rule="a checkpoint has complete values",
            remedy="redistribute it first",
        )
    held = reversed([*zip(x.mesh.own_coords(), stored_shards(x), strict=True)])
    return {box: piece for coords, piece in held for box in boxes(x.sharding, coords)}


def _chunk(box: Box) -> Any:
    return ChunkStorageMetadata(torch.Size(run.start for run in box), torch.Size(run.length for run in box))


_cls: Any = ShardedTensor  # what the planner asks a tensor for
_cls.__create_write_items__, _cls.__create_chunk_list__ = write_items, chunk_list
_cls.__get_tensor_shard__ = tensor_shard
