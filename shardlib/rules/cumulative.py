"""Running sums and their like: local scans, then what came before.

Along a cut dim every device scans its piece; the totals of the pieces are gathered, and each device combines those of
the pieces before its own with its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.internals import schema_of
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import cast, never_empty, wide, worst
from shardlib.rules.space import Space, arg, axis, numel

aten = torch.ops.aten
Combination = Callable[[Local, int, str], Any]  # the dim, and the factor that it is


def scan(form: Combination, *, linear: bool = False) -> RuleFn:
    """The rule of an op that runs along one dim and keeps the shape."""

    def rule(call: Call) -> Rule:
        shape = call.operands[0].shape
        space = Space()
        x = space.dims(shape)
        at = axis(arg(call, 1, "dim"), len(shape))
        row = x[at] if shape else ()
        if call.operands[0].dtype.is_complex and "log" in schema_of(call.target).name:
            space.whole |= set(row)  # a logarithm of a complex number is one of many
        return space.rule(
            [x],
            [x] * len(call.results),
            linear=[{0}] if linear else [],
            local=lambda local: form(local, at, *row),
            local_factors=row,
            flops=numel(shape),
        )

    return rule


def _before(local: Local, total: Any, at: int, row: str) -> Any:
    """The totals, of size 1 along `at`, of all pieces before this device's: none on the first."""
    totals = local.all_gather(total, row, at, local.rule.operands[0])
    return local.op(aten.slice.Tensor, totals, at, 0, local.position(row))


def _combined(fold: Any, combine: Any) -> Combination:
    """A scan of one op: `fold` makes the total of a dim, `combine` puts what came before in front of a scan."""

    def form(local: Local, at: int, row: str) -> Any:
        out = local.call.results[0]
        assert out is not None
        acc = wide(out.dtype)
        x = cast(local, local.args[0], local.call.operands[0].dtype, acc)
        total = local.op(fold, x, *_dims(fold, at), True)
        before = local.op(fold, _before(local, total, at, row), *_dims(fold, at), True)
        return cast(local, local.op(combine, local.op(local.call.target, x, at), before), acc, out.dtype)

    return form


def _dims(fold: Any, at: int) -> tuple[Any]:
    return (at,) if fold is aten.prod.dim_int else ([at],)


def _record(local: Local, at: int, row: str) -> Any:
    """cummax, cummin: the last of several equal values counts, and a NaN beats everything that follows, but a NaN."""
    lowest = local.call.target is aten.cummax.default
    fill = worst(local.call.operands[0].dtype, lowest=lowest)
    padded = never_empty(local, local.args[0], 0, [row], fill)
    best, index = local.op(local.call.target, local.args[0], at)
    index = local.op(aten.add.Tensor, index, local.offset(row))

    last, where = local.op(local.call.target, padded, at)
    last, where = (local.op(aten.slice.Tensor, x, at, -1) for x in (last, where))
    where = local.op(aten.add.Tensor, where, local.offset(row))
    front = [0, 0] * (len(local.rule.operands[0]) - 1 - at) + [1, 0]  # so that something comes before the first
    last = local.op(aten.constant_pad_nd.default, _before(local, last, at, row), front, fill)
    where = local.op(aten.constant_pad_nd.default, _before(local, where, at, row), front, 0)
    last, which = local.op(local.call.target, last, at)
    last, which = (local.op(aten.slice.Tensor, x, at, -1) for x in (last, which))
    where = local.op(aten.gather.default, where, at, which)

    holds = local.op((aten.ge if lowest else aten.le).Tensor, best, last)
    own = local.op(aten.logical_or.default, holds, local.op(aten.ne.Tensor, best, best))
    return local.op(aten.where.self, own, best, last), local.op(aten.where.self, own, index, where)


ROWS: dict[str, RuleFn | str] = {
    "cumsum": scan(_combined(aten.sum.dim_IntList, aten.add.Tensor), linear=True),
    "cumprod": scan(_combined(aten.prod.dim_int, aten.mul.Tensor)),
    **dict.fromkeys(["logcumsumexp", "_logcumsumexp"], scan(_combined(aten.logsumexp.default, aten.logaddexp.default))),
    **dict.fromkeys(["cummax", "cummin"], scan(_record)),
}
