"""Layer and RMS normalization; the normalized dims may be sharded.

Then the devices exchange the sums of each row: first of the values, then of the squares of the values minus the mean,
so that nothing cancels. Gradients of weight and bias add up over the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.iteration_space import arg
from shardlib.rules.local_forms.helpers import ReducedDims, in_accumulation_dtype
from shardlib.rules.notation import gradient_pattern
from shardlib.rules.out_variants import by_torch
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import LocalBuilder, RuleFn


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """`x * weight + bias`, without those that are None."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def layer_norm(
    reduced: ReducedDims, x: Tensor, _: Any, w: Tensor | None, b: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    mean, centered, var = reduced.moments(x)
    rstd = (var + eps).rsqrt()
    return affine(centered * rstd, w, b), mean, rstd


def _rms_norm(reduced: ReducedDims, x: Tensor, _: Any, w: Tensor | None, eps: float | None) -> tuple[Tensor, ...]:
    rstd = (reduced.mean(x * x) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return affine(x * rstd, w), rstd


def layer_norm_terms(
    reduced: ReducedDims, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the gradient of x, and the addends of those of weight and bias."""
    unit, pull = (x - mean) * rstd, affine(grad, w)
    dx = pull - reduced.mean(pull) - unit * reduced.mean(pull * unit)
    return dx * rstd, grad * unit, grad


def _layer_norm_backward(
    reduced: ReducedDims, grad: Tensor, x: Tensor, _: Any, mean: Tensor, rstd: Tensor, w: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    dx, *terms = layer_norm_terms(reduced, grad, x, mean, rstd, w)
    return dx, *(_outer_sum(reduced, term) for term in terms)


def _rms_norm_backward(
    reduced: ReducedDims, grad: Tensor, x: Tensor, _: Any, rstd: Tensor, w: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    unit, pull = x * rstd, affine(grad, w)
    return (pull - unit * reduced.mean(pull * unit)) * rstd, _outer_sum(reduced, grad * unit)


def _outer_sum(reduced: ReducedDims, x: Tensor) -> Tensor:
    """Returns the sum over this device's rows, an addend of a partial sum."""
    outer = list(range(reduced.dims[0]))
    return x.sum(outer) if outer else x


def _norm(text: str, form: Callable[..., tuple[Tensor, ...]], flops: int) -> RuleFn:
    """Returns the rule of a norm; `form(reduced, *args)` is the local form for sharded normalized dims."""

    def run(local: LocalBuilder, *args: Any) -> Any:
        rank = local.call.operands[0].rank
        start = rank - len(arg(local.call, "normalized_shape"))
        return in_accumulation_dtype(form, local.call)(ReducedDims.over(local, range(start, rank)), *args)

    return pattern(text, form=run, flops=flops)


# Weight normalization: w = g v / |v|, with one norm per index of `dim`. ----------------------------------------------


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norm: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    norm, others = norm.to(g.dtype), [d for d in range(v.dim()) if d != dim]
    along = (grad * v).sum(others, keepdim=True) if others else grad * v
    return (g / norm) * (grad - v * (along / (norm * norm))), along / norm


_SHAPE = "| normalized_shape:size(normalized_shape) normalized_shape:local normalized_shape:none"
_LAYER = f"[normalized_shape], normalized_shape, normalized_shape -> [normalized_shape], ..., ... {_SHAPE}"
_RMS = f"[normalized_shape], normalized_shape -> [normalized_shape], ... {_SHAPE}"

ROWS: dict[str, RuleFn | str] = {
    "native_layer_norm": _norm(_LAYER, layer_norm, 5),
    "native_layer_norm_backward": _norm(gradient_pattern(_LAYER, "0 r1 r2 1 2", wrt="0 1 2"), _layer_norm_backward, 8),
    "_fused_rms_norm": _norm(_RMS, _rms_norm, 5),
    "_fused_rms_norm_backward": _norm(gradient_pattern(_RMS, "0 r1 1", wrt="0 1"), _rms_norm_backward, 8),
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    **by_torch("_weight_norm_interface"),
    "_weight_norm_interface_backward": _weight_norm_backward,
}
