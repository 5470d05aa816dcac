"""Walks autograd's graph, from results back to the ends of their history."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


def history_nodes(outs: Iterable[Tensor], *, through: bool = True) -> list[Any]:
    """Returns the nodes in the history of `outs`, each before the nodes behind it.

    Without `through`, the history ends at the user's Functions.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> [node.name() for node in history_nodes([x.sin().exp()])]
        ['ExpBackward0', 'SinBackward0', 'torch::autograd::AccumulateGrad']
    """
    order: dict[Any, None] = {}  # from the ends
    todo: list[tuple[Any, bool]] = [(x.grad_fn, False) for x in outs if x.grad_fn is not None]
    opened: set[Any] = set()
    while todo:
        node, is_done = todo.pop()
        if is_done:
            order[node] = None
        elif node not in opened:
            opened.add(node)
            todo += [(node, True), *((behind, False) for behind in nodes_behind(node, through=through))]
    return [*reversed(order)]


def nodes_behind(node: Any, *, through: bool = True) -> list[Any]:
    """Returns the nodes that a node's gradients go on to; none for a user's Function without `through`."""
    if isinstance(node, BackwardCFunction) and not through:
        return []
    return [behind for behind, _ in node.next_functions if behind is not None]
