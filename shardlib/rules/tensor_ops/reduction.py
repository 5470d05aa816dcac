"""Reductions: over a sharded factor they leave a partial sum, maximum or minimum.

Norms that are a sum of first powers, a count or a maximum stay partial. For other norms the devices sum the powers
before they take the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.primitives.collectives import all_gather, psum
from shardlib.rules.iteration_space import arg, normalize_dims, result, result_shape
from shardlib.rules.local_forms.helpers import ReducedDims, accumulation_dtype, neutral_extreme, sharded_factors
from shardlib.rules.out_variants import by_torch
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn
from shardlib.rules.tensor_ops.pointwise import pointwise

aten = torch.ops.aten


def _mean(local: LocalBuilder, x: Tensor, dim: Any = None, *_: Any, **__: Any) -> Tensor:
    """Returns the local sum over the global count. Half precision is summed in float32, where it does not overflow."""
    shape, out, dtype = local.call.operands[0].shape, result_shape(local.call), result(local.call).dtype
    dims = normalize_dims(dim, len(shape))
    count = math.prod(shape) // max(math.prod(out), 1)
    return (x.sum(dims, keepdim=len(out) == len(shape), dtype=accumulation_dtype(dtype)) / count).to(dtype)


def _extreme(local: LocalBuilder, x: Tensor, *args: Any, **named: Any) -> Any:
    """amax, amin, max, min."""
    target = local.call.target
    fill = neutral_extreme(x.dtype, lowest=target in (aten.amax.default, aten.max.default))
    return target(ReducedDims.over_dim_argument(local).fill_empty(x, fill), *args, **named)


def _truth(kind: str) -> RuleFn:
    """`any` and `all` of a list of dims. Only for these ops, an empty list means no dims."""
    reduced, unreduced = pattern(f"[dim] -> ... | dim:{kind}"), pointwise()
    return lambda call: unreduced(call) if arg(call, "dim") in ([], ()) else reduced(call)


def _prod(local: LocalBuilder, *args: Any, **kwargs: Any) -> Tensor:
    """Gathers the products of the shards: there is no partial kind for products."""
    row, options = sharded_factors(local, local.rule.reduce), {"dtype": result(local.call).dtype}
    products = all_gather(local.call.target(*args, **(kwargs | options)), row, tiled=False)
    out: Tensor = products.prod(0, **options)
    return out


# Norms ---------------------------------------------------------------------------------------------------------------

_PARTIAL_KINDS = {math.inf: "max", -math.inf: "min", 0: "sum", 1: "sum"}


def _vector_norm(call: Call) -> Rule | None:
    """`linalg_vector_norm(x, ord, dim, keepdim, dtype)`."""
    order = arg(call, "ord")
    return pattern(f"[dim] -> ... | dim:{_PARTIAL_KINDS.get(order, 'none')} dim:local", form=_norm)(call)


def _norm(local: LocalBuilder, x: Tensor, order: float = 2, *args: Any, **named: Any) -> Tensor:
    reduced, out = ReducedDims.over_dim_argument(local), result(local.call).dtype
    filled = reduced.fill_empty(x, math.inf if order < 0 else 0)  # changes no norm
    if order in _PARTIAL_KINDS:
        power: Tensor = local.call.target(filled, order, *args, **named)
        return power
    acc = accumulation_dtype(out).to_complex() if x.is_complex() else accumulation_dtype(out)
    norm = torch.linalg.vector_norm(filled, order, reduced.dims, reduced.keepdim, dtype=acc)
    powers: Tensor = psum(norm**order, reduced.factors)
    return powers.pow(1 / order).to(out)


# Variance as sums, which may be sharded -------------------------------------------------------------------------------


def _moments(x: Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean, in two passes, so that nothing cancels."""
    dims = normalize_dims(dim, x.dim())
    count = math.prod([x.shape[d] for d in dims if x.dim()])
    value = x.to(accumulation_dtype(x.dtype))
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
    """Two reductions: a partial value has one kind."""
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
