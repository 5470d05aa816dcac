"""Softmax and its like, along a cut dim: devices exchange the maximum and the sum of a row, never its elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import cast, never_empty, wide, worst
from shardlib.rules.space import Dim, Space, arg, axes, axis, numel, result_shape

aten = torch.ops.aten


def _along(form: Callable[[Local, int, Dim], Any], dim: int, *, linear: bool = False) -> RuleFn:
    """The rule of an op along the dim whose argument stands at `dim`, with a form for when it is cut."""

    def rule(call: Call) -> Rule:
        space = Space()
        shape = result_shape(call)
        x = space.dims(shape)
        at = axis(arg(call, dim, "dim"), len(shape))
        row = x[at] if shape else ()
        return space.rule(
            [x] * len(call.operands),
            [x],
            linear=[{0}] if linear else [],
            local=lambda local: form(local, at, row),
            local_factors=row,
            flops=4 * numel(shape),
        )

    return rule


def _shifted(local: Local, x: Any, dtype: torch.dtype, dims: list[int], row: Dim) -> tuple[Any, Any]:
    """`x - max`, so that no exponential overflows, and the maximum; x has `dtype`, the factors `row` are reduced."""
    top = local.op(aten.amax.default, never_empty(local, x, 0, row, worst(dtype, lowest=True)), dims, True)
    for factor in row:
        top = local.all_reduce(top, factor, "max")
    return local.op(aten.sub.Tensor, x, top), top


def _total(local: Local, x: Any, dims: list[int], row: Dim) -> Any:
    total = local.op(aten.sum.dim_IntList, x, dims, True)
    for factor in row:
        total = local.all_reduce(total, factor, "sum")
    return total


def _softmax(local: Local, dim: int, row: Dim) -> Any:
    x, have, acc, out = _input(local)
    shifted, _ = _shifted(local, cast(local, x, have, acc), acc, [dim], row)
    exp = local.op(aten.exp.default, shifted)
    return cast(local, local.op(aten.div.Tensor, exp, _total(local, exp, [dim], row)), acc, out)


def _safe_softmax(local: Local, dim: int, row: Dim) -> Any:
    """A row in which everything is masked away gives zeros; its maximum is -inf."""
    x, have, acc, out = _input(local)
    shifted, top = _shifted(local, cast(local, x, have, acc), acc, [dim], row)
    exp = local.op(aten.exp.default, shifted)
    share = local.op(aten.div.Tensor, exp, _total(local, exp, [dim], row))
    empty = local.op(aten.eq.Scalar, top, float("-inf"))
    return cast(local, local.op(aten.masked_fill.Scalar, share, empty, 0), acc, out)


def _log_softmax(local: Local, dim: int, row: Dim) -> Any:
    x, have, acc, out = _input(local)
    shifted, _ = _shifted(local, cast(local, x, have, acc), acc, [dim], row)
    total = _total(local, local.op(aten.exp.default, shifted), [dim], row)
    return cast(local, local.op(aten.sub.Tensor, shifted, local.op(aten.log.default, total)), acc, out)


def _softmax_backward(local: Local, dim: int, row: Dim) -> Any:
    grad, y, acc, out = _grad(local)
    product = local.op(aten.mul.Tensor, grad, y)
    pull = local.op(aten.mul.Tensor, y, _total(local, product, [dim], row))
    return cast(local, local.op(aten.sub.Tensor, product, pull), acc, out)


def _log_softmax_backward(local: Local, dim: int, row: Dim) -> Any:
    grad, y, acc, out = _grad(local)
    pull = local.op(aten.mul.Tensor, local.op(aten.exp.default, y), _total(local, grad, [dim], row))
    return cast(local, local.op(aten.sub.Tensor, grad, pull), acc, out)


def _input(local: Local) -> tuple[Any, torch.dtype, torch.dtype, torch.dtype]:
    """The operand, its dtype, the dtype to compute in, and the result's."""
    out = local.call.results[0]
    assert out is not None
    have = local.call.operands[0].dtype
    return local.args[0], have, wide(out.dtype), out.dtype


def _grad(local: Local) -> tuple[Any, Any, torch.dtype, torch.dtype]:
    """The cotangent and the softmax, both in the dtype to compute in, that dtype, and the result's."""
    out = local.call.results[0]
    assert out is not None
    acc = wide(local.call.operands[0].dtype)
    grad, y = (cast(local, x, m.dtype, acc) for x, m in zip(local.args[:2], local.call.operands, strict=True))
    return grad, y, acc, out.dtype


def _logsumexp(call: Call) -> Rule:
    space = Space()
    shape = call.operands[0].shape
    reduced = axes(arg(call, 1, "dim"), len(shape))
    ordered = not call.operands[0].dtype.is_complex  # others have no maximum to shift by
    x = space.dims(shape, whole=() if ordered else reduced)
    kept = len(result_shape(call)) == len(shape)
    row = tuple(f for i in reduced if shape for f in x[i])

    def local(local: Local) -> Any:
        value, have, acc, out = _input(local)
        value = cast(local, value, have, acc)
        _, top = _shifted(local, value, acc, reduced, row)
        # Rows of nothing but -inf (or with +inf) are shifted by nothing, as torch does.
        infinite = local.op(aten.eq.Scalar, local.op(aten.abs.default, top), float("inf"))
        top = local.op(aten.masked_fill.Scalar, top, infinite, 0)
        exp = local.op(aten.exp.default, local.op(aten.sub.Tensor, value, top))
        total = local.op(aten.add.Tensor, local.op(aten.log.default, _total(local, exp, reduced, row)), top)
        return cast(local, total if kept else local.op(aten.squeeze.dims, total, reduced), acc, out)

    out = [() if i in reduced else d for i, d in enumerate(x) if kept or i not in reduced]
    if not ordered:
        return space.rule([x], [out], flops=3 * numel(shape))
    return space.rule(
        [x], [out], reduce=dict.fromkeys(row, "none"), local=local, local_factors=row, flops=3 * numel(shape)
    )


def _masked(call: Call) -> Rule:
    """`_masked_softmax(x, mask, dim, kind)`: the mask is one of queries and keys (kind 0), of a batch's keys (1), or
    shaped like x; its backward sees the last kind only."""
    *_, x_meta, mask = call.operands
    backward = len(call.operands) == 3
    shape = x_meta.shape
    space = Space()
    dim = arg(call, 3 if backward else 2, "dim")
    at = axis(-1 if dim is None else dim, len(shape))
    x = space.dims(shape, whole=[at])
    kind = None if backward else arg(call, 3, "mask_type")
    if kind in (0, 1):
        space.whole |= set(x[-2])  # the kernel wants a square
    by = x[-2:] if kind == 0 else [x[0], x[-1]] if kind == 1 else x
    fits = [space.size(d) for d in by] == list(mask.shape)
    if not fits:
        space.whole |= space.sizes.keys()
    return space.rule(
        [x] * (len(call.operands) - 1) + [list(by) if fits else space.dims(mask.shape, whole=range(len(mask.shape)))],
        [x],
        linear=[{0}] if backward else [],
        flops=4 * numel(shape),
    )


ROWS: dict[str, RuleFn | str] = {
    "_softmax": _along(_softmax, 1),
    "_log_softmax": _along(_log_softmax, 1),
    "_safe_softmax": _along(_safe_softmax, 1),
    # `out=` leaves the composite ops as they are.
    "softmax.int": _along(_softmax, 1),
    "log_softmax.int": _along(_log_softmax, 1),
    "_softmax_backward_data": _along(_softmax_backward, 2, linear=True),
    "_log_softmax_backward_data": _along(_log_softmax_backward, 2, linear=True),
    "logsumexp": _logsumexp,
    **dict.fromkeys(["_masked_softmax", "_masked_softmax_backward"], _masked),
}
