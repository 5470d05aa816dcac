"""Lists the ops that a trace replaces by other ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.frontend.torch_rewrites.attention import DECOMPOSITIONS as OF_ATTENTION
from shardlib.rules.table import DECOMPOSITIONS as OF_RULES


def _shifted(op: Any) -> Callable[..., Any]:
    """Returns a shift that converts bools first, which torch's shifts of fake tensors do not support."""

    def shift(x: torch.Tensor, n: Any) -> torch.Tensor:
        shifted: torch.Tensor = op(x.to(torch.result_type(x, n)), n)
        return shifted

    return shift


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.__lshift__.Scalar: _shifted(torch.ops.aten.bitwise_left_shift.Tensor_Scalar),
    torch.ops.aten.__lshift__.Tensor: _shifted(torch.ops.aten.bitwise_left_shift.Tensor),
    torch.ops.aten.__rshift__.Scalar: _shifted(torch.ops.aten.bitwise_right_shift.Tensor_Scalar),
    torch.ops.aten.__rshift__.Tensor: _shifted(torch.ops.aten.bitwise_right_shift.Tensor),
    **OF_ATTENTION,
    **OF_RULES,
}
