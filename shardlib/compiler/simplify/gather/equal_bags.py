"""Bags of one length, as `embedding_bag` of a matrix of indices makes them, are ops on that matrix: so they are cut as
any batch is."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.basic import call
from shardlib.core.aten.schemas import get_argument
from shardlib.ops.bags import BAGS, BAGS_BACKWARD, BAGS_WEIGHTS_BACKWARD, MAX, SUM

aten = torch.ops.aten


def even_bags(gm: fx.GraphModule) -> None:
    """Backward ops first: only where nobody is left who reads in which bag each index is, the bags are rewritten."""
    nodes = [node for node in gm.graph.nodes if node.target in _FORMS and _length(node)]
    for node in reversed(nodes):
        _FORMS[node.target](gm, node)


def _bags(gm: fx.GraphModule, node: fx.Node) -> None:
    items: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
    if get_argument(node, "include_last_offset") or (1 in items and items[1].users):
        return
    index, weights = _matrix(gm, node, "indices"), _matrix(gm, node, "per_sample_weights")
    _write(node, BAGS, node.args[0], index, weights, get_argument(node, "mode"), get_argument(node, "padding_idx"))
    for item, user in items.items():
        user.args = (node, _ITEMS[item])


_ITEMS = {0: 0, 1: 1, 2: 1, 3: 2}  # which of our results is theirs; nobody reads their second


def _table_gradient(gm: fx.GraphModule, node: fx.Node) -> None:
    index, weights, mode = (
        _matrix(gm, node, "indices"),
        _matrix(gm, node, "per_sample_weights"),
        get_argument(node, "mode"),
    )
    counts, rows = (get_argument(node, name) for name in ("bag_size", "maximum_indices"))
    some = counts if mode != SUM else None, rows if mode == MAX else None
    how = get_argument(node, "num_weights"), get_argument(node, "scale_grad_by_freq"), mode, weights
    _write(node, BAGS_BACKWARD, node.args[0], index, *some, *how, get_argument(node, "padding_idx"))


def _weights_gradient(gm: fx.GraphModule, node: fx.Node) -> None:
    args = (*node.args[:2], _matrix(gm, node, "indices"), get_argument(node, "padding_idx"))
    with gm.graph.inserting_before(node):
        each = call(gm, node, BAGS_WEIGHTS_BACKWARD, *args)
    _write(node, aten.reshape.default, each, [-1])


_FORMS = {
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _bags,
    aten._embedding_bag_backward.default: _table_gradient,
    aten._embedding_bag_per_sample_weights_backward.default: _weights_gradient,
}


def _length(node: fx.Node) -> int:
    """How long all bags are; 0 where they differ, or nobody can tell."""
    offsets, n = get_argument(node, "offsets"), get_argument(node, "indices").meta["val"].numel()
    if offsets.target is not aten.arange.start_step:
        return 0
    start, stop, step = (get_argument(offsets, name) for name in ("start", "end", "step"))
    return step if (start, stop) == (0, n) and step and n % step == 0 else 0


def _matrix(gm: fx.GraphModule, node: fx.Node, name: str) -> fx.Node | None:
    """An argument with an element for each index, as a row for each bag."""
    flat = get_argument(node, name)
    if flat is None:
        return None
    with gm.graph.inserting_before(node):
        return call(gm, node, aten.reshape.default, flat, [-1, _length(node)])


def _write(node: fx.Node, target: Any, *args: Any) -> None:
    node.target, node.args, node.kwargs = target, args, {}
    node.meta["val"] = target(*fx.map_arg(args, lambda x: x.meta["val"]))
