"""Reductions: a cut factor that is reduced leaves a pending sum, maximum or minimum.

Of norms, a sum of first powers, a count and a maximum may stay pending; the root of any other sum cannot wait, so
devices add up before they take it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.primitives.collectives import all_gather, psum
from shardlib.rules.iteration_space import arg, axes, numel, result, result_shape
from shardlib.rules.local_forms.helpers import Rows, cut, wide, worst
from shardlib.rules.out_variants import by_torch
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.tensor_ops.pointwise import pointwise

aten = torch.ops.aten


def _mean(local: Local, x: Tensor, dim: Any = None, *_: Any, **__: Any) -> Tensor:
    """Local sum over global count; half precision is summed in single, where counts do not overflow."""
    shape, out, dtype = local.call.operands[0].shape, result_shape(local.call), result(local.call).dtype
    dims = axes(dim, len(shape))
    count = numel(shape) // max(numel(out), 1)
    return (x.sum(dims, keepdim=len(out) == len(shape), dtype=wide(dtype)) / count).to(dtype)


def _extreme(local: Local, x: Tensor, *how: Any, **named: Any) -> Any:
    """amax, amin, max, min."""
    target = local.call.target
    fill = worst(x.dtype, lowest=target in (aten.amax.default, aten.max.default))
    return target(Rows.over(local).held(x, fill), *how, **named)


def _truth(kind: str) -> RuleFn:
    """`any` and `all` of a list of dims: only here, an empty list means none of them."""
    reduced, kept = pattern(f"[dim] -> ... | dim:{kind}"), pointwise()
    return lambda call: kept(call) if arg(call, "dim") in ([], ()) else reduced(call)


def _prod(local: Local, *args: Any, **kwargs: Any) -> Tensor:
    """Products of the pieces, gathered: no sum or maximum can stand for them while they are pending."""
    row, how = cut(local, local.rule.reduce), {"dtype": result(local.call).dtype}
    pieces = all_gather(local.call.target(*args, **(kwargs | how)), row, tiled=False)
    out: Tensor = pieces.prod(0, **how)
    return out


# Norms ---------------------------------------------------------------------------------------------------------------

_PENDING = {math.inf: "max", -math.inf: "min", 0: "sum", 1: "sum"}


def _vector_norm(call: Call) -> Rule | None:
    """`linalg_vector_norm(x, ord, dim, keepdim, dtype)`."""
    order = arg(call, "ord")
    return pattern(f"[dim] -> ... | dim:{_PENDING.get(order, 'none')} dim:local", form=_norm)(call)


def _norm(local: Local, x: Tensor, order: float = 2, *how: Any, **named: Any) -> Tensor:
    rows, out = Rows.over(local), result(local.call).dtype
    held = rows.held(x, math.inf if order < 0 else 0)  # which changes no norm
    if order in _PENDING:
        power: Tensor = local.call.target(held, order, *how, **named)
        return power
    acc = wide(out).to_complex() if x.is_complex() else wide(out)
    norm = torch.linalg.vector_norm(held, order, rows.dims, rows.kept, dtype=acc)
    powers: Tensor = psum(norm**order, rows.factors)
    return powers.pow(1 / order).to(out)


# Variance, written as sums, so that it may be cut like them -----------------------------------------------------------


def _moments(x: Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean, in two passes, so that nothing cancels."""
    dims = axes(dim, x.dim())
    count = numel([x.shape[d] for d in dims if x.dim()])
    value = x.to(wide(x.dtype))
    mean = value.mean(dims, keepdim=True)
    centered = value - mean
    square = (centered * centered.conj()).real if x.is_complex() else centered * centered
    var = square.sum(dims, keepdim=keepdim) / max(0, count - (1 if correction is None else correction))
    mean = mean if keepdim else mean.squeeze(dims)
    return var, mean.to(x.dtype)


def _variance(*, root: bool = False, mean: bool = False) -> Callable[..., Any]:
    """`var`, `std` (its root), and both with the mean."""

    def form(
        x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        var, middle = _moments(x, dim, correction, keepdim)
        spread = (var.sqrt() if root else var).to(x.dtype.to_real())
        return (spread, middle) if mean else spread

    return form


def _both_ends(x: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """A pending value can be one kind of reduction only: so these are two."""
    over = () if dim is None else (dim,)
    return x.amin(over, keepdim), x.amax(over, keepdim)


ROWS: dict[str, RuleFn | str] = {
    "sum": "... -> | ...:sum {0}",
    "sum.dim_IntList": "[dim] -> ... | dim:sum {0}",
    **dict.fromkeys(["nansum", "count_nonzero", "count_nonzero.dim_IntList"], "[dim] -> ... | dim:sum"),
    "mean": pattern("... -> | ...:sum ...:local {0}", form=_mean),
    "mean.dim": pattern("[dim] -> ... | dim:sum dim:local {0}", form=_mean),
    "amax": pattern("[dim] -> ... | dim:max dim:local", form=_extreme),
    "amin": pattern("[dim] -> ... | dim:min dim:local", form=_extreme),
    "max": pattern("... -> | ...:max ...:local", form=_extreme),
    "min": pattern("... -> | ...:min ...:local", form=_extreme),
    **dict.fromkeys(["any", "_is_any_true"], "... -> | ...:max"),
    **dict.fromkeys(["any.dim", "any.dims"], _truth("max")),
    **dict.fromkeys(["all", "_is_all_true"], "... -> | ...:min"),
    **dict.fromkeys(["all.dim", "all.dims"], _truth("min")),
    "prod": pattern("... -> | ...:none ...:local", form=_prod),
    "prod.dim_int": pattern("[dim] -> ... | dim:none dim:local", form=_prod),
    "linalg_vector_norm": _vector_norm,
    "hash_tensor": "[dim] -> ... | dim:whole",
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    **by_torch("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype", "renorm"),
    **dict.fromkeys(["aminmax", "_aminmax", "_aminmax.dim"], _both_ends),
    "var.correction": _variance(),
    "std.correction": _variance(root=True),
    "var_mean.correction": _variance(mean=True),
    "std_mean.correction": _variance(root=True, mean=True),
}
