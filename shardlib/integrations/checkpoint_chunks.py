"""The planner's methods for `torch.distributed.checkpoint`: the boxes of a tensor that this process holds.

A shard is one box if its dims are contiguous ranges, and several if a factor in the middle of a dim is sharded. A
checkpoint stores boxes, not layouts, so it loads into any layout on any mesh.
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
    """A range of a dim that a device holds: its start in the whole and in the shard, and its length."""

    start: int
    local: int
    length: int


Box = tuple[Range, ...]  # a range per dim


def boxes(layout: Layout, coords: Coords) -> Iterator[Box]:
    """Yields the boxes that the device at `coords` holds; for a tensor without elements, one empty box."""
    if not math.prod(layout.shape):  # a checkpoint knows the tensor by its box
        return iter([tuple(Range(0, 0, n) for n in layout.shape)])
    return itertools.product(*(tuple(_ranges(dim, coords)) for dim in layout.dims))


def _ranges(dim: Dim, coords: Coords) -> Iterator[Range]:
    held = [shard_range(f.size, f.axes, coords) for f in dim]
    # All factors after the last sharded one stay together.
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
    """The boxes that this process can store. The planner chooses one of the devices that hold the same box."""
    _refuse_without_group(x)
    items = []
    for box, shard in _local_boxes(x).items():
        properties = TensorProperties.create_from_tensor(shard)
        data = TensorWriteData(_chunk(box), properties, torch.Size(x.shape))
        items.append(WriteItem(MetadataIndex(name, _chunk(box).offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def chunk_list(x: ShardedTensor) -> list[ChunkStorageMetadata]:
    """The boxes that this process reads. From now on `x` has shards of its own, which the reader fills.

    Raises `ShardingError` for a view: its base tensor would not change.
    """
    _refuse_without_group(x)
    if x.__dict__.get("_path"):
        raise ShardingError(
            f"{typeof(x)} is a view, and cannot be loaded into",
            rule="a checkpoint is loaded into the tensor that has the memory",
            remedy="load into that tensor, or into a copy (x.clone())",
        )
    first = first_replicas(x.mesh.own_coords(), x.sharding.axes)
    own = {i: x._locals[i].clone() for i in dict.fromkeys(first)}  # devices with equal shards share one
    shards = tuple(own[i] for i in first)
    view_aliases.assign_shards(x, shards, shards)
    return [_chunk(box) for box in _local_boxes(x)]


def _refuse_without_group(x: ShardedTensor) -> None:
    """Refuses a mesh of ranks without a process group: each rank would write the same files."""
    if x.mesh.kind == "distributed" and not world.initialized():
        raise ShardingError(
            f"{typeof(x)} is in a checkpoint that this rank would make alone",
            ["torch.distributed is not initialized, so each rank takes itself for the only process"],
            rule="ranks save and load a checkpoint together",
            remedy="torch.distributed.init_process_group() first (or read mesh.device_mesh, which does it)",
        )


def tensor_shard(x: ShardedTensor, index: MetadataIndex) -> torch.Tensor:
    """The box at an offset, as a view of its shard."""
    for box, shard in _local_boxes(x).items():
        if not x.numel():
            return shard.new_empty(x.shape)
        if index.offset is None or _chunk(box).offsets == index.offset:
            for d, r in enumerate(box):
                shard = shard.narrow(d, r.local, r.length)
            return shard
    raise ShardingError(f"{typeof(x)} has no piece at {index.offset}, which {index.fqn} is asked for here")


def _local_boxes(x: ShardedTensor) -> dict[Box, torch.Tensor]:
    """The boxes of all shards of this process, each with one of the shards that have it; none of another stage."""
    if x.mesh.is_elsewhere:
        return {}
    if x.sharding.pending:
        raise ShardingError(
            f"{typeof(x)} is a partial sum, and cannot be stored",
            rule="a checkpoint has complete values",
            remedy="redistribute it first",
        )
    shards = reversed([*zip(x.mesh.own_coords(), stored_shards(x), strict=True)])
    return {box: shard for coords, shard in shards for box in boxes(x.sharding, coords)}


def _chunk(box: Box) -> Any:
    return ChunkStorageMetadata(torch.Size(r.start for r in box), torch.Size(r.length for r in box))


_cls: Any = ShardedTensor  # the planner looks up these methods
_cls.__create_write_items__, _cls.__create_chunk_list__ = write_items, chunk_list
_cls.__get_tensor_shard__ = tensor_shard
