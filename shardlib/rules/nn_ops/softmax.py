"""Softmax and its like: along a sharded dim the devices exchange the maximum and the sum of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.iteration_space import arg
from shardlib.rules.local_forms.helpers import ReducedDims, in_accumulation_dtype
from shardlib.rules.notation import gradient_pattern
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn

_ROW = "[dim] -> [dim] | dim:local"


def _row(form: Callable[..., Tensor], text: str = _ROW) -> RuleFn:
    """Returns the rule of an op along `dim`; `form(reduced, *tensors)` is the local form for a sharded dim."""

    def run(local: LocalBuilder, *args: Any) -> Any:
        return in_accumulation_dtype(form, local.call)(
            ReducedDims.over_dim_argument(local), *args[: len(local.call.operands)]
        )

    return pattern(text, form=run, flops=4)


def _shifted(reduced: ReducedDims, x: Tensor) -> tuple[Tensor, Tensor]:
    """`x - max`, whose exponential does not overflow, and the maximum."""
    top = reduced.max(x)
    return x - top, top


def _softmax(reduced: ReducedDims, x: Tensor) -> Tensor:
    exp = _shifted(reduced, x)[0].exp()
    return exp / reduced.sum(exp)


def _safe_softmax(reduced: ReducedDims, x: Tensor) -> Tensor:
    """A row whose elements are all masked has the maximum -inf, and gives zeros."""
    shifted, top = _shifted(reduced, x)
    exp = shifted.exp()
    return (exp / reduced.sum(exp)).masked_fill(top == float("-inf"), 0)


def _log_softmax(reduced: ReducedDims, x: Tensor) -> Tensor:
    shifted, _ = _shifted(reduced, x)
    return shifted - reduced.sum(shifted.exp()).log()


def _softmax_backward(reduced: ReducedDims, grad: Tensor, y: Tensor) -> Tensor:
    product = grad * y
    return product - y * reduced.sum(product)


def _log_softmax_backward(reduced: ReducedDims, grad: Tensor, y: Tensor) -> Tensor:
    return grad - y.exp() * reduced.sum(grad)


def _logsumexp(reduced: ReducedDims, x: Tensor) -> Tensor:
    top = reduced.max(x)
    # The result of a row of -inf, or with +inf, is its maximum. A softmax of the same row shares the sum.
    total = reduced.sum((x - top).exp()).log() + top
    return reduced.drop_dims(torch.where(top.abs() == float("inf"), top, total))


def _logsumexp_rule(call: Call) -> Rule | None:
    """Complex numbers have no maximum, so their dim stays whole."""
    kinds = "dim:whole" if call.operands[0].dtype.is_complex else "dim:none dim:local"
    return _row(_logsumexp, f"[dim] -> ... | {kinds}")(call)


def _masked(call: Call) -> Rule:
    """`_masked_softmax(x, mask, dim, kind)`: the mask has queries and keys (kind 0), batch and keys (1), or x's shape.

    The kernel requires as many queries as keys for kinds 0 and 1.
    """
    masks = {0: "q k", 1: "b k"}
    kind = arg(call, "mask_type")
    square = f"b h q k, {masks.get(kind)} -> b h q k | q:whole k:whole"
    text = square if kind in masks else "[dim], [dim] -> [dim] | dim:whole"
    return pattern(text, flops=4)(call)


ROWS: dict[str, RuleFn | str] = {
    "_softmax": _row(_softmax),
    "_log_softmax": _row(_log_softmax),
    "_safe_softmax": _row(_safe_softmax),
    # Torch does not decompose the composite ops with out=.
    "softmax.int": _row(_softmax),
    "log_softmax.int": _row(_log_softmax),
    "_softmax_backward_data": _row(_softmax_backward, gradient_pattern(_ROW, "r0")),
    "_log_softmax_backward_data": _row(_log_softmax_backward, gradient_pattern(_ROW, "r0")),
    "logsumexp": _logsumexp_rule,
    "_masked_softmax": _masked,
    "_masked_softmax_backward": pattern("[dim], [dim], [dim] -> [dim] | dim:whole {0}", flops=4),
}
