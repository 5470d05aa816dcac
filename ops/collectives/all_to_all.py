"""all_to_all: the shard moves from one dim to another.

    x    [.., sum(split_sizes), .., concat_sizes[i], ..]    member i's tensor: whole along split_dim
    out  [.., split_sizes[i], .., sum(concat_sizes), ..]    whole along concat_dim instead, contiguous

With `split_dim == concat_dim` members exchange parts of one dim and may send different sizes: `split_sizes` is then a
table whose row i holds the sizes that member i sends to each member, and `concat_sizes` is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives import two_level
from shardlib.ops.collectives.transport import cuda_wire
from shardlib.ops.collectives.transport.flat_messages import is_leading, pack, resize_dim, resolve_views
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.pick import pick
from shardlib.ops.collectives.transport.request import CollectiveRequest
from shardlib.ops.collectives.transport.shm_channel import Recipe
from shardlib.ops.collectives.transport.shm_streams import (
    COPY,
    Block,
    Message,
    TensorMeta,
    align,
    choose_sources,
    dense_meta,
    metas_key,
)
from shardlib.ops.collectives.transport.torch_wire import Handle, PendingParts, exchange, first_result

Split = Sequence[int] | Sequence[Sequence[int]]


def _rows(sizes: Split, n: int) -> tuple[tuple[int, ...], ...]:
    """Returns the table of sizes: row i holds the sizes that member i sends to each of the `n` members."""
    row = tuple(size for size in sizes if isinstance(size, int))
    return (row,) * n if row else tuple(tuple(row) for row in sizes if not isinstance(row, int))


def reference(
    shards: Sequence[Tensor],
    split_dim: int,
    split_sizes: Split,
    concat_dim: int,
    concat_sizes: Sequence[int],
) -> list[Tensor]:
    """Computes the results of all members."""
    if len(shards) == 1:
        return list(shards)
    rows = zip(shards, _rows(split_sizes, len(shards)), strict=True)
    parts = zip(*(shard.split_with_sizes(row, split_dim) for shard, row in rows), strict=True)
    return [torch.cat(received, concat_dim) for received in parts]


def choose(request: CollectiveRequest) -> Choice:
    """Chooses the way to exchange parts of a tensor."""
    shm = Choice("shm", "", "each member reads its pieces to their places")
    return pick("all_to_all", request, shm, Choice("torch", "exchange", "pieces are sent pairwise"))


def start(
    x: Tensor,
    split_dim: int,
    split_sizes: Split,
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: GroupHandle,
) -> Handle[Tensor]:
    """Begin to send member j the j-th part of `x` along `split_dim`, and to concatenate arrivals along `concat_dim`."""
    if group.size == 1:
        return Handle(lambda: x)
    rows, me = _rows(split_sizes, group.size), group.position
    if group.shm is not None:
        (x,) = resolve_views([x])
        split, concat = rows, tuple(concat_sizes)
        key = ("all_to_all", metas_key([x]), split_dim, split, concat_dim, concat)
        if transfer := group.shm.start(
            key, lambda: _recipe(TensorMeta.from_tensor(x), split_dim, split, concat_dim, concat, group), [x]
        ):
            return first_result(Handle(transfer.finish))
    row = resize_dim(x.shape, split_dim, rows[me][me])
    same = split_dim == concat_dim
    arriving = [theirs[me] for theirs in rows] if same else concat_sizes
    shapes = [resize_dim(row, concat_dim, size) for size in arriving]
    receive = [math.prod(shape) for shape in shapes]
    whole = resize_dim(row, concat_dim, sum(arriving))
    parts = x.split_with_sizes(rows[me], split_dim)
    message = x.contiguous().view(-1) if is_leading(x.shape, split_dim) else pack(parts)
    even = _is_even(rows, concat_sizes, same)
    choice = choose(group.request(x.nbytes, even, x.dtype))
    if choice.backend == "cuda":
        # Members' tensors differ along concat_dim only. Where that is split_dim, the rows hold the differences.
        theirs = [x.shape] * len(rows) if same else [resize_dim(x.shape, concat_dim, size) for size in concat_sizes]
        counts = [
            [math.prod(resize_dim(shape, split_dim, size)) for size in sizes]
            for shape, sizes in zip(theirs, rows, strict=True)
        ]
        pending = cuda_wire.exchange(message, counts, group)
    elif choice.way == "two_level":
        flat = two_level.all_to_all(start, message, group).finish
        pending = PendingParts(message, receive, receive, message.dtype, group, message, finish=flat)
    else:
        pending = exchange(message, [part.numel() for part in parts], receive, group)

    def finish() -> Tensor:
        if is_leading(whole, concat_dim):
            return pending.flat().view(whole)
        arrived = zip(pending.parts(), shapes, strict=True)
        return torch.cat([part.view(shape) for part, shape in arrived], concat_dim)

    return Handle(finish)


def _is_even(rows: Sequence[Sequence[int]], concat_sizes: Sequence[int], same: bool) -> bool:
    """True if all parts are of one size."""
    return len({size for row in rows for size in row}) == 1 and (same or len(set(concat_sizes)) == 1)


def _recipe(
    x: TensorMeta,
    split_dim: int,
    rows: Sequence[Sequence[int]],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: GroupHandle,
) -> Recipe | None:
    """Makes one stream for each receiver; arriving streams are copied into the result."""
    n, me, item = group.size, group.position, x.dtype.itemsize
    mine, same = rows[me], split_dim == concat_dim
    even = _is_even(rows, concat_sizes, same)
    if choose(group.request(x.nbytes, even, x.dtype)).backend != "shm":
        return None
    (sent,), packed = choose_sources([x])
    message = Message(n, me, COPY)
    for j in range(n):
        message.send(message.stream([Block(0, sent, split_dim, sum(mine[:j]), mine[j])]))
    arriving = [row[me] for row in rows] if same else list(concat_sizes)
    out = dense_meta(resize_dim(resize_dim(x.shape, split_dim, mine[me]), concat_dim, sum(arriving)), x.dtype)
    longest = 0
    for i in range(n):
        theirs = x.shape if same else resize_dim(x.shape, concat_dim, concat_sizes[i])
        row = math.prod(resize_dim(theirs, split_dim, 1)) * item
        longest = max(longest, *(align(row * size) for size in rows[i]))
        block = Block(1, out, concat_dim, sum(arriving[:i]), arriving[i])
        message.receive(message.stream([block]))
    return Recipe(message.encode(out.nbytes, longest), (out,), packed)
