"""Collectives in two levels, for groups whose ranks are on several machines with as many ranks each.

A group of p = f k ranks is seen as a grid [f machines, k ranks on each], in the order of its members. Row and column of
a rank are groups of their own: `inner`, the ranks on its machine, and `outer`, the ranks with its number on all
machines. Each collective is a sequence of the same collective over rows and columns, which its module passes as
`start`. The later ones begin in `finish`.

Messages are flat: p shards of one size, in the order of members. Only `all_reduce` takes any number of elements. Sums
are added inside machines first. All replicas of a result are copies of one tensor, so they have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from shardlib.ops.collectives.transport.flat_messages import split_evenly, sum_dtype
from shardlib.ops.collectives.transport.torch_wire import Handle

if TYPE_CHECKING:
    from shardlib.ops.collectives.transport.groups import GroupHandle
Start = Callable[..., Handle[Tensor]]


def all_gather(start: Start, x: Tensor, group: GroupHandle, shared: bool = False) -> Handle[Tensor]:
    """Gathers a flat shard across machines, and the stripes inside; `shared` as in `all_gather.start`."""
    inner, outer = _levels(group)
    stripe = start(x.view(1, 1, -1), 0, [1] * outer.size, outer)

    def finish() -> Tensor:
        return start(stripe.finish(), 1, [1] * inner.size, inner, shared).finish().view(-1)

    return Handle(finish)


def reduce_scatter(start: Start, x: Tensor, group: GroupHandle, kind: str) -> Handle[Tensor]:
    """Reduces the shards of a flat message inside machines, and these sums across."""
    inner, outer = _levels(group)
    grid = x.to(sum_dtype(x.dtype, kind)).view(outer.size, inner.size, -1)
    column = start(grid, 1, [1] * inner.size, inner, kind)

    def finish() -> Tensor:
        return start(column.finish(), 0, [1] * outer.size, outer, kind).finish().view(-1).to(x.dtype)

    return Handle(finish)


def all_reduce(scatter: Start, gather: Start, x: Tensor, group: GroupHandle, kind: str) -> Handle[Tensor]:
    """Scatters the reduction of a flat message inside machines and across, and gathers it across and inside."""
    inner, outer = _levels(group)
    sizes = split_evenly(len(x), inner.size)
    column = scatter(x.to(sum_dtype(x.dtype, kind)), 0, sizes, inner, kind)

    def finish() -> Tensor:
        part = column.finish()
        parts = split_evenly(len(part), outer.size)
        mine = scatter(part, 0, parts, outer, kind).finish().to(x.dtype)
        return gather(gather(mine, 0, parts, outer).finish(), 0, sizes, inner).finish()

    return Handle(finish)


def all_to_all(start: Start, x: Tensor, group: GroupHandle) -> Handle[Tensor]:
    """Sends shards inside machines to the rank with the receiver's number, which sends them across."""
    inner, outer = _levels(group)
    far, near = outer.size, inner.size
    column = start(x.view(far, near, 1, -1), 1, [1] * near, 2, [1] * near, inner)

    def finish() -> Tensor:
        return start(column.finish(), 0, [1] * far, 1, [1] * far, outer).finish().view(-1)

    return Handle(finish)


def _levels(group: GroupHandle) -> tuple[GroupHandle, GroupHandle]:
    assert group.levels is not None, "only a group with levels has a form in two levels"
    return group.levels
