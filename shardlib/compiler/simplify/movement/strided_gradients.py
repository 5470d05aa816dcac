"""Rewrites the gradient of `as_strided` as the gradients of the views that it consists of, dim by dim.

Autograd adds up this gradient element by element of the memory, which no dim of a batch survives. Longformer's blocks
of a sequence that overlap are such a view.
"""

from __future__ import annotations

import torch
from torch import fx

from shardlib.compiler.simplify.basic import call, dims_of
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument, get_fill_value

aten = torch.ops.aten
_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def differentiate_views(gm: fx.GraphModule) -> None:
    """`zeros.index_add(0, view(arange).flatten(), x)` is the gradient of the view."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.index_add.default):
        zeros, dim, index, source, *alpha = node.args
        alike = alpha in ([], [1]) and node.kwargs.get("alpha", 1) == 1 and dim in (0, -1)
        val = node.meta["val"]
        if not alike or val.dim() != 1 or get_fill_value(zeros) != 0 or source.meta["val"].dtype != val.dtype:
            continue
        if (views := _views(index, val.numel())) is None:
            continue
        with gm.graph.inserting_before(node):
            for view in views:
                source = _differentiate(gm, node, view, source)
            source = call(gm, node, aten.reshape.default, source, [val.numel()])
        node.replace_all_uses_with(source)


def _views(node: fx.Node, count: int) -> list[fx.Node] | None:
    """Returns the views between the numbers 0 to `count` and a node, last one first; None if it is anything else."""
    views = list[fx.Node]()
    while node.target not in _COUNTS:
        if node.target in (aten.slice.Tensor, aten.unfold.default) or any(
            has_trait(node.target, what) for what in ("keeps_order", "permutes", "copies", "is_alias")
        ):
            views.append(node)
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node = source
            continue
        return None
    low, step = (get_argument(node, name) for name in ("start", "step")) if node.target is _COUNTS[2] else (0, 1)
    low = get_argument(node, "start") if node.target is _COUNTS[1] else low
    return views if (low, step) == (0, 1) and node.meta["val"].shape == (count,) else None


def _differentiate(gm: fx.GraphModule, node: fx.Node, view: fx.Node, x: fx.Node) -> fx.Node:
    """Returns the gradient of a view's operand; `x` is the gradient of its result."""
    source = view.args[0]
    assert isinstance(source, fx.Node)
    shape = list(source.meta["val"].shape)
    if view.target is aten.slice.Tensor:
        dim, low, high, step = (get_argument(view, name) for name in ("dim", "start", "end", "step"))
        low, high, step = slice(low, high, step).indices(shape[dim])
        return call(gm, node, aten.slice_backward.default, x, shape, dim, low, high, step)
    if view.target is aten.unfold.default:
        dim, size, step = (get_argument(view, name) for name in ("dimension", "size", "step"))
        return call(gm, node, aten.unfold_backward.default, x, shape, dim % len(shape), size, step)
    if has_trait(view.target, "permutes"):
        dims = dims_of(view)
        return call(gm, node, aten.permute.default, x, [dims.index(d) for d in range(len(dims))])
    return call(gm, node, aten.reshape.default, x, shape) if has_trait(view.target, "keeps_order") else x
