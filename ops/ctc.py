"""Connectionist temporal classification (Graves et al., ICML 2006): the loss of every sequence, and its gradient.

Shapes: log_probs [T, N, C], targets [N, S] int64, lengths [N] int64; loss [N], alpha [N, T, 2 longest + 1]. `longest`
is at least the length of any target of the *whole* batch. torch's op differs only in the width of its table alpha,
which the longest target of its own batch decides: with `longest`, sequences are independent, and shards of the batch
have tables of one width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# --- schema -----------------------------------------------------------------------------------------------------------

_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity, int longest) -> (Tensor, Tensor)"
)
_LIB.define(
    "ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "Tensor loss, Tensor alpha, int blank, bool zero_infinity) -> Tensor"
)

# --- fake -------------------------------------------------------------------------------------------------------------


torch.library.register_fake(
    "shardlib::ctc_loss",
    lambda log_probs, targets, input_lengths, target_lengths, blank, zero_infinity, longest: (
        log_probs.new_empty(log_probs.shape[1]),
        log_probs.new_empty(log_probs.shape[1], log_probs.shape[0], 2 * longest + 1),
    ),
    lib=_LIB,
)
torch.library.register_fake(
    "shardlib::ctc_loss_backward", lambda grad, log_probs, *_: torch.empty_like(log_probs), lib=_LIB
)

# --- reference --------------------------------------------------------------------------------------------------------


def reference(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Computes torch's loss, with a table alpha of width `2 longest + 1`."""
    t, n, _ = log_probs.shape
    alpha = log_probs.new_full((n, t, 2 * longest + 1), -torch.inf)
    if not n:
        return log_probs.new_empty(0), alpha
    lengths = input_lengths.tolist(), target_lengths.tolist()
    loss, table = torch.ops.aten._ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    alpha[:, :, : table.shape[2]] = table
    return loss, alpha


def backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Computes the gradient of `log_probs`."""
    if not len(grad):
        return torch.empty_like(log_probs)
    lengths = input_lengths.tolist(), target_lengths.tolist()
    table = alpha[:, :, : 2 * max(lengths[1]) + 1].contiguous()
    args = (grad.contiguous(), log_probs.contiguous(), targets.contiguous())
    rest = (loss.contiguous(), table, blank, zero_infinity)
    return torch.ops.aten._ctc_loss_backward(*args, *lengths, *rest)  # type: ignore[no-any-return]


# --- backends ---------------------------------------------------------------------------------------------------------

_LIB.impl("ctc_loss", reference, "CompositeExplicitAutograd")
_LIB.impl("ctc_loss_backward", backward, "CompositeExplicitAutograd")
