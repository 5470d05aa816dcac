"""Exchanges over a group that spans nodes: inside the nodes first, then between members of one place in their nodes.

Of `O` nodes with `I` members each, member (o, i) has a message for every member. First, inside each node, (o, i) gives
(o, j) all that it has for members (.., j) of any node. Then, across nodes, (o, j) gives (p, j) what its node has for
that member. So each member speaks to O - 1 members of other nodes instead of (O - 1) I, in messages I times as long,
along links of their own, and bytes cross between nodes once. The inner exchange runs on the kernels of `_cuda_peers.py`
where the node's GPUs reach each other, the outer one on NCCL.

A reduce-scatter is such an exchange and a sum in the order of members: the same bits as on one node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# (message, elements to each member, elements from each member) -> what came, by member; one level's all-to-all
Level = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]
Nodes = tuple[tuple[int, ...], ...]  # positions in the group, by node and place in it


def nodes_of(machines: Sequence[object]) -> Nodes | str:
    """The members of a group by node, in group order, or why they do not form a grid; `machines[i]` is member i's.

    Example:
        >>> nodes_of(["a", "a", "b", "b"])
        ((0, 1), (2, 3))
        >>> nodes_of(["a", "b", "b"])
        'the nodes hold 1, 2 members of the group: a two-level exchange needs as many on each'
        >>> nodes_of(["a", "a"])
        'all members are on one node'
    """
    by_machine: dict[object, list[int]] = {}
    for position, machine in enumerate(machines):
        by_machine.setdefault(machine, []).append(position)
    sizes = [len(members) for members in by_machine.values()]
    if len(sizes) == 1:
        return "all members are on one node"
    if len(set(sizes)) > 1:
        held = ", ".join(map(str, sizes))
        return f"the nodes hold {held} members of the group: a two-level exchange needs as many on each"
    return tuple(map(tuple, by_machine.values()))


def exchange(
    message: Tensor, counts: Sequence[Sequence[int]], nodes: Nodes, me: int, inside: Level, across: Level
) -> Tensor:
    """An all-to-all in two levels: `counts[a][b]` elements from member a to b; the result is ordered by sender.

    `inside` exchanges among the members of this node, `across` among those of this place in all nodes; both order by
    position in their level.
    """
    node = next(o for o, members in enumerate(nodes) if me in members)
    place, siblings = nodes[node].index(me), nodes[node]
    peers = [members[place] for members in nodes]

    mine = message.split_with_sizes(counts[me])
    sent = torch.cat([mine[members[j]] for j in range(len(siblings)) for members in nodes])
    send = [sum(counts[me][members[j]] for members in nodes) for j in range(len(siblings))]
    receive = [sum(counts[sibling][peer] for peer in peers) for sibling in siblings]
    gathered = inside(sent, send, receive)

    # Here by (sender, node of the receiver); sent on by (node of the receiver, sender).
    blocks = gathered.split_with_sizes([counts[sibling][peer] for sibling in siblings for peer in peers])
    sent = torch.cat([blocks[j * len(nodes) + o] for o in range(len(nodes)) for j in range(len(siblings))])
    send = [sum(counts[sibling][peer] for sibling in siblings) for peer in peers]
    receive = [sum(counts[sender][me] for sender in members) for members in nodes]
    arrived = across(sent, send, receive)

    senders = [sender for members in nodes for sender in members]
    pieces = dict(zip(senders, arrived.split_with_sizes([counts[s][me] for s in senders]), strict=True))
    return torch.cat([pieces[sender] for sender in range(len(senders))])
