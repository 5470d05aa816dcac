"""An exchange over nodes: every member a thread, every level a group of threads that pass each other messages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from shardlib.ops._two_level import Nodes, exchange, nodes_of


class Room:
    """One level's members; `crossed` counts the elements that went from one to another."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members, self.crossed = list(members), 0
        self.barrier = threading.Barrier(len(members), timeout=10)
        self.posted: dict[int, tuple[Tensor, ...]] = {}

    def all_to_all(self, me: int, message: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        self.posted[me] = message.split_with_sizes(list(send))
        self.barrier.wait()
        pieces = [self.posted[member][self.members.index(me)] for member in self.members]
        assert [len(piece) for piece in pieces] == list(receive)
        self.crossed += sum(len(p) for p, member in zip(pieces, self.members, strict=True) if member != me)
        self.barrier.wait()
        return torch.cat(pieces)


@pytest.mark.parametrize("machines", ["aabb", "abab", "aaabbb", "abcabc", "abbacc", "aabbccdd"], ids=str)
@pytest.mark.parametrize("empty", [False, True], ids=["", "empty"])
def test_two_levels_move_what_one_does(machines: str, empty: bool) -> None:
    nodes = nodes_of(machines)
    assert isinstance(nodes, tuple)
    n = len(machines)
    counts = torch.randint(0, 1 if empty else 5, (n, n), generator=torch.Generator().manual_seed(n)).tolist()
    xs = [torch.arange(sum(row)) + 1000 * rank for rank, row in enumerate(counts)]
    within = {member: room for members in nodes for room in [Room(members)] for member in members}
    along = {member: room for members in zip(*nodes, strict=True) for room in [Room(members)] for member in members}

    def member(me: int, nodes: Nodes = nodes) -> Tensor:
        inside = lambda *message: within[me].all_to_all(me, *message)
        across = lambda *message: along[me].all_to_all(me, *message)
        return exchange(xs[me], counts, nodes, me, inside, across)

    with ThreadPoolExecutor(n) as threads:
        outs = list(threads.map(member, range(n)))
    pieces = [x.split_with_sizes(row) for x, row in zip(xs, counts, strict=True)]
    for rank, out in enumerate(outs):
        assert torch.equal(out, torch.cat([of_rank[rank] for of_rank in pieces]))
    between = sum(counts[a][b] for a in range(n) for b in range(n) if machines[a] != machines[b])
    assert sum(room.crossed for room in set(along.values())) == between  # nothing crosses twice


def test_members_that_form_no_grid_are_not_served() -> None:
    assert nodes_of("aab") == "the nodes hold 2, 1 members of the group: a two-level exchange needs as many on each"
    assert nodes_of("aaa") == "all members are on one node"
