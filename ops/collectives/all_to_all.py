"""all_to_all: the shard moves from one dim to another.

    x    [.., sum(split_sizes), .., concat_sizes[i], ..]    member i's tensor: whole along split_dim
    out  [.., split_sizes[i], .., sum(concat_sizes), ..]    whole along concat_dim instead, contiguous

With `split_dim == concat_dim` every member sends pieces of one dim and concatenates what it gets along the same dim.
Then members may send different sizes: `split_sizes` is a table, whose row i is what member i sends to each, and
`concat_sizes` say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives.transport import cuda_wire
from shardlib.ops.collectives.transport.flat_messages import leads, pack, resized, settled
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.pick import pick
from shardlib.ops.collectives.transport.shm_channel import Recipe
from shardlib.ops.collectives.transport.shm_streams import COPY, Block, Like, Message, dense, likes, prefix, sources, up
from shardlib.ops.collectives.transport.torch_wire import Handle, exchange

Split = Sequence[int] | Sequence[Sequence[int]]


def _rows(sizes: Split, n: int) -> tuple[tuple[int, ...], ...]:
    """What each of `n` members sends to each."""
    alike = tuple(size for size in sizes if isinstance(size, int))
    return (alike,) * n if alike else tuple(tuple(row) for row in sizes if not isinstance(row, int))


def reference(
    shards: Sequence[Tensor],
    split_dim: int,
    split_sizes: Split,
    concat_dim: int,
    concat_sizes: Sequence[int],
) -> list[Tensor]:
    """All members at once."""
    if len(shards) == 1:
        return list(shards)
    rows = zip(shards, _rows(split_sizes, len(shards)), strict=True)
    pieces = zip(*(shard.split_with_sizes(row, split_dim) for shard, row in rows), strict=True)
    return [torch.cat(of_member, concat_dim) for of_member in pieces]


def choose(nbytes: int, even: bool, dtype: torch.dtype, kind: str, transport: str, n: int, why: str = "") -> Choice:
    """How `nbytes` of tensor change their shards; see `pick` for the transport and for `why`.

    Example:
        >>> print(choose(1 << 22, True, torch.float32, "", "shm", 4))
        shm: each member reads its pieces to their places
    """
    shm = Choice("shm", "", "each member reads its pieces to their places")
    cuda = cuda_wire.serve("all_to_all", nbytes, even, dtype, kind, n)
    return pick("all_to_all", transport, why, shm, Choice("torch", "exchange", "pieces are sent pairwise"), cuda)


def start(
    x: Tensor,
    split_dim: int,
    split_sizes: Split,
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: GroupHandle,
) -> Handle[Tensor]:
    """Begin to send member j the j-th piece of `x` along `split_dim`; arrivals are concatenated along `concat_dim`."""
    if group.size == 1:
        return Handle(lambda: x)
    rows, me = _rows(split_sizes, group.size), group.position
    if group.shm is not None:
        (x,) = settled([x])
        split, concat = rows, tuple(concat_sizes)
        key = ("all_to_all", likes([x]), split_dim, split, concat_dim, concat)
        if flying := group.shm.start(
            key, lambda: _recipe(Like.of(x), split_dim, split, concat_dim, concat, group), [x]
        ):
            return Handle(flying.first)
    row = resized(x.shape, split_dim, rows[me][me])
    same = split_dim == concat_dim
    arriving = [theirs[me] for theirs in rows] if same else concat_sizes
    shapes = [resized(row, concat_dim, size) for size in arriving]
    receive = [math.prod(shape) for shape in shapes]
    whole = resized(row, concat_dim, sum(arriving))
    pieces = x.split_with_sizes(rows[me], split_dim)
    message = x.contiguous().view(-1) if leads(x.shape, split_dim) else pack(pieces)
    even = _even(rows, concat_sizes, same)
    if choose(x.nbytes, even, x.dtype, "", group.transport, group.size, group.why).backend == "cuda":
        # All members know the sizes of all pieces: another's tensor differs from this one along concat_dim only, and
        # where that is split_dim, too, it does not.
        theirs = [x.shape] * len(rows) if same else [resized(x.shape, concat_dim, size) for size in concat_sizes]
        counts = [
            [math.prod(resized(shape, split_dim, size)) for size in sizes]
            for shape, sizes in zip(theirs, rows, strict=True)
        ]
        flight = cuda_wire.exchange(message, counts, group)
    else:
        flight = exchange(message, [piece.numel() for piece in pieces], receive, group)

    def land() -> Tensor:
        if leads(whole, concat_dim):
            return flight.flat().view(whole)
        arrived = zip(flight.pieces(), shapes, strict=True)
        return torch.cat([piece.view(shape) for piece, shape in arrived], concat_dim)

    return Handle(land)


def _even(rows: Sequence[Sequence[int]], concat_sizes: Sequence[int], same: bool) -> bool:
    """Whether all pieces are of one size."""
    return len({size for row in rows for size in row}) == 1 and (same or len(set(concat_sizes)) == 1)


def _recipe(
    x: Like,
    split_dim: int,
    rows: Sequence[Sequence[int]],
    concat_dim: int,
    concat_sizes: Sequence[int],
    group: GroupHandle,
) -> Recipe | None:
    """What goes to one member is one stream; what arrives is copied to its place in the result."""
    n, me, item = group.size, group.position, x.dtype.itemsize
    mine, same = rows[me], split_dim == concat_dim
    even = _even(rows, concat_sizes, same)
    if choose(x.nbytes, even, x.dtype, "", group.transport, n, group.why).backend != "shm":
        return None
    (sent,), packed = sources([x])
    message = Message(n, me, COPY)
    for j in range(n):
        message.send(message.stream([Block(0, sent, split_dim, prefix(mine, j), mine[j])]))
    arriving = [row[me] for row in rows] if same else list(concat_sizes)
    out = dense(resized(resized(x.shape, split_dim, mine[me]), concat_dim, sum(arriving)), x.dtype)
    longest = 0
    for i in range(n):
        theirs = x.shape if same else resized(x.shape, concat_dim, concat_sizes[i])
        row = math.prod(resized(theirs, split_dim, 1)) * item
        longest = max(longest, *(up(row * size) for size in rows[i]))
        block = Block(1, out, concat_dim, prefix(arriving, i), arriving[i])
        message.receive(message.stream([block]))
    return Recipe(message.words(out.nbytes, longest), (out,), packed)
