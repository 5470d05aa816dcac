"""Running sums and their like: local scans, then what came before.

Along a cut dim every device scans its piece; the totals of the pieces are gathered, and each device combines those of
the pieces before its own with its results. From behind it is the same with everything turned round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import schema_of
from shardlib.ops.reverse_scan import BEHIND
from shardlib.primitives.collectives import all_gather
from shardlib.rules.iteration_space import axis
from shardlib.rules.local_forms.helpers import Rows, place, shares, widely, worst
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn

aten = torch.ops.aten
Before = Callable[[Tensor], Tensor]  # of this device's total, of size 1 along the dim: the totals of all before it
# Of what it is a form of, and its op; a piece, the dim, what came before, and where the piece begins.
Form = Callable[[Local, Any, Tensor, int, Before, int], Any]


def _scan(scan: Form, text: str, op: Any = None) -> Callable[[Call], Rule]:
    """The rule of an op that runs along `dim`, or of `op` from behind: there what comes behind is what came before."""

    def turned(x: Tensor, at: int) -> Tensor:
        return x if op is None else x.flip(at)

    def form(local: Local, x: Tensor, dim: int, **_: Any) -> Any:
        at = axis(dim, x.dim())
        sizes, own = shares("dim"), place("dim")
        earlier = sizes[:own] if op is None else sizes[own + 1 :]
        before = lambda total: turned(all_gather(total, "dim", at), at).narrow(at, 0, len(earlier))
        found = scan(local, op or local.call.target, turned(x, at), at, before, sum(earlier))
        return turned(found, at) if isinstance(found, Tensor) else tuple(turned(v, at) for v in found)

    def rule(call: Call) -> Rule:
        many = call.operands[0].dtype.is_complex and "log" in schema_of(call.target).name  # there are many logarithms
        return pattern(f"{text} {'dim:whole' if many else ''}", form=form)(call)

    return rule


def _combined(fold: Callable[..., Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Form:
    """A scan of one op: `fold` makes the total of a dim, `combine` puts what came before in front of a scan."""

    def form(local: Local, op: Any, x: Tensor, at: int, before: Before, first: int) -> Any:
        scan = lambda x: combine(op(x, at), fold(before(fold(x, at, keepdim=True)), at, keepdim=True))
        return widely(scan, local.call)(x)

    return form


def _record(local: Local, op: Any, x: Tensor, at: int, before: Before, first: int) -> tuple[Tensor, Tensor]:
    """cummax, cummin: the last of several equal values counts, and a NaN beats everything that follows, but a NaN."""
    lowest = op is aten.cummax.default
    fill = worst(x.dtype, lowest=lowest)
    best, index = op(x, at)
    last, where = _last(op(Rows.of(local, [at]).held(x, fill), at), at)
    front = [0, 0] * (x.dim() - 1 - at) + [1, 0]  # so that something comes before the first
    last = aten.constant_pad_nd.default(before(last), front, fill)
    where = aten.constant_pad_nd.default(before(where + first), front)
    last, which = _last(op(last, at), at)
    own = (best >= last if lowest else best <= last) | (best != best)
    return torch.where(own, best, last), torch.where(own, index + first, where.gather(at, which))


def _last(found: Sequence[Tensor], at: int) -> list[Tensor]:
    """Of each, the last along the dim, which stays."""
    return [x.narrow(at, x.shape[at] - 1, 1) for x in found]


_SUMS = "[dim] -> [dim] | dim:local {0}"
_SCANS: dict[str, tuple[Form, str]] = {
    "cumsum": (_combined(torch.sum, torch.add), _SUMS),
    "cumprod": (_combined(torch.prod, torch.mul), "[dim] -> [dim] | dim:local"),
    "logcumsumexp": (_combined(torch.logsumexp, torch.logaddexp), "[dim] -> [dim] | dim:local"),
    **dict.fromkeys(["cummax", "cummin"], (_record, "[dim] -> [dim], [dim] | dim:local")),
}
_ALONG: dict[str, RuleFn | str] = {name: _scan(*how) for name, how in _SCANS.items()}

ROWS: dict[str, RuleFn | str] = {
    **_ALONG,
    "_logcumsumexp": _ALONG["logcumsumexp"],
    **{str(schema_of(op).name): _scan(*_SCANS[str(schema_of(of).name)[6:]], of) for of, op in BEHIND.items()},
}
