"""Running sums and their like: local scans, then what came before.

Along a cut dim every device scans its piece; the totals of the pieces are gathered, and each device combines those of
the pieces before its own with its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.internals import schema_of
from shardlib.manual.collectives import all_gather
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import Rows, widely, worst
from shardlib.rules.space import arg, axis

aten = torch.ops.aten
Form = Callable[..., Any]  # of the piece, the dim, the factor that it is, this device's place, and its first index


def _scan(form: Callable[[Local], Form], text: str) -> Callable[[Call], Rule]:
    """The rule of an op that runs along `dim`."""

    def local(local: Local) -> Any:
        at = axis(arg(local.call, 1, "dim"), len(local.call.operands[0].shape))
        return local.run(form(local), local.args[0], at, "dim", local.position("dim"), local.offset("dim"))

    def rule(call: Call) -> Rule:
        many = call.operands[0].dtype.is_complex and "log" in schema_of(call.target).name
        return pattern(f"{text} {'dim:whole' if many else ''}", local=local)(
            call
        )  # logarithms, of which there are many

    return rule


def _before(total: Tensor, at: int, row: str, place: int) -> Tensor:
    """The totals, of size 1 along `at`, of all pieces before this device's: none on the first."""
    return all_gather(total, row, at).narrow(at, 0, place)  # type: ignore[no-any-return]


def _combined(fold: Callable[..., Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Local], Form]:
    """A scan of one op: `fold` makes the total of a dim, `combine` puts what came before in front of a scan."""

    def of(local: Local) -> Form:
        target = local.call.target

        def form(x: Tensor, at: int, row: str, place: int, first: int) -> Tensor:
            before = fold(_before(fold(x, at, keepdim=True), at, row, place), at, keepdim=True)
            return combine(target(x, at), before)

        return widely(form, local.call)

    return of


def _record(local: Local) -> Form:
    """cummax, cummin: the last of several equal values counts, and a NaN beats everything that follows, but a NaN."""
    target = local.call.target
    lowest = target is aten.cummax.default
    fill = worst(local.call.operands[0].dtype, lowest=lowest)

    def form(x: Tensor, at: int, row: str, place: int, first: int) -> tuple[Tensor, Tensor]:
        best, index = target(x, at)
        last, where = _last(target(rows.held(x, fill), at), at)
        front = [0, 0] * (x.dim() - 1 - at) + [1, 0]  # so that something comes before the first
        last = aten.constant_pad_nd.default(_before(last, at, row, place), front, fill)
        where = aten.constant_pad_nd.default(_before(where + first, at, row, place), front)
        last, which = _last(target(last, at), at)
        own = (best >= last if lowest else best <= last) | (best != best)
        return torch.where(own, best, last), torch.where(own, index + first, where.gather(at, which))

    rows = Rows.of(local, [axis(arg(local.call, 1, "dim"), len(local.call.operands[0].shape))])
    return form


def _last(found: Sequence[Tensor], at: int) -> list[Tensor]:
    """Of each, the last along the dim, which stays."""
    return [x.narrow(at, x.shape[at] - 1, 1) for x in found]


ROWS: dict[str, RuleFn | str] = {
    "cumsum": _scan(_combined(torch.sum, torch.add), "[dim] -> [dim] | dim:local {0}"),
    "cumprod": _scan(_combined(torch.prod, torch.mul), "[dim] -> [dim] | dim:local"),
    **dict.fromkeys(
        ["logcumsumexp", "_logcumsumexp"],
        _scan(_combined(torch.logsumexp, torch.logaddexp), "[dim] -> [dim] | dim:local"),
    ),
    **dict.fromkeys(["cummax", "cummin"], _scan(_record, "[dim] -> [dim], [dim] | dim:local")),
}
