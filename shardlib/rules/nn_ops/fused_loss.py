"""The cross-entropy of a linear layer, which torch computes chunk by chunk of the batch, with its gradients.

Chunks keep the logits small on one device. Here the op is traced as a product, a softmax and a loss, each with its own
rule, so that the logits may be sharded instead.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.nn_ops.loss import REDUCTIONS
from shardlib.rules.rule import RuleFn

aten = torch.ops.aten


def _forward(
    x: Tensor, matrix: Tensor, target: Tensor, bias: Tensor | None, weight: Tensor | None, reduction: int, ignore: int,
    acc: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the log-probabilities, the loss and the total weight of the targets, in dtype `acc`."""
    logits = x.to(acc) @ matrix.to(acc).t()
    logits = logits if bias is None else logits + bias.to(acc)
    scores = aten._log_softmax(logits, 1, False)
    weight = None if weight is None else weight.to(acc)
    loss, total = aten.nll_loss_forward(scores, target, weight, reduction, ignore)
    return scores, loss, total


def _loss_and_gradients(
    x: Tensor, matrix: Tensor, target: Tensor, bias: Tensor | None, weight: Tensor | None, reduction: str, ignore: int,
    smoothing: float, chunk: int, policy: str, acc: torch.dtype, retain: bool, wants_x: bool, wants_matrix: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kind = REDUCTIONS[reduction]
    scores, loss, total = _forward(x, matrix, target, bias, weight, kind, ignore, acc)
    weight = None if weight is None else weight.to(acc)
    back = aten.nll_loss_backward(torch.ones_like(loss), scores, target, weight, kind, ignore, total)
    back = aten._log_softmax_backward_data(back, scores, 1, acc)
    return (
        loss.to(x.dtype),
        (back @ matrix.to(acc)).to(x.dtype) if wants_x else x.new_empty([0, 0]),
        (back.t() @ x.to(acc)).to(x.dtype) if wants_matrix else x.new_empty([0, 0]),
        back.sum(0).to(x.dtype) if wants_bias else x.new_empty([0]),
    )


def _losses(
    x: Tensor, matrix: Tensor, target: Tensor, bias: Tensor | None, weight: Tensor | None, ignore: int, chunk: int,
    policy: str, acc: torch.dtype,
) -> Tensor:  # fmt: skip
    return _forward(x, matrix, target, bias, weight, REDUCTIONS["none"], ignore, acc)[1].to(x.dtype)


ROWS: dict[str, RuleFn | str] = {}

DECOMPOSED: dict[str, Callable[..., Any]] = {}

_DEFINED_IN = "torch.nn.modules.linear_cross_entropy"
if importlib.util.find_spec(_DEFINED_IN):  # older versions of torch lack the op
    importlib.import_module(_DEFINED_IN)
    DECOMPOSED["torch_nn::_linear_cross_entropy_batch_chunked"] = _loss_and_gradients
    DECOMPOSED["torch_nn::_linear_cross_entropy_batch_chunked_no_reduction"] = _losses
