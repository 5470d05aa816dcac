"""Writing to places that an index names, with any reduction, and reading and writing a tensor as one row.

Along a cut dim devices do as `writing` says. What is added up may come from all devices; so may what is compared, as
long as the old values count too. Every other reduction needs its entries in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardlib.manual.collectives import piece
from shardlib.rules.lineup import whole
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import checked, cut, once
from shardlib.rules.space import Dim, Space, arg, numel
from shardlib.rules.writing import extremes, scattered

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


def _place(index: Tensor, row: str, shape: Sequence[int]) -> Tensor:
    """Indices into a flattened tensor of `shape`, of which the first dim is cut, as this device's piece counts; what
    lies elsewhere is one behind the last."""
    inner, (offset, rows, _) = numel(shape[1:]), piece(row)
    mine = checked(index, numel(shape), -numel(shape)) % numel(shape) - offset * inner
    outside = (mine < 0) | (mine >= rows * inner)
    return mine.masked_fill(outside, rows * inner)


def _rows(call: Call) -> tuple[Space, list[Dim], list[Dim], Dim]:
    """Labels of a table that is read as one row, of which only the major dim may be cut, and of the index."""
    space = Space()
    shape = call.operands[0].shape
    x = space.dims(shape, whole=range(1, len(shape)))
    return space, x, space.dims(call.operands[1].shape, "j"), x[0] if shape else ()


def _take(call: Call) -> Rule:
    space, x, index, row = _rows(call)

    def form(x: Tensor, index: Tensor) -> Tensor:
        return pad(x.reshape(-1), [0, 1]).take(_place(index, row[0], call.operands[0].shape))  # the last is a zero

    def local(local: Local) -> Any:
        return local.run(form, *local.args)

    reduce = dict.fromkeys(row, "sum")
    flops = numel(call.operands[1].shape)
    return space.rule([x, index], [index], reduce=reduce, linear=[{0}], local=local, local_factors=row, flops=flops)


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
        mine, shared = cut(local, row), cut(local, entries)

        def form(x: Tensor, at: Tensor, *rest: Any, **named: Any) -> Tensor:
            flat = once(x, shared).reshape(-1)
            for f in mine:  # the place behind the last takes what lies on other devices
                at, flat = _place(at, f, call.operands[0].shape), pad(flat, [0, 1])
            return flat.put(at, *rest, **named).narrow(0, 0, x.numel()).reshape(x.shape)

        return local.run(form, *local.args, **local.kwargs)

    return space.rule(
        [x, index, source],
        [x],
        reduce=dict.fromkeys(entries, "sum") if adds else {},
        linear=[{0, 2}],
        local=local,
        local_factors=(*row, *entries),
        gathers=entries,
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
