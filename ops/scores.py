"""The gradient of logits from that of their log-softmax, where a loss took one of these for each target: what the
gradients of a row add up to is that one, so nobody who has a part of the row has to ask the others."""

from __future__ import annotations

import torch
from torch import Tensor

torch.library.define(
    "shardlib::scores_backward",
    "(Tensor grad, Tensor scores, Tensor loss_grad, Tensor target, int dim, int ignore_index) -> Tensor",
)


def scores_backward(
    grad: Tensor, scores: Tensor, loss_grad: Tensor, target: Tensor, dim: int, ignore_index: int
) -> Tensor:
    """`_log_softmax_backward_data(grad, scores, dim)` of a `grad` that is `-loss_grad` at the targets and 0 elsewhere,
    and in rows whose target is ignored."""
    out: Tensor = torch.ops.aten._log_softmax_backward_data.default(grad, scores, dim, scores.dtype)
    return out


torch.library.impl("shardlib::scores_backward", "CompositeExplicitAutograd", scores_backward)

SCORES_BACKWARD = torch.ops.shardlib.scores_backward.default
