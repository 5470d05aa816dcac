"""Running sums, products, maxima and the like.

Along a sharded dim each device scans its shard, and combines the results with the gathered totals of the shards before
its own. A scan from behind flips its operand and results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.ops.reverse_scan import REVERSE_SCANS
from shardlib.primitives.collectives import all_gather
from shardlib.rules.iteration_space import normalize_dim
from shardlib.rules.local_forms.helpers import (
    ReducedDims,
    in_accumulation_dtype,
    neutral_extreme,
    shard_index,
    shard_sizes,
)
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn

aten = torch.ops.aten
Before = Callable[[Tensor], Tensor]  # from this device's total (size 1 along the dim) to those of the devices before it
# Takes the local form, the op, the shard, the dim, the totals before it, and the shard's offset.
Form = Callable[[LocalBuilder, Any, Tensor, int, Before, int], Any]


def _scan(scan: Form, text: str, op: Any = None) -> Callable[[Call], Rule]:
    """Returns the rule of an op that scans `dim`, or of one that scans it from behind as `op` does from the front."""

    def flip(x: Tensor, at: int) -> Tensor:
        return x if op is None else x.flip(at)

    def form(local: LocalBuilder, x: Tensor, dim: int, **_: Any) -> Any:
        at = normalize_dim(dim, x.dim())
        sizes, own = shard_sizes("dim"), shard_index("dim")
        earlier = sizes[:own] if op is None else sizes[own + 1 :]
        before = lambda total: flip(all_gather(total, "dim", at), at).narrow(at, 0, len(earlier))
        results = scan(local, op or local.call.target, flip(x, at), at, before, sum(earlier))
        return flip(results, at) if isinstance(results, Tensor) else tuple(flip(v, at) for v in results)

    def rule(call: Call) -> Rule:
        ambiguous = call.operands[0].dtype.is_complex and "log" in schema_of(call.target).name
        return pattern(f"{text} {'dim:whole' if ambiguous else ''}", form=form)(call)

    return rule


def _combined(fold: Callable[..., Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Form:
    """Returns a scan whose totals are `fold` of a dim; `combine` adds the totals before a shard to its results."""

    def form(local: LocalBuilder, op: Any, x: Tensor, at: int, before: Before, first: int) -> Any:
        scan = lambda x: combine(op(x, at), fold(before(fold(x, at, keepdim=True)), at, keepdim=True))
        return in_accumulation_dtype(scan, local.call)(x)

    return form


def _record(local: LocalBuilder, op: Any, x: Tensor, at: int, before: Before, first: int) -> tuple[Tensor, Tensor]:
    """cummax, cummin: of equal values the last one counts, and a NaN wins against all later values but a NaN."""
    lowest = op is aten.cummax.default
    fill = neutral_extreme(x.dtype, lowest=lowest)
    best, index = op(x, at)
    last, where = _last(op(ReducedDims.over(local, [at]).fill_empty(x, fill), at), at)
    front = [0, 0] * (x.dim() - 1 - at) + [1, 0]  # the first device has none before it
    last = aten.constant_pad_nd.default(before(last), front, fill)
    where = aten.constant_pad_nd.default(before(where + first), front)
    last, which = _last(op(last, at), at)
    own = (best >= last if lowest else best <= last) | (best != best)
    return torch.where(own, best, last), torch.where(own, index + first, where.gather(at, which))


def _last(tensors: Sequence[Tensor], at: int) -> list[Tensor]:
    """Returns the last elements of the tensors along a dim, which stays."""
    return [x.narrow(at, x.shape[at] - 1, 1) for x in tensors]


_SUMS = "[dim] -> [dim] | dim:local {0}"
_SCANS: dict[str, tuple[Form, str]] = {
    "cumsum": (_combined(torch.sum, torch.add), _SUMS),
    "cumprod": (_combined(torch.prod, torch.mul), "[dim] -> [dim] | dim:local"),
    "logcumsumexp": (_combined(torch.logsumexp, torch.logaddexp), "[dim] -> [dim] | dim:local"),
    **dict.fromkeys(["cummax", "cummin"], (_record, "[dim] -> [dim], [dim] | dim:local")),
}
_ALONG: dict[str, RuleFn | str] = {name: _scan(*scan) for name, scan in _SCANS.items()}

ROWS: dict[str, RuleFn | str] = {
    **_ALONG,
    "_logcumsumexp": _ALONG["logcumsumexp"],
    **{
        str(schema_of(op).name): _scan(*_SCANS[str(schema_of(front).name)[6:]], front)
        for front, op in REVERSE_SCANS.items()
    },
}
