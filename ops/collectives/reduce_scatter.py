"""reduce_scatter: the members' tensors are reduced, and each member keeps its rows of one dim.

x    [..., sum(sizes), ...]    a different addend on every member
out  [..., sizes[i], ...]      member i's rows [sum(sizes[:i]), +sizes[i]) of the reduction, contiguous
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.core.torch_private import c10d_functional
from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives.all_reduce import natively
from shardlib.ops.collectives.transport import cuda_wire
from shardlib.ops.collectives.transport.flat_messages import by_dtype, combine, leads, pack, resized, settled
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.pick import NCCL, pick
from shardlib.ops.collectives.transport.shm_channel import Recipe
from shardlib.ops.collectives.transport.shm_streams import (
    REDUCE,
    Block,
    Like,
    Message,
    dense,
    irreducible,
    likes,
    prefix,
    sources,
)
from shardlib.ops.collectives.transport.torch_wire import Handle, exchange, wait


def reference(shards: Sequence[Tensor], dim: int, sizes: Sequence[int], kind: str = "sum") -> list[Tensor]:
    """All members at once."""
    if len(shards) == 1:
        return list(shards)
    rows = zip(*(shard.split_with_sizes(sizes, dim) for shard in shards), strict=True)
    return [combine(parts, kind).contiguous() for parts in rows]


def choose(nbytes: int, even: bool, dtype: torch.dtype, kind: str, transport: str, n: int, why: str = "") -> Choice:
    """How `nbytes` are reduced and scattered; see `pick` for the transport and for `why`.

    Example:
        >>> print(choose(1 << 22, True, torch.float64, "sum", "nccl", 4))
        torch/native: sizes are equal
        >>> print(choose(1 << 22, True, torch.float32, "sum", "shm", 4))
        shm: each member adds up its own rows straight from the others' memory
    """
    shm = irreducible(dtype, kind) or Choice(
        "shm", "", "each member adds up its own rows straight from the others' memory"
    )
    cuda = cuda_wire.serve("reduce_scatter", nbytes, even, dtype, kind, n)
    return pick("reduce_scatter", transport, why, shm, _over_torch(even, dtype, kind, transport), cuda)


def _over_torch(even: bool, dtype: torch.dtype, kind: str, transport: str) -> Choice:
    if transport not in NCCL:
        reason = "Gloo reduce-scatters by a whole all-reduce, 2 to 6 times slower than pieces added where they belong"
        return Choice("torch", "exchange", reason)
    fault = natively(dtype, kind, "nccl")
    if fault:
        return Choice("torch", "exchange", fault)
    if not even:
        return Choice("torch", "exchange", "sizes differ: pieces are sent as they are, nothing is padded")
    return Choice("torch", "native", "sizes are equal")


def start(x: Tensor, dim: int, sizes: Sequence[int], group: GroupHandle, kind: str = "sum") -> Handle[Tensor]:
    """Begin to reduce `x` over the group and to scatter rows of `dim`, `sizes[i]` to member i."""
    many = start_many([x], [dim], [sizes], group, kind).finish
    return Handle(lambda: many()[0])


def start_many(
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    group: GroupHandle,
    kind: str = "sum",
) -> Handle[list[Tensor]]:
    """Begin to reduce and scatter several tensors in one message (one for every dtype among them)."""
    if group.size == 1:
        return Handle(lambda: list(xs))
    if group.shm is not None:
        xs = settled(xs)
        key = ("reduce_scatter", kind, likes(xs), tuple(dims), tuple(map(tuple, sizes)))
        if flying := group.shm.start(key, lambda: _recipe(list(map(Like.of, xs)), dims, sizes, group, kind), xs):
            return Handle(flying.finish)
    parts = [(which, _one_dtype([xs[i] for i in which], which, dims, sizes, group, kind)) for which in by_dtype(xs)]
    shapes = [resized(x.shape, dim, of[group.position]) for x, dim, of in zip(xs, dims, sizes, strict=True)]

    def land() -> list[Tensor]:
        out = list(xs)
        for which, mine in parts:
            flats = mine.finish().split_with_sizes([torch.Size(shapes[i]).numel() for i in which])
            for i, flat in zip(which, flats, strict=True):
                out[i] = flat.view(shapes[i])
        return out

    return Handle(land)


def _recipe(
    xs: Sequence[Like], dims: Sequence[int], sizes: Sequence[Sequence[int]], group: GroupHandle, kind: str
) -> Recipe | None:
    """The rows of one member are one stream, which it reduces over all members."""
    n, me = group.size, group.position
    even = all(len(set(of)) == 1 for of in sizes)
    nbytes = sum(x.nbytes for x in xs)
    if any(choose(nbytes, even, x.dtype, kind, group.transport, n, group.why).backend != "shm" for x in xs):
        return None
    sent, packed = sources(xs)
    message = Message(n, me, REDUCE, kind)
    for i in range(n):
        where = zip(sent, dims, sizes, strict=True)
        message.send(message.stream(Block(j, x, d, prefix(of, i), of[i]) for j, (x, d, of) in enumerate(where)))
    outs = [dense(resized(x.shape, d, of[me]), x.dtype) for x, d, of in zip(xs, dims, sizes, strict=True)]
    message.receive(message.stream(Block(len(xs) + j, out) for j, out in enumerate(outs)))
    return Recipe(message.words(sum(out.nbytes for out in outs)), tuple(outs), packed)


def _one_dtype(
    some: Sequence[Tensor],
    which: Sequence[int],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    group: GroupHandle,
    kind: str,
) -> Handle[Tensor]:
    """This member's rows of all these tensors, flat, one tensor after the other."""
    n = group.size
    # pieces[m][j]: what goes to member m of the j-th tensor
    pieces = list(zip(*(x.split_with_sizes(sizes[i], dims[i]) for x, i in zip(some, which, strict=True)), strict=True))
    counts = [sum(piece.numel() for piece in of_member) for of_member in pieces]
    if sum(counts) == 0:
        empty = some[0].new_empty(0)
        return Handle(lambda: empty)
    if len(some) == 1 and leads(some[0].shape, dims[which[0]]):
        message = some[0].contiguous().view(-1)
    else:
        message = pack([piece for of_member in pieces for piece in of_member])
    even = len(set(counts)) == 1 and group.by_rank is None
    choice = choose(message.nbytes, even, message.dtype, kind, group.transport, n, group.why)
    if choice.backend == "cuda":
        return cuda_wire.scatter_sum(message, counts, group)
    if choice.way == "native":
        buffer = c10d_functional.reduce_scatter_tensor(message, kind, n, group.name)
        return Handle(lambda: (message, wait(buffer))[1])
    flight = exchange(message, counts, [counts[group.position]] * n, group)
    return Handle(lambda: combine(flight.pieces(), kind))
