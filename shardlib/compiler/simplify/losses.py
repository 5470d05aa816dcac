"""Rewrites means of losses as sums, which are divided last; counts targets that are certainly not ignored."""

from __future__ import annotations

import operator

import torch
from torch import fx

from shardlib.compiler.simplify.constants.evaluate import Constants
from shardlib.compiler.simplify.emit import Emit, Node, add_call
from shardlib.compiler.simplify.rewrite import Call, Rewrite, RewritePass
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
MEAN, SUM = 1, 2  # values of `reduction`


def count_loss_targets(gm: fx.GraphModule) -> None:
    """Replaces the count of a loss by a constant, if no target can be the one that it ignores.

    No device then sends its own count.
    """
    constants = Constants(gm)
    for target in _LOSSES:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            totals = [user for user in node.users if user.args[1] == 1]
            if not totals or get_argument(node, "reduction") != SUM or get_argument(node, "weight") is not None:
                continue
            targets, ignored = get_argument(node, "target"), get_argument(node, "ignore_index")
            bounds = constants.find_range(targets)
            if bounds is None or bounds[0] <= ignored <= bounds[1]:
                continue
            for total in totals:
                val, count = total.meta["val"], targets.meta["val"].numel()
                constant = Emit(gm, total)(aten.full.default, [], count, dtype=val.dtype, device=val.device)
                total.replace_all_uses_with(constant)


def _is_mean(node: Node) -> bool:
    """Returns whether a mean may become a sum; sums of float16 would overflow."""
    return bool(get_argument(node, "reduction") == MEAN and node.args[0].meta["val"].dtype != torch.float16)


def _sum_loss(emit: Emit, node: Node) -> Call:
    """Divides the sum behind the loss: shards of the rows add to the sum and to the count."""
    gm, items = emit.gm, {user.args[1]: user for user in node.users}
    if loss := items.get(0):
        total = items.get(1)
        with gm.graph.inserting_after(loss):
            if total is None or total > loss:
                fresh = add_call(gm, loss, operator.getitem, node, 1)
                total = total.replace_all_uses_with(fresh) and fresh if total else fresh
        with gm.graph.inserting_after(total):
            mean = add_call(gm, node, aten.div.Tensor, loss, total)
        loss.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)
    return Call(node.target, (*node.args[:3], SUM, *node.args[4:]))


def _sum_gradient(emit: Emit, node: Node) -> Call:
    grad = emit(aten.div.Tensor, node.args[0], get_argument(node, "total_weight"))
    return Call(node.target, (grad, *node.args[1:4], SUM, *node.args[5:]))


def _reads_total(node: Node) -> bool:
    """Returns whether the gradient of a sum reads the count that only a mean's needs."""
    return bool(get_argument(node, "reduction") != MEAN and node.args[6].target is not aten.new_full.default)


def _drop_total(emit: Emit, node: Node) -> Call:
    return Call(node.target, (*node.args[:6], emit(aten.new_full.default, node.args[0], [], 1)))


divide_losses_late = RewritePass(
    "divide_losses_late",
    Rewrite([_LOSSES], _sum_loss, _is_mean),  # mean -> sum / count
    Rewrite([_BACKWARD], _sum_gradient, _is_mean),  # gradient of a mean -> gradient of a sum, of grad / count
)
drop_loss_totals = RewritePass(
    "drop_loss_totals",
    Rewrite([_BACKWARD], _drop_total, _reads_total),  # a sum's gradient reads 1, and no count of targets
)
