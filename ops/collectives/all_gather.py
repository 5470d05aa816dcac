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
from shardlib.ops.collectives import two_level
from shardlib.ops.collectives.transport import cuda_wire
from shardlib.ops.collectives.transport.flat_messages import group_by_dtype, is_leading, pack, resize_dim, resolve_views
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.pick import pick
from shardlib.ops.collectives.transport.request import NCCL, CollectiveRequest
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
from shardlib.ops.collectives.transport.torch_wire import Handle, PendingParts, first_result, gather

# Measured on Gloo over the loop-back device, 2 and 4 processes: see `choose`.
_GLOO_EXCHANGE_BYTES = 1 << 20
SHARED_BYTES = 1 << 19  # from this size on, one result that all members share is faster


def reference(shards: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Computes the results of all members, which share one tensor."""
    actual = [shard.shape[dim] for shard in shards]
    if actual != list(sizes):
        raise ValueError(f"all_gather along dim {dim}: sizes are {list(sizes)}, but the tensors have {actual}")
    out = shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)
    return [out] * len(shards)


def choose(request: CollectiveRequest) -> Choice:
    """Chooses the way to gather a result."""
    shm = Choice("shm", "", "each member's part is copied to its place")
    return pick("all_gather", request, shm, _over_torch(request))


def _over_torch(request: CollectiveRequest) -> Choice:
    if request.transport not in NCCL:
        if not request.even:
            return Choice("torch", "exchange", "sizes differ: sent pairwise, nothing is padded")
        if request.nbytes <= _GLOO_EXCHANGE_BYTES:
            return Choice("torch", "exchange", "a small message: one round of latency instead of a ring of them")
        return Choice("torch", "native", "a large, even gather: the ring copies less")
    if request.even:
        return Choice("torch", "native", "sizes are equal")
    return Choice("torch", "padded", "sizes differ, and the backend gathers equal ones only")


def start(x: Tensor, dim: int, sizes: Sequence[int], group: GroupHandle, shared: bool = False) -> Handle[Tensor]:
    """Begin to gather `x` along `dim`; `sizes[i]` is member i's size of that dim.

    `shared` promises that the result is never overwritten: members that share memory may then share one result.
    """
    return first_result(start_many([x], [dim], [sizes], group, shared))


def start_many(
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    group: GroupHandle,
    shared: bool = False,
) -> Handle[list[Tensor]]:
    """Begin to gather several tensors in one message per dtype; `shared` as in `start`."""
    if group.size == 1:
        return Handle(lambda: list(xs))
    if group.shm is not None:
        xs = resolve_views(xs)
        key = ("all_gather", shared, metas_key(xs), tuple(dims), tuple(map(tuple, sizes)))
        if transfer := group.shm.start(
            key, lambda: _recipe(list(map(TensorMeta.from_tensor, xs)), dims, sizes, group, shared), xs
        ):
            return Handle(transfer.finish)
    messages: list[tuple[list[int], list[list[int]], PendingParts | None]] = []
    for positions in group_by_dtype(xs):
        batch = [xs[i] for i in positions]
        rows = [math.prod(resize_dim(xs[i].shape, dims[i], 1)) for i in positions]
        # numels[m][j]: the elements of the batch's j-th tensor on member m
        numels = [[row * sizes[i][m] for row, i in zip(rows, positions, strict=True)] for m in range(group.size)]
        counts = [sum(member_numels) for member_numels in numels]
        total = sum(counts)
        if total == 0:
            messages.append((positions, numels, None))
            continue
        message = batch[0].contiguous().view(-1) if len(batch) == 1 else pack(batch)
        even = len(set(counts)) == 1
        choice = choose(group.request(total * message.itemsize, even, message.dtype))
        if choice.backend == "cuda":
            pending = cuda_wire.gather(message, counts, group)
        elif choice.way == "two_level":
            flat = two_level.all_gather(start, message, group, shared).finish
            pending = PendingParts(message, counts, counts, message.dtype, group, message, finish=flat)
        else:
            pending = gather(message, counts, group, choice.way)
        messages.append((positions, numels, pending))

    def finish() -> list[Tensor]:
        out = list(xs)
        for positions, numels, pending in messages:
            for i, whole in zip(positions, _unpack(positions, xs, dims, sizes, numels, pending), strict=True):
                out[i] = whole
        return out

    return Handle(finish)


def _recipe(
    xs: Sequence[TensorMeta], dims: Sequence[int], sizes: Sequence[Sequence[int]], group: GroupHandle, shared: bool
) -> Recipe | None:
    """Makes one stream of each member's tensors, and blocks of the results that receive the streams.

    All members share one copy of large results that are `shared`: each member writes its own stream to it.
    """
    shapes = [resize_dim(x.shape, dim, sum(dim_sizes)) for x, dim, dim_sizes in zip(xs, dims, sizes, strict=True)]
    outs = [dense_meta(shape, x.dtype) for x, shape in zip(xs, shapes, strict=True)]
    nbytes, n = sum(out.nbytes for out in outs), group.size
    even = all(len(set(dim_sizes)) == 1 for dim_sizes in sizes)
    if choose(group.request(nbytes, even, xs[0].dtype)).backend != "shm":
        return None
    sent, packed = choose_sources(xs)
    message = Message(n, group.position, COPY)
    message.send(message.stream(Block(j, x) for j, x in enumerate(sent)))
    for i in range(n):
        blocks = (
            Block(len(xs) + j, out, dim, sum(dim_sizes[:i]), dim_sizes[i])
            for j, (out, dim, dim_sizes) in enumerate(zip(outs, dims, sizes, strict=True))
        )
        message.receive(message.stream(blocks))
    if not shared or nbytes < SHARED_BYTES:
        return Recipe(message.encode(nbytes), tuple(outs), packed)
    ends = list(itertools.accumulate(align(out.nbytes) for out in outs))
    places = (0, *ends[:-1])
    return Recipe(message.encode(ends[-1], places=places), tuple(outs), packed, places)


def _unpack(
    positions: Sequence[int],
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    numels: Sequence[Sequence[int]],
    pending: PendingParts | None,
) -> list[Tensor]:
    shapes = [resize_dim(xs[i].shape, dims[i], sum(sizes[i])) for i in positions]
    if pending is None:
        return [xs[i].new_empty(shape) for i, shape in zip(positions, shapes, strict=True)]
    if len(positions) == 1 and is_leading(shapes[0], dims[positions[0]]):
        return [pending.flat().view(shapes[0])]
    # parts[m][j]: member m's part of the j-th tensor
    parts = [part.split_with_sizes(counts) for part, counts in zip(pending.parts(), numels, strict=True)]
    return [
        torch.cat(
            [part[j].view(resize_dim(shape, dims[i], size)) for part, size in zip(parts, sizes[i], strict=True)],
            dims[i],
        )
        for j, (i, shape) in enumerate(zip(positions, shapes, strict=True))
    ]
