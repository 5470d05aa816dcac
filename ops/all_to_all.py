"""all_to_all: the shard moves from one dim to another.

    x    [.., sum(split_sizes), .., concat_sizes[i], ..]    member i's tensor: whole along split_dim
    out  [.., split_sizes[i], .., sum(concat_sizes), ..]    whole along concat_dim instead, contiguous

With `split_dim == concat_dim` every member sends pieces of one dim and concatenates what it gets along the same dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.ops._groups import GroupHandle
from shardlib.ops._wire import Handle, exchange, leads, pack, resized


def wire_bytes(out: int, n: int) -> int:
    """Bytes that each of `n` devices sends, for `out` bytes of result on it."""
    return out * (n - 1) // n


def reference(
    shards: Sequence[Tensor],
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
) -> list[Tensor]:
    """All members at once."""
    if len(shards) == 1:
        return list(shards)
    pieces = zip(*(shard.split_with_sizes(split_sizes, split_dim) for shard in shards), strict=True)
    return [torch.cat(of_member, concat_dim) for of_member in pieces]


def start(
    x: Tensor,
    split_dim: int,
    split_sizes: Sequence[int],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: GroupHandle,
) -> Handle[Tensor]:
    """Begin to send member j the j-th piece of `x` along `split_dim`; arrivals are concatenated along `concat_dim`."""
    if group.size == 1:
        return Handle(lambda: x)
    row = resized(x.shape, split_dim, split_sizes[group.position])
    same = split_dim == concat_dim
    shapes = [row if same else resized(row, concat_dim, size) for size in concat_sizes]
    receive = [math.prod(shape) for shape in shapes]
    whole = resized(row, concat_dim, sum(shape[concat_dim] for shape in shapes))
    pieces = x.split_with_sizes(split_sizes, split_dim)
    message = x.contiguous().view(-1) if leads(x.shape, split_dim) else pack(pieces)
    flight = exchange(message, [piece.numel() for piece in pieces], receive, group)

    def land() -> Tensor:
        if leads(whole, concat_dim):
            return flight.flat().view(whole)
        arrived = zip(flight.pieces(), shapes, strict=True)
        return torch.cat([piece.view(shape) for piece, shape in arrived], concat_dim)

    return Handle(land)


def finish(handle: Handle[Tensor]) -> Tensor:
    """Wait for the result of `start`."""
    return handle.finish()
