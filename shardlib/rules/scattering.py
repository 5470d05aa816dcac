"""Writing to places that an index names, with any reduction, and reading and writing a tensor as one row.

Along a cut dim devices do as `writing` says. What is added up may come from all devices; so may what is compared, as
long as the old values count too. Every other reduction needs its entries in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.lineup import whole
from shardlib.rules.rule import Call, RuleFn
from shardlib.rules.space import arg
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


def _take(x: Tensor, index: Tensor) -> Tensor:
    out: Tensor = aten.index.Tensor(x.reshape(-1), [index])
    return out


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat: Tensor = aten.index_put.default(x.reshape(-1), [index], source.reshape(index.shape), accumulate)
    return flat.reshape(x.shape)


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
    **dict.fromkeys(["masked_scatter", "masked_scatter_backward"], whole),
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    "take": _take,
    "put": _put,
    "_unsafe_masked_index": _masked_index,
    "_unsafe_masked_index_put_accumulate": _masked_put,
}
