"""ppermute: tensors move between members along given pairs.

x    [...]    one tensor a member
out  [...]    the tensor of the member that sends here; zeros of x's shape where none does; contiguous
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives.transport.flat_messages import resolve_views
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
from shardlib.ops.collectives.transport.torch_wire import Handle, exchange

Pairs = Sequence[tuple[int, int]]


def reference(shards: Sequence[Tensor], pairs: Pairs, shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """Computes the results of all members. A result is its sender's tensor itself, so `shapes` is not needed."""
    check(pairs, len(shards))
    source = {dst: src for src, dst in pairs}
    return [shards[source[i]] if i in source else torch.zeros_like(x) for i, x in enumerate(shards)]


def check(pairs: Pairs, n: int) -> None:
    """Refuse pairs that name no member, or one member twice as a sender or twice as a receiver."""
    faults = [f"pair {pair} names a member beyond {n - 1}" for pair in pairs if not all(0 <= i < n for i in pair)]
    for side, verb in enumerate(("sends", "receives")):
        counts = Counter(pair[side] for pair in pairs)
        faults += [f"member {i} {verb} {count} times" for i, count in counts.items() if count > 1]
    if faults:
        raise ShardingError(
            f"ppermute over {n} members along {list(pairs)}",
            faults,
            rule="a member sends to one member at most and receives from one at most",
        )


def choose(request: CollectiveRequest) -> Choice:
    """Chooses the way to send a tensor to another member."""
    shm = Choice("shm", "", "each member reads what is sent to it")
    return pick("ppermute", request, shm, Choice("torch", "exchange", "tensors are sent pairwise"))


def start(x: Tensor, pairs: Pairs, group: GroupHandle, shapes: Sequence[Sequence[int]] | None = None) -> Handle[Tensor]:
    """Begin to move `x` along `pairs` of (source, destination) positions.

    `shapes` holds every member's shape, where they differ.
    """
    n, me = group.size, group.position
    check(pairs, n)
    source = {dst: src for src, dst in pairs}.get(me)
    if source is None:
        shape = x.shape
    else:
        shape = torch.Size(x.shape if shapes is None else shapes[source])
    if n == 1:
        return Handle(lambda: torch.zeros_like(x) if source is None else x)
    if group.shm is not None:
        (x,) = resolve_views([x])
        all_shapes = tuple(map(tuple, shapes)) if shapes is not None else None
        key = ("ppermute", metas_key([x]), tuple(map(tuple, pairs)), all_shapes)
        if transfer := group.shm.start(key, lambda: _recipe(TensorMeta.from_tensor(x), pairs, all_shapes, group), [x]):
            return Handle(lambda: (transfer.finish() or [x.new_zeros(shape)])[0])
    send, receive = [0] * n, [0] * n
    for src, dst in pairs:
        if src == me:
            send[dst] = x.numel()
    if source is not None:
        receive[source] = math.prod(shape)
    message = x.contiguous().view(-1) if any(send) else x.new_empty(0)
    pending = exchange(message, send, receive, group)

    def finish() -> Tensor:
        arrived = pending.flat()
        return x.new_zeros(shape) if source is None else arrived.view(shape)

    return Handle(finish)


def _recipe(x: TensorMeta, pairs: Pairs, shapes: Sequence[Sequence[int]] | None, group: GroupHandle) -> Recipe | None:
    """Makes one stream of a sender's tensor; a member that is in no pair has empty streams."""
    n, me = group.size, group.position
    theirs = [dense_meta(x.shape if shapes is None else shapes[i], x.dtype) for i in range(n)]
    longest = max((align(theirs[source].nbytes) for source, _ in pairs), default=0)
    if choose(group.request(longest, shapes is None, x.dtype)).backend != "shm":
        return None
    (sent,), packed = choose_sources([x])
    source = {dst: src for src, dst in pairs}.get(me)
    outs = () if source is None else (theirs[source],)
    message = Message(n, me, COPY)
    message.send(message.stream([Block(0, sent)] if any(src == me for src, _ in pairs) else []))
    for i in range(n):
        message.receive(message.stream([Block(1, out) for out in outs if i == source]))
    return Recipe(message.encode(sum(out.nbytes for out in outs), longest), outs, packed)
