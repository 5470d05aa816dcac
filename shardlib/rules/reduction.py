"""Reductions: a cut factor that is reduced leaves a pending sum, maximum or minimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.manual.collectives import all_gather
from shardlib.rules.pointwise import pointwise
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import Rows, cut, wide, worst
from shardlib.rules.space import Space, arg, axes, numel, result_dtype, result_shape

aten = torch.ops.aten
_DIM = (1, "dim")


def reduction(
    kind: str | None,
    *,
    dim: tuple[int, str] | None = None,
    linear: bool = False,
    local: Callable[[Local], Any] | None = None,
) -> RuleFn:
    """The rule of an op that reduces some dims (all, when it takes none) to `kind`; None: these dims stay whole.

    `dim` is the position and name of the argument that lists the dims.
    """

    def rule(call: Call) -> Rule:
        shape = call.operands[0].shape
        reduced = axes(arg(call, *dim) if dim else None, len(shape))
        keepdim = len(result_shape(call)) == len(shape)
        space = Space()
        x = space.dims(shape, whole=reduced if kind is None else ())
        gone = [f for i in reduced if shape for f in x[i]]
        out = [() if i in reduced else d for i, d in enumerate(x) if keepdim or i not in reduced]
        return space.rule(
            [x],
            [out] * len(call.results),
            reduce=dict.fromkeys(gone, kind) if kind else {},
            linear=[{0}] if linear else [],
            local=local,
            local_factors=gone if local else (),
            flops=numel(shape),
        )

    return rule


def _mean(local: Local) -> Any:
    """Local sum over global count; half precision is summed in single, where counts do not overflow."""
    call = local.call
    shape, out = call.operands[0].shape, result_shape(call)
    dims = (arg(local, 1, "dim") if call.target == aten.mean.dim else None) or None

    def form(x: Tensor) -> Tensor:
        total = x.sum(dims, keepdim=len(out) == len(shape), dtype=wide(result_dtype(call)))
        return (total / (numel(shape) // max(numel(out), 1))).to(result_dtype(call))

    return local.run(form, local.args[0])


def _extreme(local: Local) -> Any:
    """amax, amin, max, min of shards that may be empty: these count as one worst element."""
    rows, call = Rows.of(local, range(len(local.call.operands[0].shape))), local.call
    fill = worst(call.operands[0].dtype, lowest=call.target in (aten.amax.default, aten.max.default))
    form = lambda x, *rest, **how: call.target(rows.held(x, fill), *rest, **how)
    return local.run(form, *local.args, **local.kwargs)


def _aminmax(local: Local) -> Any:
    """Both ends of a row: a pending value can be one kind of reduction only."""
    shape = local.call.operands[0].shape
    dims = axes(arg(local, 1, "dim"), len(shape))
    rows, kept = Rows.of(local, dims), len(result_shape(local.call)) == len(shape)

    def form(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(end if kept else end.squeeze(dims) for end in (rows.min(x), rows.max(x)))

    return local.run(form, local.args[0])


def _truth(kind: str) -> RuleFn:
    """`any` and `all` of a list of dims: only here, an empty list means none of them."""
    reduced, kept = reduction(kind, dim=_DIM), pointwise()
    return lambda call: kept(call) if arg(call, 1, "dim") in ([], ()) else reduced(call)


def _prod(local: Local) -> Any:
    """Products of the pieces, gathered: no sum or maximum can stand for them while they are pending."""
    call, row = local.call, cut(local, local.rule.reduce)

    def form(*args: Any, **kwargs: Any) -> Tensor:
        pieces = all_gather(call.target(*args, **(kwargs | {"dtype": result_dtype(call)})), row, tiled=False)
        return pieces.prod(0, dtype=result_dtype(call))  # type: ignore[no-any-return]

    return local.run(form, *local.args, **local.kwargs)


# Variance, written as sums, so that it may be cut like them -----------------------------------------------------------


def _moments(x: Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean, in two passes, so that nothing cancels."""
    dims = axes(dim, x.dim())
    count = numel([x.shape[d] for d in dims if x.dim()])
    value = x.to(wide(x.dtype))
    mean = value.mean(dims, keepdim=True)
    centred = value - mean
    square = (centred * centred.conj()).real if x.is_complex() else centred * centred
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


ROWS: dict[str, RuleFn | str] = {
    "sum": reduction("sum", linear=True),
    "sum.dim_IntList": reduction("sum", dim=_DIM, linear=True),
    "nansum": reduction("sum", dim=_DIM),
    **dict.fromkeys(["count_nonzero", "count_nonzero.dim_IntList"], reduction("sum", dim=_DIM)),
    "mean": reduction("sum", linear=True, local=_mean),
    "mean.dim": reduction("sum", dim=_DIM, linear=True, local=_mean),
    "amax": reduction("max", dim=_DIM, local=_extreme),
    "amin": reduction("min", dim=_DIM, local=_extreme),
    "max": reduction("max", local=_extreme),
    "min": reduction("min", local=_extreme),
    **dict.fromkeys(["aminmax", "_aminmax", "_aminmax.dim"], reduction("none", dim=_DIM, local=_aminmax)),
    "any": reduction("max"),
    **dict.fromkeys(["any.dim", "any.dims"], _truth("max")),
    "all": reduction("min"),
    **dict.fromkeys(["all.dim", "all.dims"], _truth("min")),
    "_is_any_true": reduction("max"),
    "_is_all_true": reduction("min"),
    "prod": reduction("none", local=_prod),
    "prod.dim_int": reduction("none", dim=_DIM, local=_prod),
    "hash_tensor": reduction(None, dim=_DIM),
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    "var.correction": _variance(),
    "std.correction": _variance(root=True),
    "var_mean.correction": _variance(mean=True),
    "std_mean.correction": _variance(root=True, mean=True),
}
