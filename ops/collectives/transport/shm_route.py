"""Messages from one rank to another over shared memory.

A route is a channel of two members, of which the first sends and the second receives. Its rounds lie in a ring of the
sender's segment that no collective uses. A message is one value: the sender copies it into the ring, and the receiver
copies it out. If the ring is full, the message waits in the sender's own memory. The engine moves it on whenever the
sender begins a collective or a message, or waits for one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardlib.ops.collectives.transport.flat_messages import resolve_views
from shardlib.ops.collectives.transport.shm_channel import Channel, Recipe, Transfer
from shardlib.ops.collectives.transport.shm_streams import (
    COPY,
    ROUND,
    Block,
    Message,
    TensorMeta,
    align,
    choose_sources,
    dense_meta,
    metas_key,
)

if TYPE_CHECKING:
    from shardlib.ops.collectives.transport.shm_world import Session

RING = 4 << 20  # bytes that a sender keeps for one receiver
Pair = tuple[int, int]  # the rank that sends and the rank that receives
Shape = tuple[int, ...]
_SOURCE = 0  # the position of the rank that sends


class Route(Channel):
    """This rank's end of a route. `ring` is where the ring begins in the segment of the sender."""

    def __init__(self, session: Session, number: int, pair: Pair, first: int, ring: int) -> None:
        super().__init__(session, number, pair, first)
        self.library.shm_set_ring(self.engine().pointer, number, ring, RING if self.position == _SOURCE else 0)

    def send(self, x: Tensor) -> Transfer | None:
        """Sends `x`, which the caller may write to afterwards. Returns what is left to wait for if the ring is full."""
        if not x.numel():
            return None
        (x,) = resolve_views([x])
        nbytes = align(x.numel() * x.dtype.itemsize)
        rounds, longest = -(-nbytes // ROUND), min(nbytes, ROUND)
        has_room = self.library.shm_has_room(self.engine().pointer, self.number, nbytes, rounds, longest)
        if not has_room:
            x = x.clone(memory_format=torch.contiguous_format)
        transfer = self._begin(("send", metas_key([x])), TensorMeta.from_tensor(x), [x])
        if not has_room:
            return transfer
        transfer.finish()
        return None

    def receive(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Waits for the next value and returns it, contiguous. Raises `CollectiveError` like `Transfer.finish`."""
        transfer = self.expect(shape, dtype)
        return torch.empty(shape, dtype=dtype) if transfer is None else transfer.finish()[0]

    def expect(self, shape: Shape, dtype: torch.dtype) -> Transfer | None:
        """Begins to receive the next value; returns None if it has no bytes."""
        meta = dense_meta(shape, dtype)
        return self._begin(("send", shape, dtype), meta, []) if meta.nbytes else None

    def absence(self, rank: int) -> str:
        return f"no message comes from rank {rank}" if rank == self.ranks[_SOURCE] else f"rank {rank} takes no message"

    def _begin(self, key: tuple[object, ...], meta: TensorMeta, sources: list[Tensor]) -> Transfer:
        transfer = self.start(key, partial(self._recipe, meta), sources)
        assert transfer is not None, "a message has bytes, and never runs on torch"
        return transfer

    def _recipe(self, meta: TensorMeta) -> Recipe:
        message = Message(len(self.ranks), self.position, COPY)
        packed: frozenset[int] = frozenset()
        outs: tuple[TensorMeta, ...] = (meta,)
        if self.position == _SOURCE:
            (meta,), packed = choose_sources([meta])
            outs = ()
        value, nothing = message.stream([Block(0, meta)]), message.stream([])
        message.send(nothing if outs else value)
        message.receive(value if outs else nothing)
        message.receive(nothing)
        return Recipe(message.encode(sum(out.nbytes for out in outs)), outs, packed)
