"""Tensors whose memory the members of a group on one machine read: collectives on them copy nothing first."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardlib.errors import ShardingError
from shardlib.ops._segment import PAGE, Address, Segment, SegmentError
from shardlib.ranks import world

if TYPE_CHECKING:
    from shardlib.ops._groups import GroupHandle


def symmetric_empty(shape: Sequence[int], dtype: torch.dtype, group: GroupHandle) -> Tensor:
    """An uninitialised tensor whose memory the other members of `group` read: a collective on it copies nothing first.

    All members call this together; shapes may differ. A collective on a view of it is served directly if the view is
    contiguous and is sent whole or along its first dim, otherwise like any tensor. The tensor may be written to again
    when the collective is finished. The memory stays until the process group ends. Where the group shares no memory, a
    plain tensor.
    """
    channel = group.shm
    if channel is None:
        return torch.empty(tuple(shape), dtype=dtype)
    session, nbytes = channel.session, math.prod(shape) * dtype.itemsize
    room = f"{session.room}/{channel.number}/{len(channel.shared)}"
    store, seconds = session.order.store(), world.timeout().total_seconds()
    size = PAGE + max(nbytes, 1)
    mine: Segment | None = None
    said = ""
    try:
        mine = Segment.make(size)
        said = mine.address.dumps()
    except SegmentError as error:
        said = f"!{error}"
    posted = store.exchange(room, said, channel.ranks, seconds, "share a tensor", session.order.watcher())
    if faults := [f"rank {rank}: {text[1:]}" for rank, text in posted.items() if text.startswith("!")]:
        if mine is not None:
            mine.close()
        raise ShardingError(
            f"no shared tensor of shape {tuple(shape)}, {dtype}",
            faults,
            rule="every member of the group shares a tensor of its own",
            remedy="free memory, or use a plain tensor",
        )
    assert mine is not None
    opened = {r: mine if r == session.rank else Segment.open(Address.loads(posted[r])) for r in channel.ranks}
    session.tensors += opened.values()
    pointers = (ctypes.c_void_p * channel.size)(*(opened[r].base + PAGE for r in channel.ranks))
    number = channel.library.shm_share(session.engine, channel.number, pointers)
    channel.shared.append((mine.base + PAGE, mine.base + PAGE + nbytes, number))
    return torch.frombuffer(mine.memory, dtype=dtype, count=math.prod(shape), offset=PAGE).view(tuple(shape))
