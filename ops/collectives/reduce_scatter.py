"""reduce_scatter: the members' tensors are reduced, and each member keeps its rows of one dim.

x    [..., sum(sizes), ...]    a different addend on every member
out  [..., sizes[i], ...]      member i's rows [sum(sizes[:i]), +sizes[i]) of the reduction, contiguous
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import c10d_functional
from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives import two_level
from shardlib.ops.collectives.transport import cuda_wire
from shardlib.ops.collectives.transport.flat_messages import (
    combine,
    group_by_dtype,
    is_leading,
    pack,
    resize_dim,
    resolve_views,
)
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.pick import pick
from shardlib.ops.collectives.transport.request import NCCL, CollectiveRequest
from shardlib.ops.collectives.transport.shm_channel import Recipe
from shardlib.ops.collectives.transport.shm_streams import (
    REDUCE,
    Block,
    Message,
    TensorMeta,
    choose_sources,
    dense_meta,
    find_reduce_fault,
    metas_key,
)
from shardlib.ops.collectives.transport.torch_wire import Handle, exchange, find_native_fault, first_result, wait


def reference(shards: Sequence[Tensor], dim: int, sizes: Sequence[int], kind: str = "sum") -> list[Tensor]:
    """Computes the results of all members."""
    if len(shards) == 1:
        return list(shards)
    rows = zip(*(shard.split_with_sizes(sizes, dim) for shard in shards), strict=True)
    return [combine(parts, kind).contiguous() for parts in rows]


def choose(request: CollectiveRequest) -> Choice:
    """Chooses the way to reduce and scatter a tensor."""
    shm = find_reduce_fault(request.dtype, request.kind) or Choice(
        "shm", "", "each member adds up its own rows straight from the others' memory"
    )
    return pick("reduce_scatter", request, shm, _over_torch(request))


def _over_torch(request: CollectiveRequest) -> Choice:
    if request.transport not in NCCL:
        reason = "Gloo reduce-scatters by a whole all-reduce, 2 to 6 times slower than pieces added where they belong"
        return Choice("torch", "exchange", reason)
    fault = find_native_fault(request.dtype, request.kind, "nccl")
    if fault:
        return Choice("torch", "exchange", fault)
    if not request.even:
        return Choice("torch", "exchange", "sizes differ: pieces are sent unpadded")
    return Choice("torch", "native", "sizes are equal")


def start(x: Tensor, dim: int, sizes: Sequence[int], group: GroupHandle, kind: str = "sum") -> Handle[Tensor]:
    """Begin to reduce `x` over the group and to scatter rows of `dim`, `sizes[i]` to member i."""
    return first_result(start_many([x], [dim], [sizes], group, kind))


def start_many(
    xs: Sequence[Tensor],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    group: GroupHandle,
    kind: str = "sum",
) -> Handle[list[Tensor]]:
    """Begin to reduce and scatter several tensors in one message per dtype."""
    if group.size == 1:
        return Handle(lambda: list(xs))
    if group.shm is not None:
        xs = resolve_views(xs)
        key = ("reduce_scatter", kind, metas_key(xs), tuple(dims), tuple(map(tuple, sizes)))
        metas = list(map(TensorMeta.from_tensor, xs))
        if transfer := group.shm.start(key, lambda: _recipe(metas, dims, sizes, group, kind), xs):
            return Handle(transfer.finish)
    messages = [
        (positions, _start_dtype([xs[i] for i in positions], positions, dims, sizes, group, kind))
        for positions in group_by_dtype(xs)
    ]
    me = group.position
    shapes = [resize_dim(x.shape, dim, dim_sizes[me]) for x, dim, dim_sizes in zip(xs, dims, sizes, strict=True)]

    def finish() -> list[Tensor]:
        out = list(xs)
        for positions, pending in messages:
            flats = pending.finish().split_with_sizes([torch.Size(shapes[i]).numel() for i in positions])
            for i, flat in zip(positions, flats, strict=True):
                out[i] = flat.view(shapes[i])
        return out

    return Handle(finish)


def _recipe(
    xs: Sequence[TensorMeta], dims: Sequence[int], sizes: Sequence[Sequence[int]], group: GroupHandle, kind: str
) -> Recipe | None:
    """Makes one stream of the rows of each member, which reduces its stream over all members."""
    n, me = group.size, group.position
    even = all(len(set(dim_sizes)) == 1 for dim_sizes in sizes)
    nbytes = sum(x.nbytes for x in xs)
    if any(choose(group.request(nbytes, even, x.dtype, kind)).backend != "shm" for x in xs):
        return None
    sent, packed = choose_sources(xs)
    message = Message(n, me, REDUCE, kind)
    for i in range(n):
        blocks = (
            Block(j, x, dim, sum(dim_sizes[:i]), dim_sizes[i])
            for j, (x, dim, dim_sizes) in enumerate(zip(sent, dims, sizes, strict=True))
        )
        message.send(message.stream(blocks))
    shapes = [resize_dim(x.shape, dim, dim_sizes[me]) for x, dim, dim_sizes in zip(xs, dims, sizes, strict=True)]
    outs = [dense_meta(shape, x.dtype) for x, shape in zip(xs, shapes, strict=True)]
    message.receive(message.stream(Block(len(xs) + j, out) for j, out in enumerate(outs)))
    return Recipe(message.encode(sum(out.nbytes for out in outs)), tuple(outs), packed)


def _start_dtype(
    batch: Sequence[Tensor],
    positions: Sequence[int],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int]],
    group: GroupHandle,
    kind: str,
) -> Handle[Tensor]:
    """Begin to reduce tensors of one dtype; the flat result holds this member's rows, one tensor after the other."""
    n = group.size
    splits = (x.split_with_sizes(sizes[i], dims[i]) for x, i in zip(batch, positions, strict=True))
    parts = list(zip(*splits, strict=True))  # parts[m][j]: member m's rows of the j-th tensor
    counts = [sum(part.numel() for part in member_parts) for member_parts in parts]
    if sum(counts) == 0:
        empty = batch[0].new_empty(0)
        return Handle(lambda: empty)
    if len(batch) == 1 and is_leading(batch[0].shape, dims[positions[0]]):
        message = batch[0].contiguous().view(-1)
    else:
        message = pack([part for member_parts in parts for part in member_parts])
    even = len(set(counts)) == 1 and (group.by_rank is None or group.span is not None)
    choice = choose(group.request(message.nbytes, even, message.dtype, kind))
    if choice.backend == "cuda":
        return cuda_wire.scatter_sum(message, counts, group)
    if choice.way == "two_level":
        return two_level.reduce_scatter(start, message, group, kind)
    if choice.way == "native":
        buffer = c10d_functional.reduce_scatter_tensor(message, kind, n, group.name)
        return Handle(lambda: (message, wait(buffer))[1])
    pending = exchange(message, counts, [counts[group.position]] * n, group)
    return Handle(lambda: combine(pending.parts(), kind))
