"""The gradient of logits from the gradient of their log-softmax, given the sum of each row's gradients.

With the sum given, devices that hold shards of a row need no communication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardlib.ops import define_op


def scores_backward(grad: Tensor, scores: Tensor, total: Tensor, dim: int) -> Tensor:
    """Computes `_log_softmax_backward_data(grad, scores, dim)` for a `grad` whose sum over `dim` is `total`."""
    out: Tensor = torch.ops.aten._log_softmax_backward_data.default(grad, scores, dim, scores.dtype)
    return out


SCORES_BACKWARD = define_op(
    "scores_backward(Tensor grad, Tensor scores, Tensor total, int dim) -> Tensor", scores_backward
)
