"""Reductions: a cut factor that is reduced leaves a pending sum, maximum or minimum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import cast, cut, never_empty, wide, worst
from shardlib.rules.space import Dim, Space, arg, axes, axis, numel, result_shape

aten = torch.ops.aten


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


def scan(dim: int = 1, *, linear: bool = False) -> RuleFn:
    """The rule of an op that runs along one dim, which stays whole, and keeps the shape."""

    def rule(call: Call) -> Rule:
        shape = call.operands[0].shape
        space = Space()
        x = space.dims(shape, whole=[axis(arg(call, dim, "dim"), len(shape))])
        out = [x] * len(call.results)
        return space.rule([x], out, linear=[{0}] if linear else [], flops=numel(shape))

    return rule


def ordered(dim: tuple[int, str, int | None]) -> RuleFn:
    """The rule of an op that reorders (sort) or picks (topk) along one dim, which stays whole."""

    def rule(call: Call) -> Rule:
        shape = call.operands[0].shape
        space = Space()
        at = axis(arg(call, *dim), len(shape)) if shape else 0
        x = space.dims(shape, whole=[at])
        out: list[Dim] = list(x)
        first = call.results[0]
        # Positions along the dim mean something else in the result: no common factor.
        if shape and first is not None:
            out[at] = space.dim(first.shape[at], "o", whole=True)
        return space.rule([x], [out] * len(call.results), flops=numel(shape))

    return rule


def _mean(local: Local) -> Any:
    """Local sum over global count; half precision is summed in single, where counts do not overflow."""
    x, out = local.call.operands[0], local.call.results[0]
    assert out is not None
    acc = wide(out.dtype)
    dims = arg(local, 1, "dim") if local.call.target == aten.mean.dim else None
    total = local.op(aten.sum.dim_IntList, local.args[0], dims or None, len(out.shape) == len(x.shape), dtype=acc)
    mean = local.op(aten.div.Scalar, total, numel(x.shape) // numel(out.shape))
    return cast(local, mean, acc, out.dtype)


def _extreme(local: Local) -> Any:
    """amax, amin, max, min of shards that may be empty: these count as one worst element."""
    fill = worst(local.call.operands[0].dtype, lowest=local.call.target in (aten.amax.default, aten.max.default))
    x = never_empty(local, local.args[0], 0, cut(local, local.rule.reduce), fill)
    return local.op(local.call.target, x, *local.args[1:], **local.kwargs)


def _norm(call: Call) -> Rule | None:
    """The 2-norm reduces over devices itself: its square root cannot wait for a pending sum."""
    two = arg(call, 1, "ord", 2) == 2 and call.operands[0].dtype.is_floating_point
    return (reduction("none", dim=(2, "dim"), local=_two_norm) if two else reduction(None, dim=(2, "dim")))(call)


def _two_norm(local: Local) -> Any:
    x, out = local.call.operands[0], local.call.results[0]
    assert out is not None
    acc = wide(out.dtype)
    keepdim = len(out.shape) == len(x.shape)
    norm = local.op(local.call.target, local.args[0], 2, arg(local, 2, "dim"), keepdim, dtype=acc)
    total = local.op(aten.mul.Tensor, norm, norm)
    for factor in cut(local, local.rule.reduce):
        total = local.all_reduce(total, factor, "sum")
    return cast(local, local.op(aten.sqrt.default, total), acc, out.dtype)


def _histc(call: Call) -> Rule:
    space = Space()
    shape = call.operands[0].shape
    counts = space.dims(result_shape(call), "o", whole=[0])
    return space.rule([space.dims(shape, whole=range(len(shape)))], [counts], flops=numel(shape))


_DIM = (1, "dim")


def _each(names: Iterable[str], make: RuleFn) -> dict[str, RuleFn | str]:
    return dict.fromkeys(names, make)


ROWS: dict[str, RuleFn | str] = {
    "sum": reduction("sum", linear=True),
    "sum.dim_IntList": reduction("sum", dim=_DIM, linear=True),
    "mean": reduction("sum", linear=True, local=_mean),
    "mean.dim": reduction("sum", dim=_DIM, linear=True, local=_mean),
    "amax": reduction("max", dim=_DIM, local=_extreme),
    "amin": reduction("min", dim=_DIM, local=_extreme),
    **_each(["max"], reduction("max", local=_extreme)),
    **_each(["min"], reduction("min", local=_extreme)),
    **_each(["any"], reduction("max")),
    **_each(["any.dim", "any.dims"], reduction("max", dim=_DIM)),
    **_each(["all"], reduction("min")),
    **_each(["all.dim", "all.dims"], reduction("min", dim=_DIM)),
    **_each(["max.dim", "min.dim", "argmax", "argmin", "median.dim"], reduction(None, dim=_DIM)),
    **_each(["prod", "std", "var", "var_mean"], reduction(None)),
    **_each(["prod.dim_int"], reduction(None, dim=_DIM)),
    **_each(
        ["var.correction", "var_mean.correction", "std.correction", "std_mean.correction"], reduction(None, dim=_DIM)
    ),
    **_each(["var.dim", "var_mean.dim", "std.dim"], reduction(None, dim=_DIM)),
    "linalg_vector_norm": _norm,
    "histc": _histc,
    "cumsum": scan(linear=True),
    **_each(["cumprod", "logcumsumexp", "cummax", "cummin"], scan()),
    "topk": ordered((2, "dim", -1)),
    "sort": ordered((1, "dim", -1)),
    "sort.stable": ordered((2, "dim", -1)),
}
