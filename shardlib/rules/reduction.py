"""Reductions: a cut factor that is reduced leaves a pending sum, maximum or minimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.pointwise import pointwise
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import cast, cut, never_empty, wide, worst
from shardlib.rules.space import Space, arg, axes, numel, result_shape

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
    x, out = local.call.operands[0], local.call.results[0]
    assert out is not None
    acc = wide(out.dtype)
    dims = arg(local, 1, "dim") if local.call.target == aten.mean.dim else None
    total = local.op(aten.sum.dim_IntList, local.args[0], dims or None, len(out.shape) == len(x.shape), dtype=acc)
    mean = local.op(aten.div.Scalar, total, numel(x.shape) // max(numel(out.shape), 1))
    return cast(local, mean, acc, out.dtype)


def _extreme(local: Local) -> Any:
    """amax, amin, max, min of shards that may be empty: these count as one worst element."""
    fill = worst(local.call.operands[0].dtype, lowest=local.call.target in (aten.amax.default, aten.max.default))
    x = never_empty(local, local.args[0], 0, cut(local, local.rule.reduce), fill)
    return local.op(local.call.target, x, *local.args[1:], **local.kwargs)


def _aminmax(local: Local) -> Any:
    """Both ends of a row: a pending value can be one kind of reduction only."""
    x, labels = local.call.operands[0], local.rule.results[0]
    dims = axes(arg(local, 1, "dim"), len(x.shape))
    ends = []
    for target, kind in ((aten.amin.default, "min"), (aten.amax.default, "max")):
        value = never_empty(local, local.args[0], 0, local.rule.reduce, worst(x.dtype, lowest=kind == "max"))
        value = local.op(target, value, dims, len(labels) == len(x.shape))
        for factor in cut(local, local.rule.reduce):
            value = local.all_reduce(value, factor, kind, labels)
        ends.append(value)
    return tuple(ends)


def _truth(kind: str) -> RuleFn:
    """`any` and `all` of a list of dims: only here, an empty list means none of them."""
    reduced, kept = reduction(kind, dim=_DIM), pointwise()
    return lambda call: kept(call) if arg(call, 1, "dim") in ([], ()) else reduced(call)


def _prod(local: Local) -> Any:
    """Products of the pieces, gathered: no sum or maximum can stand for them while they are pending."""
    out, labels = local.call.results[0], local.rule.results[0]
    assert out is not None
    value = local.op(local.call.target, *local.args, **(local.kwargs | {"dtype": out.dtype}))
    for factor in cut(local, local.rule.reduce):
        pieces = local.all_gather(local.op(aten.unsqueeze.default, value, 0), factor, 0, ((), *labels))
        value = local.op(aten.prod.dim_int, pieces, 0, dtype=out.dtype)
    return value


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
