"""all_gather: every member gets the concatenation of all members' tensors along one dim.

x    [..., sizes[i], ...]      member i's tensor; sizes may differ and may be 0
out  [..., sum(sizes), ...]    the same on all members, contiguous
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives.transport import cuda_wire
from shardlib.ops.collectives.transport.flat_messages import by_dtype, leads, pack, resized, settled
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.pick import NCCL, pick
from shardlib.ops.collectives.transport.shm_channel import Recipe
from shardlib.ops.collectives.transport.shm_streams import COPY, Block, Like, Message, dense, likes, prefix, sources, up
from shardlib.ops.collectives.transport.torch_wire import Flight, Handle, gather

# Measured on Gloo over the loop-back device, 2 and 4 processes: see `choose`.
_GLOO_EXCHANGE_BYTES = 1 << 20
SHARED_BYTES = 1 << 19  # of results, from which on one for all members is the faster way


def reference(shards: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """All members at once; they share one result."""
    _check(shards, dim, sizes)
    out = shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)
    return [out] * len(shards)


def choose(nbytes: int, even: bool, dtype: torch.dtype, kind: str, transport: str, n: int, why: str = "") -> Choice:
    """How `nbytes` of result are gathered; see `pick` for the transport and for `why`.

    Example:
        >>> print(choose(1 << 22, True, torch.float32, "", "gloo", 4))
        torch/native: a large, even gather: the ring copies less (no shared memory: the members speak over gloo)
        >>> print(choose(1 << 22, True, torch.float32, "", "shm", 4))
        shm: each member's part is copied to its place
    """
    shm = Choice("shm", "", "each member's part is copied to its place")
    cuda = cuda_wire.serve("all_gather", nbytes, even, dtype, kind, n)
    return pick("all_gather", transport, why, shm, _over_torch(nbytes, even, transport), cuda)


def _over_torch(nbytes: int, even: bool, transport: str) -> Choice:
    if transport not in NCCL:
        if not even:
            return Choice("torch", "exchange", "sizes differ: sent pairwise, nothing is padded")
        if nbytes <= _GLOO_EXCHANGE_BYTES:
            return Choice("torch", "exchange", "a small message: one round of latency instead of a ring of them")
        return Choice("torch", "native", "a large, even gather: the ring copies less")
    if even:
        return Choice("torch", "native", "sizes are equal")
    return Choice("torch", "padded", "sizes differ, and the backend gathers equal ones only")


def start(x: Tensor, dim: int, sizes: Sequence[int], group: GroupHandle, shared: bool = False) -> Handle[Tensor]:
    """Begin to gather `x` along `dim`; `sizes[i]` is member i's size of that dim.

    With `shared` nobody ever writes over the result: members that share memory may then all read the same.
    """
    many = start_many([x], [dim], [sizes], group, shared).finish
    return Handle(lambda: many()[0])


def start_many(
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    group: GroupHandle,
    shared: bool = False,
) -> Handle[list[Tensor]]:
    """Begin to gather several tensors in one message (one for every dtype among them); `shared` as in `start`."""
    if group.size == 1:
        return Handle(lambda: list(xs))
    if group.shm is not None:
        xs = settled(xs)
        key = ("all_gather", shared, likes(xs), tuple(dims), tuple(map(tuple, sizes)))
        if flying := group.shm.start(key, lambda: _recipe(list(map(Like.of, xs)), dims, sizes, group, shared), xs):
            return Handle(flying.finish)
    parts: list[tuple[list[int], list[list[int]], Flight | None]] = []
    for which in by_dtype(xs):
        some = [xs[i] for i in which]
        rows = [math.prod(resized(xs[i].shape, dims[i], 1)) for i in which]
        # numels[i][j]: the elements of the j-th tensor on member i
        numels = [[row * sizes[i][m] for row, i in zip(rows, which, strict=True)] for m in range(group.size)]
        counts = [sum(of_member) for of_member in numels]
        total = sum(counts)
        if total == 0:
            parts.append((which, numels, None))
            continue
        message = some[0].contiguous().view(-1) if len(some) == 1 else pack(some)
        even = len(set(counts)) == 1
        choice = choose(total * message.itemsize, even, message.dtype, "", group.transport, group.size, group.why)
        if choice.backend == "cuda":
            flight = cuda_wire.gather(message, counts, group)
        else:
            flight = gather(message, counts, group, choice.way)
        parts.append((which, numels, flight))

    def land() -> list[Tensor]:
        out = list(xs)
        for which, numels, flight in parts:
            for i, whole in zip(which, _unpack(which, xs, dims, sizes, numels, flight), strict=True):
                out[i] = whole
        return out

    return Handle(land)


def _recipe(
    xs: Sequence[Like], dims: Sequence[int], sizes: Sequence[Sequence[int]], group: GroupHandle, shared: bool
) -> Recipe | None:
    """Each member's tensors are one stream; what arrives is copied to its place in the results.

    Large results that are `shared` are one for all: each member copies its stream to its places there.
    """
    outs = [dense(resized(x.shape, dim, sum(of)), x.dtype) for x, dim, of in zip(xs, dims, sizes, strict=True)]
    nbytes, n = sum(out.nbytes for out in outs), group.size
    even = all(len(set(of)) == 1 for of in sizes)
    if choose(nbytes, even, xs[0].dtype, "", group.transport, n, group.why).backend != "shm":
        return None
    sent, packed = sources(xs)
    message = Message(n, group.position, COPY)
    message.send(message.stream(Block(j, x) for j, x in enumerate(sent)))
    for i in range(n):
        where = zip(outs, dims, sizes, strict=True)
        blocks = (Block(len(xs) + j, out, d, prefix(of, i), of[i]) for j, (out, d, of) in enumerate(where))
        message.receive(message.stream(blocks))
    if not shared or nbytes < SHARED_BYTES:
        return Recipe(message.words(nbytes), tuple(outs), packed)
    ends = list(itertools.accumulate(up(out.nbytes) for out in outs))
    places = (0, *ends[:-1])
    return Recipe(message.words(ends[-1], places=places), tuple(outs), packed, places)


def _unpack(
    which: Sequence[int],
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    numels: Sequence[Sequence[int]],
    flight: Flight | None,
) -> list[Tensor]:
    shapes = [resized(xs[i].shape, dims[i], sum(sizes[i])) for i in which]
    if flight is None:
        return [xs[i].new_empty(shape) for i, shape in zip(which, shapes, strict=True)]
    if len(which) == 1 and leads(shapes[0], dims[which[0]]):
        return [flight.flat().view(shapes[0])]
    pieces = [piece.split_with_sizes(of_member) for piece, of_member in zip(flight.pieces(), numels, strict=True)]
    return [
        torch.cat(
            [piece[j].view(resized(shape, dims[i], size)) for piece, size in zip(pieces, sizes[i], strict=True)],
            dims[i],
        )
        for j, (i, shape) in enumerate(zip(which, shapes, strict=True))
    ]


def _check(shards: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> None:
    found = [shard.shape[dim] for shard in shards]
    if found != list(sizes):
        raise ValueError(f"all_gather of sizes {list(sizes)} along dim {dim} was given sizes {found}")
