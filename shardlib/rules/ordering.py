"""Sorting, selecting and finding extremes along a dim.

Along a cut dim a selection asks every device for what it found in its piece: the largest value and where it is, or its
`k` candidates. What needs the order of all elements (sort, median, mode) keeps the dim whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardlib.internals import schema_of
from shardlib.rules.reduction import reduction
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import cut, is_zero, may_be_empty, never_empty, worst
from shardlib.rules.space import Dim, Space, arg, axes, axis, numel, result_shape

aten = torch.ops.aten

_LOWEST = ("aten::max", "aten::argmax")


def ordered(dim: tuple[int, str, int | None]) -> RuleFn:
    """The rule of an op that reorders (sort) or picks (kthvalue) along one dim, which stays whole."""

    def rule(call: Call) -> Rule:
        shape, out_shape = call.operands[0].shape, result_shape(call)
        space = Space()
        at = axis(arg(call, *dim), len(shape))
        x = space.dims(shape, whole=[at])
        # Positions along the dim mean something else in the result: no common factor.
        row = [space.dim(out_shape[at], "o", whole=True)] if shape and len(out_shape) == len(shape) else []
        out = [*x[:at], *row, *x[at + 1 :]]
        return space.rule([x], [out] * len(call.results), flops=numel(shape))

    return rule


def _median(call: Call) -> Rule | None:
    """The median along a dim; torch's kernel reads past a dim of stride 0, so it gets memory of its own."""

    def local(local: Local) -> Any:
        return local.op(call.target, local.op(aten.contiguous.default, local.args[0]), *local.args[1:], **local.kwargs)

    rule = ordered((1, "dim", None))(call)
    return rule and replace(rule, local=local, dense=True)


def _topk(call: Call) -> Rule | None:
    """`topk(x, k, dim, largest, sorted)`. Unsorted results come in no order that pieces could keep."""
    shape = call.operands[0].shape
    k, at = call.args[1], axis(arg(call, 2, "dim", -1), len(shape))
    if not shape or not arg(call, 4, "sorted", True) or not 0 < 2 * k <= shape[at]:
        return ordered((2, "dim", -1))(call)
    space = Space()
    x = space.dims(shape)
    out: list[Dim] = [*x[:at], space.dim(k, "o", whole=True), *x[at + 1 :]]

    def local(local: Local) -> Any:
        return _candidates(local, at, k)

    row = x[at]
    return space.rule(
        [x], [out, out], reduce=dict.fromkeys(row, "none"), local=local, local_factors=row, flops=numel(shape)
    )


def _candidates(local: Local, at: int, k: int) -> Any:
    """The `k` best of every piece, gathered, and the `k` best among them; short pieces are gathered as they are."""
    (row,) = local.rule.operands[0][at]
    labels, size = local.rule.operands[0], local.size(row)
    how = (at, arg(local, 3, "largest", True), True)
    if k * local.ways(row) >= local.rule.sizes[row]:
        return local.op(aten.topk.default, local.all_gather(local.args[0], row, at, labels, size), k, *how)
    mine = size.at_most(k) if not isinstance(size, int) else min(size, k)
    best, where = local.op(aten.topk.default, local.args[0], mine, *how)
    where = local.op(aten.add.Tensor, where, local.offset(row))
    best, where = (local.all_gather(value, row, at, labels, mine) for value in (best, where))
    best, among = local.op(aten.topk.default, best, k, *how)
    return best, local.op(aten.gather.default, where, at, among)


def _extreme(call: Call) -> Rule:
    """`max(x, dim)` and `argmax(x, dim)`, with the first index of several, or of several NaNs."""
    space = Space()
    shape = call.operands[0].shape
    reduced = axes(arg(call, 1, "dim"), len(shape))
    x = space.dims(shape)
    row = [f for i in reduced if shape for f in x[i]]
    keepdim = len(result_shape(call)) == len(shape)
    out = [() if i in reduced else d for i, d in enumerate(x) if keepdim or i not in reduced]
    return space.rule(
        [x],
        [out] * len(call.results),
        reduce=dict.fromkeys(row, "none"),
        local=_found,
        local_factors=row,
        flops=numel(shape),
    )


def _found(local: Local) -> Any:
    """The best value of all pieces, and the least index among the pieces that have it."""
    x, labels, rule = local.call.operands[0], local.rule.results[0], local.rule
    dim, lowest = arg(local, 1, "dim"), schema_of(local.call.target).name in _LOWEST
    value = never_empty(local, local.args[0], 0, rule.reduce, worst(x.dtype, lowest=lowest))
    if dim is None:
        value = local.op(aten.reshape.default, value, [-1])
    target = aten.max.dim if lowest else aten.min.dim
    best, index = local.op(target, value, 0 if dim is None else dim, len(labels) == len(x.shape) and dim is not None)
    index = _global(local, index, axes(dim, len(x.shape)))
    if dim is None and labels:
        best, index = (local.op(aten.reshape.default, y, [1] * len(labels)) for y in (best, index))
    for factor in cut(local, rule.reduce):
        top = local.all_reduce(best, factor, "max" if lowest else "min", labels)
        here = local.op(aten.eq.Tensor, best, top)
        nan = local.op(aten.ne.Tensor, best, best)
        elsewhere = local.op(aten.logical_not.default, local.op(aten.logical_or.default, here, nan))
        index = local.op(aten.masked_fill.Scalar, index, elsewhere, numel(x.shape))
        index, best = local.all_reduce(index, factor, "min", labels), top
    return (best, index) if len(local.call.results) == 2 else index


def _global(local: Local, index: Any, dims: list[int]) -> Any:
    """A position in the flattened `dims` of this device's piece of operand 0, as one in those of the whole."""
    labels, shape = local.rule.operands[0], local.call.operands[0].shape
    if len(dims) == 1:
        (dim,) = dims
        return local.op(aten.add.Tensor, index, sum(local.offset(f) for f in labels[dim]))
    out, stride = None, 1
    for dim in reversed(dims):
        size, offset = 1, 0
        for f in labels[dim]:
            size, offset = local.size(f), local.offset(f)
            size = size + is_zero(size) if may_be_empty(local, f) else size
        along = local.op(aten.add.Tensor, local.op(aten.remainder.Scalar, index, size), offset)
        along = local.op(aten.mul.Tensor, along, stride)
        out = along if out is None else local.op(aten.add.Tensor, out, along)
        index, stride = local.op(aten.floor_divide.Scalar, index, size), stride * shape[dim]
    return out


ROWS: dict[str, RuleFn | str] = {
    "sort": ordered((1, "dim", -1)),
    "sort.stable": ordered((2, "dim", -1)),
    "topk": _topk,
    "kthvalue": ordered((2, "dim", -1)),
    "mode": ordered((1, "dim", -1)),
    **dict.fromkeys(["median.dim", "nanmedian.dim"], _median),
    **dict.fromkeys(["median", "nanmedian"], reduction(None)),
    **dict.fromkeys(["max.dim", "min.dim", "argmax", "argmin"], _extreme),
}
