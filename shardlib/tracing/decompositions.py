"""Ops that are written as other ops while they are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.rules.batchnorm import native_batch_norm
from shardlib.rules.table import DECOMPOSITIONS as OF_RULES
from shardlib.tracing.capture import DECOMPOSITIONS as OF_ATTENTION


def _batch_norm_out(*args: Any, out: Any, save_mean: Any, save_invstd: Any) -> tuple[Any, Any, Any]:
    for buffer, value in zip((out, save_mean, save_invstd), native_batch_norm(*args), strict=True):
        buffer.copy_(value)
    return out, save_mean, save_invstd


def _shifted(op: Any) -> Callable[..., Any]:
    """`x << n` and `x >> n` take bools, too, but not on tensors without values."""

    def shift(x: torch.Tensor, n: Any) -> torch.Tensor:
        found: torch.Tensor = op(x.to(torch.result_type(x, n)), n)
        return found

    return shift


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_batch_norm.out: _batch_norm_out,
    torch.ops.aten.__lshift__.Scalar: _shifted(torch.ops.aten.bitwise_left_shift.Tensor_Scalar),
    torch.ops.aten.__lshift__.Tensor: _shifted(torch.ops.aten.bitwise_left_shift.Tensor),
    torch.ops.aten.__rshift__.Scalar: _shifted(torch.ops.aten.bitwise_right_shift.Tensor_Scalar),
    torch.ops.aten.__rshift__.Tensor: _shifted(torch.ops.aten.bitwise_right_shift.Tensor),
    **OF_ATTENTION,
    **OF_RULES,
}
