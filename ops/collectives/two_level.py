"""Collectives in two levels, for groups whose ranks are on several machines with as many ranks each.

A group of p = f k ranks is seen as a grid [f machines, k ranks on each], in the order of its members. Row and column of
a rank are groups of their own: `inner`, the ranks on its machine, and `outer`, the ranks with its number on all
machines. Each collective is a sequence of the same collective over rows and columns, which its module passes as
`start`. The later ones begin in `finish`.

Messages are flat: p shards of one size, in the order of members. Sums are added inside machines first. All replicas of
a result are copies of one tensor, so they have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardlib.ops.collectives.transport.flat_messages import sum_dtype
from shardlib.ops.collectives.transport.result_buffers import allocate
from shardlib.ops.collectives.transport.torch_wire import Handle

if TYPE_CHECKING:
    from shardlib.ops.collectives.transport.groups import GroupHandle
Start = Callable[..., Handle[Tensor]]

_PARTS, _PART_BYTES = 4, 1 << 17  # of a large shard, and the least bytes of one


def all_gather(start: Start, x: Tensor, group: GroupHandle, shared: bool = False) -> Handle[Tensor]:
    """Gathers a flat shard across machines, and the stripes inside; `shared` as in `all_gather.start`.

    A large shard travels in parts: while one is copied inside, the next one crosses.
    """
    inner, outer = _levels(group)
    parts = [x] if shared else _split(x)
    stripes = [start(part.view(1, 1, -1), 0, [1] * outer.size, outer) for part in parts]

    def finish() -> Tensor:
        sharing = shared or len(parts) > 1  # parts are copied to the result
        blocks = [start(stripe.finish(), 1, [1] * inner.size, inner, sharing) for stripe in stripes]
        if len(parts) == 1:
            return blocks[0].finish().view(-1)
        out = allocate((outer.size, inner.size, len(x)), x.dtype)
        for target, block in zip(out.split_with_sizes([len(part) for part in parts], -1), blocks, strict=True):
            target.copy_(block.finish())
        return out.view(-1)

    return Handle(finish)


def reduce_scatter(start: Start, x: Tensor, group: GroupHandle, kind: str) -> Handle[Tensor]:
    """Reduces the shards of a flat message inside machines, and these sums across.

    Large shards are reduced in parts: while the sums of one cross, the next one is reduced inside.
    """
    inner, outer = _levels(group)
    grid = x.to(sum_dtype(x.dtype, kind)).view(outer.size, inner.size, -1)
    columns = [start(part, 1, [1] * inner.size, inner, kind) for part in _split(grid)]

    def finish() -> Tensor:
        rows = [start(column.finish(), 0, [1] * outer.size, outer, kind) for column in columns]
        return torch.cat([row.finish().view(-1) for row in rows]).to(x.dtype)

    return Handle(finish)


def all_reduce(scatter: Start, gather: Start, x: Tensor, group: GroupHandle, kind: str) -> Handle[Tensor]:
    """Scatters the reduction of a flat message, and gathers it; a message that does not divide is padded."""
    whole = x if len(x) % group.size == 0 else torch.cat([x, x.new_zeros(-len(x) % group.size)])
    scattered = reduce_scatter(scatter, whole, group, kind)

    def finish() -> Tensor:
        return all_gather(gather, scattered.finish(), group).finish()[: len(x)]

    return Handle(finish)


def all_to_all(start: Start, x: Tensor, group: GroupHandle) -> Handle[Tensor]:
    """Sends shards inside machines to the rank with the receiver's number, which sends them across."""
    inner, outer = _levels(group)
    far, near = outer.size, inner.size
    column = start(x.view(far, near, 1, -1), 1, [1] * near, 2, [1] * near, inner)

    def finish() -> Tensor:
        return start(column.finish(), 0, [1] * far, 1, [1] * far, outer).finish().view(-1)

    return Handle(finish)


def _split(x: Tensor) -> Sequence[Tensor]:
    """Splits the last dim in parts, if all of them are large."""
    return x.chunk(_PARTS if x.shape[-1] * x.itemsize >= _PARTS * _PART_BYTES else 1, -1)


def _levels(group: GroupHandle) -> tuple[GroupHandle, GroupHandle]:
    assert group.levels is not None, "only a group with levels has a form in two levels"
    return group.levels
