"""The gradient of logits from that of their log-softmax, where it is known what the gradients of a row add up to: then
nobody who has a part of the row has to ask the others."""

from __future__ import annotations

import torch
from torch import Tensor

torch.library.define("shardlib::scores_backward", "(Tensor grad, Tensor scores, Tensor total, int dim) -> Tensor")


def scores_backward(grad: Tensor, scores: Tensor, total: Tensor, dim: int) -> Tensor:
    """`_log_softmax_backward_data(grad, scores, dim)`, of a `grad` whose sum over `dim` is `total`."""
    out: Tensor = torch.ops.aten._log_softmax_backward_data.default(grad, scores, dim, scores.dtype)
    return out


torch.library.impl("shardlib::scores_backward", "CompositeExplicitAutograd", scores_backward)

SCORES_BACKWARD = torch.ops.shardlib.scores_backward.default
