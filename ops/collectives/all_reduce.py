"""all_reduce: every member gets the sum, maximum or minimum of all members' tensors.

x    [...]    a different addend on every member
out  [...]    the same on all members, contiguous
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardlib.core.torch_internals.torch_private import c10d_functional
from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives import all_gather, reduce_scatter, two_level
from shardlib.ops.collectives.transport import cuda_wire
from shardlib.ops.collectives.transport.flat_messages import (
    combine,
    group_by_dtype,
    pack,
    resolve_views,
    split_evenly,
)
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.pick import pick
from shardlib.ops.collectives.transport.request import NCCL, CollectiveRequest
from shardlib.ops.collectives.transport.shm_channel import Recipe
from shardlib.ops.collectives.transport.shm_streams import (
    LINE,
    REDUCE,
    REDUCE_GATHER,
    Block,
    Message,
    TensorMeta,
    align,
    choose_sources,
    dense_meta,
    find_reduce_fault,
    metas_key,
)
from shardlib.ops.collectives.transport.torch_wire import (
    Handle,
    exchange,
    find_native_fault,
    first_result,
    gather,
    wait,
)

# Measured on Gloo over the loop-back device, 2 and 4 processes: an exchange wins while a member sends less than 1 MB
# (1.3 to 2 times faster than the ring), two rounds of one up to 4 MB (1.1 to 1.3 times), the ring above.
_EXCHANGE_BYTES = 1 << 20
_SCATTER_GATHER_BYTES = 1 << 22
_ONE_STEP_BYTES = 1 << 15  # in shared memory, every member adds up all of a message of this size


def reference(shards: Sequence[Tensor], kind: str = "sum") -> list[Tensor]:
    """Computes the results of all members, which share one tensor."""
    out = shards[0] if len(shards) == 1 else combine(shards, kind).contiguous()
    return [out] * len(shards)


def choose(request: CollectiveRequest) -> Choice:
    """Chooses the way to reduce a tensor."""
    if request.nbytes <= _ONE_STEP_BYTES:
        step = Choice("shm", "one_step", "a small message: each member adds up all of it")
    else:
        step = Choice("shm", "two_steps", "each member adds up a part, then reads the others'")
    shm = find_reduce_fault(request.dtype, request.kind) or step
    return pick("all_reduce", request, shm, _over_torch(request))


def _over_torch(request: CollectiveRequest) -> Choice:
    nbytes, n = request.nbytes, request.members
    backend = "nccl" if request.transport in NCCL else "gloo"
    if backend == "gloo" and n == 2:
        return Choice("torch", "exchange", "two members: each sends the other its own, and adds")
    fault = find_native_fault(request.dtype, request.kind, backend)
    small = nbytes * (n - 1) <= _EXCHANGE_BYTES
    if fault:
        return Choice("torch", "exchange" if small else "scatter_gather", fault)
    if backend != "gloo":
        return Choice("torch", "native", "the backend reduces this dtype")
    if small:
        return Choice("torch", "exchange", "a small message: one round of latency instead of 2 (n - 1)")
    if nbytes <= _SCATTER_GATHER_BYTES:
        return Choice("torch", "scatter_gather", "a middling message: two rounds of latency instead of 2 (n - 1)")
    return Choice("torch", "native", "a large message: the ring copies least")


def start(x: Tensor, group: GroupHandle, kind: str = "sum") -> Handle[Tensor]:
    """Begin to reduce `x`, of one shape on all members, over the group."""
    if group.size == 1:
        return Handle(lambda: x)
    if group.shm is not None:
        return first_result(start_many([x], group, kind))
    flat = _start_flat(x.contiguous().view(-1), group, kind, fresh=False).finish
    return Handle(lambda: flat().view(x.shape))


def start_many(xs: Sequence[Tensor], group: GroupHandle, kind: str = "sum") -> Handle[list[Tensor]]:
    """Begin to reduce several tensors in one message per dtype."""
    if group.size == 1:
        return Handle(lambda: list(xs))
    if group.shm is not None:
        xs = resolve_views(xs)
        key = ("all_reduce", kind, metas_key(xs))
        if transfer := group.shm.start(key, lambda: _recipe(list(map(TensorMeta.from_tensor, xs)), group, kind), xs):
            return Handle(transfer.finish)
    messages = [
        (positions, _start_flat(pack([xs[i] for i in positions]), group, kind, fresh=True))
        for positions in group_by_dtype(xs)
    ]

    def finish() -> list[Tensor]:
        out = list(xs)
        for positions, pending in messages:
            flats = pending.finish().split_with_sizes([xs[i].numel() for i in positions])
            for i, flat in zip(positions, flats, strict=True):
                out[i] = flat.view(xs[i].shape)
        return out

    return Handle(finish)


def _recipe(xs: Sequence[TensorMeta], group: GroupHandle, kind: str) -> Recipe | None:
    """Makes one stream of all tensors. A member reduces all of it, or one n-th of it, which the others then read."""
    n, me = group.size, group.position
    nbytes = sum(x.nbytes for x in xs)
    choices = [choose(group.request(nbytes, True, x.dtype, kind)) for x in xs]
    if any(choice.backend != "shm" for choice in choices):
        return None
    sent, packed = choose_sources(xs)
    outs = [dense_meta(x.shape, x.dtype) for x in xs]
    message = Message(n, me, REDUCE if choices[0].way == "one_step" else REDUCE_GATHER, kind)
    source = message.stream(Block(j, x) for j, x in enumerate(sent))
    result = message.stream(Block(len(xs) + j, out) for j, out in enumerate(outs))
    if message.how == REDUCE:
        message.send(source)
        message.receive(result)
    else:
        total = message.lengths[source]
        slice_ = align(-(-total // n))
        for begin in range(0, n * slice_, max(slice_, LINE)):
            length = max(0, min(slice_, total - begin))
            message.send(source, begin, length)
            message.receive(result, begin, length)
    return Recipe(message.encode(nbytes), tuple(outs), packed)


def _start_flat(message: Tensor, group: GroupHandle, kind: str, *, fresh: bool) -> Handle[Tensor]:
    """Begin to reduce a flat message; a `fresh` one may be overwritten."""
    n, count = group.size, len(message)
    if count == 0:
        return Handle(lambda: message)
    choice = choose(group.request(message.nbytes, True, message.dtype, kind))
    if choice.backend == "cuda":
        return cuda_wire.reduce(message, group)
    if choice.way == "two_level":
        return two_level.all_reduce(reduce_scatter.start, all_gather.start, message, group, kind)
    if choice.way == "native":
        buffer = (c10d_functional.all_reduce_ if fresh else c10d_functional.all_reduce)(message, kind, group.name)
        return Handle(lambda: (message, wait(buffer))[1])
    if choice.way == "exchange":
        pending = gather(message, [count] * n, group, "exchange", own=False)
        return Handle(lambda: combine(pending.parts(), kind))
    # Each member reduces one n-th, then all gather. The gather starts in `finish`.
    counts = split_evenly(count, n)
    scattered = exchange(message, counts, [counts[group.position]] * n, group)

    def finish() -> Tensor:
        mine = combine(scattered.parts(), kind)
        return gather(mine, counts, group, "exchange" if group.backend == "gloo" else "padded").flat()

    return Handle(finish)
