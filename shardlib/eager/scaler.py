"""What `torch.amp.GradScaler` asks of gradients: one op that unscales many and notes whether any is not finite."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.eager.dispatch import handles
from shardlib.tensors.tensor import ShardedTensor


@handles(torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(op: Any, args: Any, kwargs: Any) -> None:
    """The scaler's own tensors are plain, and alike on all ranks: what one piece shows, all ranks find."""
    grads, found, inverse = args
    if plain := [g for g in grads if not isinstance(g, ShardedTensor)]:
        op(plain, found, inverse)
    for g in grads:
        if isinstance(g, ShardedTensor):
            bad = (~g.isfinite()).any().to(found.dtype)
            found.copy_(torch.maximum(found, bad if isinstance(found, ShardedTensor) else bad.full_tensor()))  # type: ignore[attr-defined]
            g.mul_(inverse)
