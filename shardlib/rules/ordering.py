"""Sorting, selecting and finding extremes along a dim.

Along a cut dim a selection asks every device for what it found in its piece: the largest value and where it is, or its
`k` candidates. What needs the order of all elements (sort, median, mode) keeps the dim whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.internals import schema_of
from shardlib.manual.collectives import piece, pmax, pmin
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import Rows, cut, gathered, worst
from shardlib.rules.space import arg, axes, elements, numel, result_shape

_LOWEST = ("aten::max", "aten::argmax")


# Positions along the dim mean something else in the result: no common factor.
_SORTED = pattern("[dim] -> [_], [_] | dim:whole", flops=elements)
_PICKED = "[dim] -> ..., ... | dim:whole"


def _topk(call: Call) -> Rule:
    """`topk(x, k, dim, largest, sorted)`. Unsorted results come in no order that pieces could keep."""
    shape, k = call.operands[0].shape, call.args[1]
    if not shape or not arg(call, 4, "sorted", True) or not 0 < 2 * k <= shape[arg(call, 2, "dim", -1)]:
        return _SORTED(call)
    return pattern("[dim] -> [_], [_] | dim:none dim:local", local=_candidates, flops=elements)(call)


def _candidates(local: Local) -> Any:
    """The `k` best of every piece, gathered, and the `k` best among them; short pieces are gathered as they are."""
    (row,) = local.rule.reduce
    sizes = [max(n) for n in local.values(local.size(row), row)]

    def form(x: Tensor, k: int, at: int = -1, *how: Any) -> tuple[Tensor, Tensor]:
        if k * len(sizes) >= sum(sizes):
            return gathered(x, row, at % x.dim(), sum(sizes)).topk(k, at, *how)
        offset, size, _ = piece(row)
        best, where = x.topk(min(size, k), at, *how)
        total = sum(min(n, k) for n in sizes)
        best, where = (gathered(v, row, at % x.dim(), total) for v in (best, where + offset))
        best, among = best.topk(k, at, *how)
        return best, where.gather(at, among)

    return local.run(form, *local.args, **local.kwargs)


def _found(local: Local) -> Any:
    """`max(x, dim)` and `argmax(x, dim)`: the best value of all pieces, and the least index among the pieces that have
    it, or have a NaN."""
    call, labels = local.call, local.rule.operands[0]
    shape, out = call.operands[0].shape, result_shape(call)
    dim, lowest = arg(local, 1, "dim"), schema_of(call.target).name in _LOWEST
    dims = axes(dim, len(shape))
    rows, row = Rows.of(local, dims), cut(local, local.rule.reduce)

    def form(x: Tensor, first: Sequence[int]) -> Any:
        x = rows.held(x, worst(x.dtype, lowest=lowest))
        value, along, kept = (x.reshape(-1), 0, False) if dim is None else (x, dim, len(out) == len(shape))
        best, index = (torch.max if lowest else torch.min)(value, along, keepdim=kept)
        index = _global(index, [x.shape[d] for d in dims if shape], first, [shape[d] for d in dims if shape])
        if dim is None:
            best, index = best.reshape(out), index.reshape(out)
        top = (pmax if lowest else pmin)(best, row)
        elsewhere = ((best == top) | (best != best)).logical_not()
        index = pmin(index.masked_fill(elsewhere, numel(shape)), row)
        return (top, index) if len(call.results) == 2 else index

    return local.run(form, local.args[0], [sum(map(local.offset, labels[d])) for d in dims if shape])


def _global(index: Tensor, sizes: Sequence[int], first: Sequence[int], whole: Sequence[int]) -> Tensor:
    """A position in a piece of these sizes, which begins there, as one in the whole; both are counted flattened."""
    if len(sizes) == 1:
        return index + first[0]
    out, stride = torch.zeros_like(index), 1
    for size, offset, n in reversed(list(zip(sizes, first, whole, strict=True))):
        out = out + (index % size + offset) * stride
        index, stride = index // size, stride * n
    return out


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["sort", "sort.stable"], _SORTED),
    "topk": _topk,
    **dict.fromkeys(["kthvalue", "mode", "median.dim", "nanmedian.dim"], _PICKED),
    **dict.fromkeys(["median", "nanmedian"], "... -> | ...:whole"),
    **dict.fromkeys(["max.dim", "min.dim"], pattern("[dim] -> ..., ... | dim:none dim:local", local=_found)),
    **dict.fromkeys(["argmax", "argmin"], pattern("[dim] -> ... | dim:none dim:local", local=_found)),
}
