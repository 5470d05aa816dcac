"""Rewrites the gradient of `as_strided` as the gradients of the views that it consists of, dim by dim.

Autograd adds up this gradient element by element of the memory, which no dim of a batch survives. Longformer's blocks
of a sequence that overlap are such a view.
"""

from __future__ import annotations

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit, Node
from shardlib.compiler.simplify.movement.compose_views import get_permuted_dims
from shardlib.compiler.simplify.rewrite import Rewrite, RewritePass
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument, get_fill_value

aten = torch.ops.aten
_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def _adds_to_zeros(node: Node) -> bool:
    zeros, dim, _, source, *alpha = node.args
    val = node.meta["val"]
    adds_once = alpha in ([], [1]) and node.kwargs.get("alpha", 1) == 1
    is_flat = val.dim() == 1 and dim in (0, -1)
    return adds_once and is_flat and get_fill_value(zeros) == 0 and source.meta["val"].dtype == val.dtype


def _differentiate_views(emit: Emit, node: Node) -> fx.Node | None:
    count, x = node.meta["val"].numel(), node.args[3]
    if (views := _list_views(node.args[2], count)) is None:
        return None
    for view in views:
        x = _differentiate(emit, view, x)
    reshaped: fx.Node = emit(aten.reshape.default, x, [count])
    return reshaped


def _list_views(node: Node, count: int) -> list[Node] | None:
    """Returns the views between the numbers 0 to `count` and a node, last one first; None if it is anything else."""
    views = list[Node]()
    while node.target not in _COUNTS:
        if node.target not in (aten.slice.Tensor, aten.unfold.default) and not any(
            has_trait(node.target, trait) for trait in ("keeps_order", "permutes", "copies", "is_alias")
        ):
            return None
        views.append(node)
        node = node.args[0]
    low, step = (get_argument(node, name) for name in ("start", "step")) if node.target is _COUNTS[2] else (0, 1)
    low = get_argument(node, "start") if node.target is _COUNTS[1] else low
    return views if (low, step) == (0, 1) and node.meta["val"].shape == (count,) else None


def _differentiate(emit: Emit, view: Node, x: Node) -> Node:
    """Returns the gradient of a view's operand; `x` is the gradient of its result."""
    shape = list(view.args[0].meta["val"].shape)
    if view.target is aten.slice.Tensor:
        dim, low, high, step = (get_argument(view, name) for name in ("dim", "start", "end", "step"))
        low, high, step = slice(low, high, step).indices(shape[dim])
        return emit(aten.slice_backward.default, x, shape, dim, low, high, step)
    if view.target is aten.unfold.default:
        dim, size, step = (get_argument(view, name) for name in ("dimension", "size", "step"))
        return emit(aten.unfold_backward.default, x, shape, dim % len(shape), size, step)
    if has_trait(view.target, "permutes"):
        dims = get_permuted_dims(view)
        return emit(aten.permute.default, x, [dims.index(d) for d in range(len(dims))])
    return emit(aten.reshape.default, x, shape) if has_trait(view.target, "keeps_order") else x


differentiate_views = RewritePass(
    "differentiate_views",
    # zeros.index_add(0, view(arange).flatten(), x) -> the gradient of the view
    Rewrite([[aten.index_add.default]], _differentiate_views, _adds_to_zeros),
)
