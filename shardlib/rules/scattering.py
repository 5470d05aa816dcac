"""Writing to places that an index names, with any reduction, and reading and writing a tensor as one row.

Along a cut dim devices do as `writing` says. What is added up may come from all devices; so may what is compared, as
long as the old values count too. Every other reduction needs its entries in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.lineup import whole
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import check, cut, never_empty
from shardlib.rules.space import Dim, Space, arg, numel
from shardlib.rules.writing import extremes, once, scattered

aten = torch.ops.aten


def _reduces(call: Call) -> str | None:
    """`scatter_reduce(x, dim, index, src, reduce, include_self)`."""
    if arg(call, 4, "reduce") == "sum":
        return "sum" if call.kwargs.get("include_self", True) else None
    return extremes(call)


def _adds(call: Call) -> str | None:
    """`scatter(x, dim, index, src, reduce)`."""
    return "sum" if call.kwargs["reduce"] == "add" else None


# A tensor as one row --------------------------------------------------------------------------------------------------


def _place(local: Local, index: Any, row: Dim) -> tuple[Any, Any, Any]:
    """Indices into the flattened operand 0, of which the first dim is cut, as this device's piece counts.

    Returns the index, where it lies outside, and how many elements the piece has.
    """
    shape = local.call.operands[0].shape
    inner = numel(shape[1:])
    size = local.size(row[0]) * inner
    mine = local.op(aten.remainder.Scalar, check(local, index, numel(shape), -numel(shape)), numel(shape))
    mine = local.op(aten.sub.Tensor, mine, local.offset(row[0]) * inner)
    below, above = local.op(aten.lt.Scalar, mine, 0), local.op(aten.ge.Scalar, mine, size)
    return mine, local.op(aten.logical_or.default, below, above), size


def _rows(call: Call) -> tuple[Space, list[Dim], list[Dim], Dim]:
    """Labels of a table that is read as one row, of which only the major dim may be cut, and of the index."""
    space = Space()
    shape = call.operands[0].shape
    x = space.dims(shape, whole=range(1, len(shape)))
    return space, x, space.dims(call.operands[1].shape, "j"), x[0] if shape else ()


def _take(call: Call) -> Rule:
    space, x, index, row = _rows(call)

    def local(local: Local) -> Any:
        mine, outside, _ = _place(local, local.args[1], row)
        mine = local.op(aten.masked_fill.Scalar, mine, outside, 0)
        found = local.op(aten.take.default, never_empty(local, local.args[0], 0, row), mine)
        return local.op(aten.masked_fill.Scalar, found, outside, 0)

    reduce = dict.fromkeys(row, "sum")
    return space.rule([x, index], [index], reduce=reduce, linear=[{0}], local=local, local_factors=row)


def _put(call: Call) -> Rule:
    """`put(x, index, source, accumulate)`; without accumulation later entries win, so they stay together."""
    space, x, index, row = _rows(call)
    entries = [f for d in index for f in d]
    adds = bool(arg(call, 3, "accumulate", False))
    shape = call.operands[2].shape
    matched = shape == call.operands[1].shape
    source = index if matched else space.dims(shape, "s", whole=range(len(shape)))
    if not adds or not matched:
        space.whole |= set(entries)

    def local(local: Local) -> Any:
        flat = local.op(aten.reshape.default, once(local, local.args[0], entries), [-1])
        at = local.args[1]
        if cut(local, row):
            # The place behind the last takes what lies on other devices.
            at, outside, size = _place(local, at, row)
            at = local.op(aten.masked_fill.Scalar, at, outside, 0)
            at = local.op(aten.add.Tensor, at, local.op(aten.mul.Scalar, outside, size))
            flat = local.op(aten.constant_pad_nd.default, flat, [0, 1], 0)
        flat = local.op(aten.put.default, flat, at, *local.args[2:], **local.kwargs)
        if cut(local, row):
            flat = local.op(aten.slice.Tensor, flat, 0, 0, size)
        shape = [math.prod(local.size(f) for f in d) for d in local.rule.operands[0]]
        return local.op(aten.reshape.default, flat, shape)

    return space.rule(
        [x, index, source],
        [x],
        reduce=dict.fromkeys(entries, "sum") if adds else {},
        linear=[{0, 2}],
        local=local,
        local_factors=(*row, *entries),
        flops=numel(call.operands[1].shape),
    )


# Masked indices -------------------------------------------------------------------------------------------------------


def _clamped(x: Tensor, indices: list[Tensor | None]) -> list[Tensor | None]:
    return [i if i is None else i.clamp(-n, n - 1) for i, n in zip(indices, x.shape, strict=False)]


def _masked_index(x: Tensor, mask: Tensor, indices: list[Tensor | None], fill: float) -> Tensor:
    """Read where the mask says; elsewhere an index may be anything, and the table may be empty."""
    if x.numel() == 0:
        indexed = [i is not None for i in indices] + [False] * x.dim()
        x = x.new_full([max(n, 1) if at else n for n, at in zip(x.shape, indexed, strict=False)], fill)
    out: Tensor = aten.index.Tensor(x, _clamped(x, indices))
    return out.masked_fill(~mask, fill)


def _masked_put(x: Tensor, mask: Tensor, indices: list[Tensor | None], values: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    out: Tensor = aten.index_put.default(x, _clamped(x, indices), values.masked_fill(~mask, 0), True)
    return out


ROWS: dict[str, RuleFn | str] = {
    "scatter_reduce.two": scattered(_reduces),
    **dict.fromkeys(["scatter.reduce", "scatter.value_reduce"], scattered(_adds)),
    "take": _take,
    "put": _put,
    **dict.fromkeys(["masked_scatter", "masked_scatter_backward"], whole),
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    "_unsafe_masked_index": _masked_index,
    "_unsafe_masked_index_put_accumulate": _masked_put,
}
