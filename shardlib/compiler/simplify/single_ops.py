"""Rewrites of single ops: writes by masks, concatenations, singular values, random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit, Node
from shardlib.compiler.simplify.rewrite import Call, Rewrite, RewritePass
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten


def find_fill_mask(
    x: torch.Tensor, indices: Sequence[Any], value: torch.Tensor, accumulate: bool = False, unsafe: bool = False
) -> int | None:
    """Returns the position of the one mask by which `x[indices] = value` writes a number; None for other writes."""
    positions = [i for i, index in enumerate(indices) if index is not None]
    if len(positions) != 1 or accumulate or value.dim() or value.dtype is not x.dtype:
        return None
    (at,) = positions
    mask = indices[at]
    return at if mask.dtype is torch.bool and mask.shape == x.shape[at : at + mask.dim()] else None


def _fill_by_mask(emit: Emit, node: Node) -> Call | None:
    """Fills as torch does: a write by indices would count the mask's elements, and a GPU would wait for the count."""
    x, indices, value, *accumulate = node.args
    values = [None if i is None else i.meta["val"] for i in indices]
    at = find_fill_mask(x.meta["val"], values, value.meta["val"], *accumulate, *node.kwargs.values())
    if at is None:
        return None
    mask = indices[at]
    for _ in range(x.meta["val"].dim() - at - mask.meta["val"].dim()):
        mask = emit(aten.unsqueeze.default, mask, -1)
    return Call(aten.masked_fill.Tensor, (x, mask, value))


def _list_full_operands(node: Node) -> list[fx.Node]:
    return [x for x in node.args[0] if x.meta["val"].numel()]


def _has_empty_operands(node: Node) -> bool:
    full = _list_full_operands(node)
    return 0 < len(full) < len(node.args[0]) and {x.meta["val"].dtype for x in full} == {node.meta["val"].dtype}


def _drop_empty_operands(emit: Emit, node: Node) -> Call:
    full = _list_full_operands(node)
    if len(full) == 1:
        return Call(aten.clone.default, (*full,))
    return Call(aten.cat.default, (full, *node.args[1:]), node.kwargs)


def _needs_no_vectors(node: Node) -> bool:
    return get_argument(node, "compute_uv") and {user.args[1] for user in node.users} == {1}


def _skip_vectors(emit: Emit, node: Node) -> Call:
    """Asks for singular values alone; torch computes vectors too if the operand may need a gradient."""
    x, values = node.args[0], node.meta["val"][1]
    nothing = x.meta["val"].new_empty(0)
    return Call(node.target, (x, False, False), val=(nothing, values, nothing))


def _is_drawn_like_a_result(node: Node) -> bool:
    like = node.args[1]
    return isinstance(like, fx.Node) and like.op != "placeholder"


def _anchor_draw(emit: Emit, node: Node) -> Call:
    """Names the input that the random numbers are placed like; other tensors are not kept for that."""
    key, like, *rest = node.args
    while any(has_trait(like.target, trait) for trait in ("is_alias", "copies", "metadata_only")):
        like = like.args[0]
    return Call(node.target, (key, like if like.op == "placeholder" else None, *rest), node.kwargs)


def _drop_statistics(emit: Emit, node: Node) -> Call:
    """Drops running statistics, which a backward pass in training does not read: a later microbatch may write them."""
    grad, x, weight, _, _, *rest = node.args
    return Call(node.target, (grad, x, weight, None, None, *rest), node.kwargs)


def _has_unread_statistics(node: Node) -> bool:
    return node.args[3] is not None and get_argument(node, "train") is True


fill_by_masks = RewritePass(
    "fill_by_masks",
    Rewrite([[aten.index_put.default]], _fill_by_mask),  # x[mask] = number -> masked_fill
)
drop_empty_operands = RewritePass(
    "drop_empty_operands",
    Rewrite([[aten.cat.default]], _drop_empty_operands, _has_empty_operands),  # cat([empty, x]) -> clone(x)
)
drop_unread_statistics = RewritePass(
    "drop_unread_statistics",  # batch_norm_backward(..., mean, var, ..., train=True) -> (..., None, None, ..., True)
    Rewrite([[aten.native_batch_norm_backward.default]], _drop_statistics, _has_unread_statistics),
)
skip_singular_vectors = RewritePass(
    "skip_singular_vectors",
    Rewrite([[aten._linalg_svd.default]], _skip_vectors, _needs_no_vectors),  # svd(x)[1] -> svd(x, compute_uv=False)[1]
)
anchor_draws_at_inputs = RewritePass(
    "anchor_draws_at_inputs",
    Rewrite([[torch.ops.shardlib.draw.default]], _anchor_draw, _is_drawn_like_a_result),  # like clone(x) -> like x
)
