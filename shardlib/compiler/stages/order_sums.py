"""Adds up the gradients of microbatches in the order in which a pipeline has them.

Autograd adds up the uses of a weight from the last one back to the first. A stage that runs the backward pass of the
first microbatch first would have to keep all gradients until the last one is there. So each use of a weight (each line
that reads it) gets a sum of its own, from the first microbatch to the last one. Uses are added up behind it, so that a
weight of two stages sends its gradient once. The backward passes themselves follow in that order, too: each microbatch
then repeats the one before it, and the compiler plans only a few of them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx

from shardlib.core.fragment_tag import NO_TAG
from shardlib.core.source_lines import Line

ADD = torch.ops.aten.add.Tensor


def order_sums(graph: fx.Graph) -> None:
    """Rewrites all sums of gradients of several microbatches, and sorts the backward passes of these."""
    for node in [n for n in graph.nodes if _adds(n) and not (len(n.users) == 1 and all(map(_adds, n.users)))]:
        leaves = _leaves(node)
        is_backward = all(x.meta.get("backward") for x in leaves)
        if is_backward and len({x.meta["line"].tag.microbatch for x in leaves}) > 1:
            _rewrite(graph, node, leaves)
    for backward, run in itertools.groupby([*graph.nodes], lambda n: bool(n.meta.get("backward"))):
        if backward:
            _sort(graph, [*run])


def _sort(graph: fx.Graph, run: Sequence[fx.Node]) -> None:
    """Sorts successive nodes by the first microbatch that needs them, each behind its operands."""
    number = {n: i for i, n in enumerate(run)}
    waits = {n: sum(x in number for x in n.all_input_nodes) for n in run}
    place: dict[fx.Node, tuple[float, int]] = {}
    for node in reversed(run):
        microbatch = node.meta["line"].tag.microbatch
        needed = [place[user][0] for user in node.users if user in place]
        place[node] = min([math.inf if microbatch is None else microbatch, *needed]), number[node]
    ready = [place[n] for n in run if not waits[n]]
    heapq.heapify(ready)
    behind = run[-1].next
    while ready:
        node = run[heapq.heappop(ready)[1]]
        behind.prepend(node)
        for user in node.users:
            if user in waits:
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, place[user])


def _rewrite(graph: fx.Graph, root: fx.Node, leaves: list[fx.Node]) -> None:
    """Replaces a tree of additions."""
    uses = defaultdict[Line, list[fx.Node]](list)
    for leaf in leaves:
        line = leaf.meta["line"]
        uses[line._replace(tag=line.tag._replace(microbatch=None))].append(leaf)
    sums = []
    for use in uses.values():
        use.sort(key=lambda x: x.meta["line"].tag.microbatch or 0)
        total = use[0]
        for x in use[1:]:
            total = _add(graph, root, total, x, x.meta["line"])
        sums.append(total)
    total = sums[0]
    for x in sums[1:]:
        line = root.meta["line"]
        total = _add(graph, root, total, x, line._replace(tag=NO_TAG))
    root.replace_all_uses_with(total)
    dead = [root]
    while dead:
        node = dead.pop()
        if _adds(node) and not node.users:
            operands = node.all_input_nodes
            graph.erase_node(node)
            dead += operands


def _add(graph: fx.Graph, root: fx.Node, a: fx.Node, b: fx.Node, line: Line) -> fx.Node:
    with graph.inserting_before(root):
        node = graph.call_function(ADD, (a, b))
    node.meta.update(root.meta, line=line, backward=True)
    return node


def _leaves(node: fx.Node) -> list[fx.Node]:
    """Returns the addends of a tree of additions, from left to right."""
    leaves: list[fx.Node] = []
    waiting = [x for x in reversed(node.args[:2]) if isinstance(x, fx.Node)]
    while waiting:
        x = waiting.pop()
        if _adds(x) and len(x.users) == 1:
            waiting += [y for y in reversed(x.args[:2]) if isinstance(y, fx.Node)]
        else:
            leaves.append(x)
    return leaves


def _adds(node: fx.Node) -> bool:
    """Returns whether a node of the backward pass adds two tensors of one form."""
    if node.target is not ADD or node.kwargs or not node.meta.get("backward"):
        return False
    values = [x.meta["val"] if isinstance(x, fx.Node) else None for x in node.args]
    want = node.meta["val"]
    return all(x is not None and (x.shape, x.dtype) == (want.shape, want.dtype) for x in values)
