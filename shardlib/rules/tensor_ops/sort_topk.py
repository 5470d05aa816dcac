"""Sorting, selecting and finding extremes along a dim.

Along a cut dim a selection asks every device for what it found in its piece: the largest value and where it is, or its
`k` candidates. What needs the order of all elements (sort, median, mode) keeps the dim whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import schema_of
from shardlib.primitives.collectives import pmax, pmin
from shardlib.rules.iteration_space import arg, axes, elements, numel, result_shape
from shardlib.rules.local_forms.helpers import Rows, cut, gathered, worst
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn

_LOWEST = ("aten::max", "aten::argmax")


# Positions along the dim mean something else in the result: no common factor.
_SORTED = pattern("[dim] -> [_], [_] | dim:whole", flops=elements)
_PICKED = "[dim] -> ..., ... | dim:whole"


def _topk(call: Call) -> Rule:
    """`topk(x, k, dim, largest, sorted)`. Unsorted results come in no order that pieces could keep."""
    shape, k = call.operands[0].shape, call.args[1]
    if not shape or not arg(call, "sorted") or not 0 < 2 * k <= shape[arg(call, "dim")]:
        return _SORTED(call)
    return _anywhere(pattern("[dim] -> [_], [_] | dim:none dim:local", local=_candidates, flops=elements)(call))


def _anywhere(rule: Rule) -> Rule:
    """The rule, where a piece is whatever part of a dim: positions are counted in what the dim is made of."""
    return replace(rule, loose=rule.local_factors)


def _candidates(local: Local) -> Any:
    """The `k` best of every piece, gathered, and the `k` best among them; short pieces are gathered as they are."""
    (row,) = local.rule.reduce
    places, ways = local.pieces(row), range(local.ways(row))
    known = [(local.values(size, row), local.values(first, row), whole) for size, first, whole in places]
    theirs = [[(min(sizes[i]), min(firsts[i]), whole) for sizes, firsts, whole in known] for i in ways]
    sizes = [math.prod(size for size, *_ in place) for place in theirs]

    def form(x: Tensor, places: _Places, k: int, at: int = -1, *how: Any) -> tuple[Tensor, Tensor]:
        if k * len(sizes) >= sum(sizes):
            best, among = gathered(x, row, at % x.dim(), sum(sizes)).topk(k, at, *how)
            if len(places) == 1:
                return best, among
            order = [in_whole(torch.arange(n, device=x.device), own) for n, own in zip(sizes, theirs, strict=True)]
            return best, torch.cat(order)[among]
        best, where = x.topk(min(x.shape[at], k), at, *how)
        total = sum(min(n, k) for n in sizes)
        best, where = (gathered(v, row, at % x.dim(), total) for v in (best, in_whole(where, places)))
        best, among = best.topk(k, at, *how)
        return best, where.gather(at, among)

    return local.run(form, local.args[0], places, *local.args[1:], **local.kwargs)


def _found(local: Local) -> Any:
    """`max(x, dim)` and `argmax(x, dim)`: the best value of all pieces, and the least index among the pieces that have
    it, or have a NaN."""
    call, labels = local.call, local.rule.operands[0]
    shape, out = call.operands[0].shape, result_shape(call)
    dim, lowest = arg(call, "dim"), schema_of(call.target).name in _LOWEST
    dims = axes(dim, len(shape))
    rows, row = Rows.of(local, dims), cut(local, local.rule.reduce)

    def form(x: Tensor, places: _Places) -> Any:
        x = rows.held(x, worst(x.dtype, lowest=lowest))
        value, along, kept = (x.reshape(-1), 0, False) if dim is None else (x, dim, len(out) == len(shape))
        best, index = (torch.max if lowest else torch.min)(value, along, keepdim=kept)
        index = in_whole(index, places)
        if dim is None:
            best, index = best.reshape(out), index.reshape(out)
        top = (pmax if lowest else pmin)(best, row)
        elsewhere = ((best == top) | (best != best)).logical_not()
        index = pmin(index.masked_fill(elsewhere, numel(shape)), row)
        return (top, index) if len(call.results) == 2 else index

    return local.run(form, local.args[0], [leaf for d in dims if shape for f in labels[d] for leaf in local.pieces(f)])


def _extreme(text: str) -> RuleFn:
    rule = pattern(f"{text} | dim:none dim:local", local=_found)
    return lambda call: _anywhere(rule(call))


_Places = Sequence[tuple[int, int, int]]  # of a position's coordinates: how many are here, the first, and of how many


def in_whole(index: Tensor, places: _Places) -> Tensor:
    """A position in a piece as one in the whole; both are counted flattened."""
    if len(places) == 1:
        return index + places[0][1]
    out, stride = torch.zeros_like(index), 1
    for size, first, whole in reversed(places):
        out = out + (index % max(size, 1) + first) * stride
        index, stride = index // max(size, 1), stride * whole
    return out


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["sort", "sort.stable"], _SORTED),
    "topk": _topk,
    **dict.fromkeys(["kthvalue", "mode", "median.dim", "nanmedian.dim"], _PICKED),
    **dict.fromkeys(["median", "nanmedian"], "... -> | ...:whole"),
    **dict.fromkeys(["max.dim", "min.dim"], _extreme("[dim] -> ..., ...")),
    **dict.fromkeys(["argmax", "argmin"], _extreme("[dim] -> ...")),
}
