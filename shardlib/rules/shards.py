"""What `local` forms share: indices into a cut dim, shards that may be empty, and half precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch

from shardlib.internals import schema_of
from shardlib.ops.checks import CHECK_INDEX
from shardlib.rules.rule import Local

aten = torch.ops.aten


def cut(local: Local, factors: Iterable[str]) -> list[str]:
    """Those of `factors` that are cut here."""
    return [f for f in factors if local.axes(f)]


def is_zero(n: Any) -> Any:
    """1 where an int, possibly symbolic, is 0; else 0."""
    return int(n == 0) if isinstance(n, int) else n.eq(0)


def localise(local: Local, index: Any, factor: str) -> tuple[Any, Any]:
    """An index into the cut `factor`, as this device's shard counts: `(index, outside)`.

    `index` is 0 where the global index lies on another device, and `outside` is True there.
    """
    mine = local.op(aten.sub.Tensor, index, local.offset(factor))
    below = local.op(aten.lt.Scalar, mine, 0)
    above = local.op(aten.ge.Scalar, mine, local.size(factor))
    outside = local.op(aten.bitwise_or.Tensor, below, above)
    return local.op(aten.masked_fill.Scalar, mine, outside, 0), outside


def check(local: Local, index: Any, n: int, low: int = 0, ignore: int | None = None) -> Any:
    """An index into a dim of `n` elements; one that lies outside is an error when the program runs, as in torch."""
    local.op(CHECK_INDEX, index, low, n, ignore)
    return index


def may_be_empty(local: Local, factor: str) -> bool:
    """Whether some device of the mesh holds nothing of `factor`."""
    size = local.size(factor)
    if isinstance(size, int):
        return size == 0
    lengths = {a.name: a.of for a in local.axes(factor)}
    devices = itertools.product(*map(range, lengths.values()))  # 7 over (2 3) is 2 2 0 1 1 1
    return any(size.at(dict(zip(lengths, at, strict=True))) == 0 for at in devices)


def never_empty(local: Local, x: Any, position: int, factors: Iterable[str], value: float = 0) -> Any:
    """Operand `position` with one element of `value` in dims that are empty because `factors` are cut; x is its value.

    Reductions without a neutral element and indexing refuse empty dims.
    """
    at_risk = {f for f in factors if may_be_empty(local, f)}
    pads: list[Any] = []
    for dim in reversed(local.rule.operands[position]):
        size = math.prod(local.size(f) for f in dim)
        pads += [0, is_zero(size)] if at_risk & set(dim) else [0, 0]
    return local.op(aten.constant_pad_nd.default, x, pads, value) if at_risk else x


def worst(dtype: torch.dtype, *, lowest: bool) -> float:
    """The neutral element of a maximum (`lowest`) or a minimum."""
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    if dtype == torch.bool:
        return not lowest
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels add up values of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cast(local: Local, x: Any, have: torch.dtype, want: torch.dtype) -> Any:
    return x if have == want else local.op(aten._to_copy.default, x, dtype=want)


def positional(local: Local) -> list[Any]:
    """All arguments of the call by position, with the schema's defaults; for ops without keyword-only ones."""
    given = schema_of(local.call.target).arguments
    return [*local.args, *(local.kwargs.get(a.name, a.default_value) for a in given[len(local.args) :])]
