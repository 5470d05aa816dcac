"""Counts references to the memory of shards: a shard without other references may be overwritten."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import gt

import torch

from shardlib.core.torch_internals.torch_private import memory_of, memory_uses, tensor_uses

ShardTuples = Sequence[tuple[torch.Tensor, ...]]  # the shards of several tensors
Counts = tuple[int, ...]


def measure_sole_owner() -> Counts:
    """Returns the counts for a shard without other references, in a tuple with one."""
    return _count_references([(torch.zeros(1) + 1,)], 0, 0)


def is_sole_owner(shards: ShardTuples, i: int, firsts: Iterable[tuple[int, int]], holders: int, base: Counts) -> bool:
    """True if only `holders` refer to the i-th tuple, and nothing else to the memory of its shards.

    `firsts` are devices with distinct shards, each with the number of devices that share it; `base` is the result of
    `measure_sole_owner`.
    """
    tuple_count, shard_count, *storage_counts = base
    for d, n in firsts:
        most = tuple_count + holders - 1, shard_count + n - 1, *storage_counts
        if any(map(gt, _count_references(shards, i, d), most)):
            return False
    return True


def _count_references(shards: ShardTuples, i: int, d: int) -> Counts:
    """Counts references to a tuple of shards, to one shard, to its storage, and to both in C++; and sharing processes.

    All counts are taken in this frame, so that they compare with each other: interpreters differ in the references that
    a call adds to its arguments, and `torch.compile` changes them.
    """
    x = shards[i][d]
    storage = x.untyped_storage()
    is_shared = x.is_cpu and storage.is_shared()  # True for all storages on GPUs
    below = int(memory_uses(memory_of(storage))), int(tensor_uses(x)), int(is_shared)
    return sys.getrefcount(shards[i]), sys.getrefcount(x), sys.getrefcount(storage), *below
