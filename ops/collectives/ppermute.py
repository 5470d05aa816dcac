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
from shardlib.ops.collectives.transport.flat_messages import settled
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.pick import pick
from shardlib.ops.collectives.transport.shm_channel import Recipe
from shardlib.ops.collectives.transport.shm_streams import COPY, Block, Like, Message, dense, likes, sources, up
from shardlib.ops.collectives.transport.torch_wire import Handle, exchange

Pairs = Sequence[tuple[int, int]]


def reference(shards: Sequence[Tensor], pairs: Pairs, shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """All members at once; a result is its sender's tensor itself, so `shapes` says nothing new."""
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


def choose(nbytes: int, even: bool, dtype: torch.dtype, kind: str, transport: str, n: int, why: str = "") -> Choice:
    """How `nbytes` move to another member; see `pick` for the transport and for `why`.

    Example:
        >>> print(choose(1 << 22, True, torch.float32, "", "shm", 4))
        shm: each member reads what is sent to it
    """
    shm = Choice("shm", "", "each member reads what is sent to it")
    other = Choice("torch", "exchange", "tensors are sent pairwise")
    return pick("ppermute", transport, why, shm, other, "they have no ppermute")


def start(x: Tensor, pairs: Pairs, group: GroupHandle, shapes: Sequence[Sequence[int]] | None = None) -> Handle[Tensor]:
    """Begin to move `x` along `pairs` of (source, destination) positions; `shapes` by member, where they differ."""
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
        (x,) = settled([x])
        every = tuple(map(tuple, shapes)) if shapes is not None else None
        key = ("ppermute", likes([x]), tuple(map(tuple, pairs)), every)
        if flying := group.shm.start(key, lambda: _recipe(Like.of(x), pairs, every, group), [x]):
            return Handle(lambda: (flying.finish() or [x.new_zeros(shape)])[0])
    send, receive = [0] * n, [0] * n
    for src, dst in pairs:
        if src == me:
            send[dst] = x.numel()
    if source is not None:
        receive[source] = math.prod(shape)
    message = x.contiguous().view(-1) if any(send) else x.new_empty(0)
    flight = exchange(message, send, receive, group)

    def land() -> Tensor:
        arrived = flight.flat()
        return x.new_zeros(shape) if source is None else arrived.view(shape)

    return Handle(land)


def _recipe(x: Like, pairs: Pairs, shapes: Sequence[Sequence[int]] | None, group: GroupHandle) -> Recipe | None:
    """A sender's tensor is one stream; all others send and receive nothing."""
    n, me = group.size, group.position
    theirs = [dense(x.shape if shapes is None else shapes[i], x.dtype) for i in range(n)]
    longest = max((up(theirs[source].nbytes) for source, _ in pairs), default=0)
    if choose(longest, shapes is None, x.dtype, "", group.transport, n, group.why).backend != "shm":
        return None
    (sent,), packed = sources([x])
    source = {dst: src for src, dst in pairs}.get(me)
    outs = () if source is None else (theirs[source],)
    message = Message(n, me, COPY)
    message.send(message.stream([Block(0, sent)] if any(src == me for src, _ in pairs) else []))
    for i in range(n):
        message.receive(message.stream([Block(1, out) for out in outs if i == source]))
    return Recipe(message.words(sum(out.nbytes for out in outs), longest), outs, packed)
