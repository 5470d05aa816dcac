"""Sorting, selecting and finding extremes along a dim.

Along a sharded dim each device selects from its shard: the largest value and its position, or its `k` candidates.
Ops that need the order of all elements (sort, median, mode) keep the dim whole.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.primitives.collectives import pmax, pmin
from shardlib.rules.iteration_space import arg, count_elements, normalize_dims, result_shape
from shardlib.rules.local_forms.helpers import ReducedDims, gather_shards, neutral_extreme, sharded_factors
from shardlib.rules.local_forms.positions import Extents, to_global
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn

_LOWEST = ("aten::max", "aten::argmax")


# A position along the dim means something else in the result, so the two dims share no factor.
_SORTED = pattern("[dim] -> [_], [_] | dim:whole", flops=count_elements)
_PICKED = "[dim] -> ..., ... | dim:whole"


def _topk(call: Call) -> Rule:
    """`topk(x, k, dim, largest, sorted)`. Unsorted results have no order that shards could reproduce."""
    shape, k = call.operands[0].shape, call.args[1]
    if not shape or not arg(call, "sorted") or not 0 < 2 * k <= shape[arg(call, "dim")]:
        return _SORTED(call)
    return pattern("[dim] -> [_], [_] | dim:none dim:local", emit=_topk_local, loose=True, flops=count_elements)(call)


def _topk_local(local: LocalBuilder) -> Any:
    """Gathers the `k` best of each shard, and takes the `k` best among them. Short shards are gathered whole."""
    (row,) = local.rule.reduce
    extents, ways = local.extents(row), range(local.ways(row))
    by_device = [(local.values(size, row), local.values(first, row), whole) for size, first, whole in extents]
    shards = [[(min(sizes[i]), min(firsts[i]), whole) for sizes, firsts, whole in by_device] for i in ways]
    sizes = [math.prod(size for size, *_ in shard) for shard in shards]

    def form(x: Tensor, extents: Extents, k: int, at: int = -1, *options: Any) -> tuple[Tensor, Tensor]:
        if k * len(sizes) >= sum(sizes):
            best, among = gather_shards(x, row, at % x.dim(), sum(sizes)).topk(k, at, *options)
            if len(extents) == 1:
                return best, among
            order = [to_global(torch.arange(n, device=x.device), own) for n, own in zip(sizes, shards, strict=True)]
            return best, torch.cat(order)[among]
        best, index = x.topk(min(x.shape[at], k), at, *options)
        total = sum(min(n, k) for n in sizes)
        best, index = (gather_shards(v, row, at % x.dim(), total) for v in (best, to_global(index, extents)))
        best, among = best.topk(k, at, *options)
        return best, index.gather(at, among)

    return local.run(form, local.args[0], extents, *local.args[1:], **local.kwargs)


def _extreme_local(local: LocalBuilder) -> Any:
    """`max(x, dim)` and `argmax(x, dim)`: the best value of all shards, and the least index among the shards that have
    it or a NaN."""
    call, labels = local.call, local.rule.operands[0]
    shape, out = call.operands[0].shape, result_shape(call)
    dim, lowest = arg(call, "dim"), schema_of(call.target).name in _LOWEST
    dims = normalize_dims(dim, len(shape))
    reduced, row = ReducedDims.over(local, dims), sharded_factors(local, local.rule.reduce)

    def form(x: Tensor, extents: Extents) -> Any:
        x = reduced.fill_empty(x, neutral_extreme(x.dtype, lowest=lowest))
        value, along, keep = (x.reshape(-1), 0, False) if dim is None else (x, dim, len(out) == len(shape))
        best, index = (torch.max if lowest else torch.min)(value, along, keepdim=keep)
        index = to_global(index, extents)
        if dim is None:
            best, index = best.reshape(out), index.reshape(out)
        top = (pmax if lowest else pmin)(best, row)
        elsewhere = ((best == top) | (best != best)).logical_not()
        index = pmin(index.masked_fill(elsewhere, math.prod(shape)), row)
        return (top, index) if len(call.results) == 2 else index

    extents = [extent for d in dims if shape for f in labels[d] for extent in local.extents(f)]
    return local.run(form, local.args[0], extents)


_extreme = partial(pattern, emit=_extreme_local, loose=True)


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["sort", "sort.stable"], _SORTED),
    "topk": _topk,
    **dict.fromkeys(["kthvalue", "mode", "median.dim", "nanmedian.dim"], _PICKED),
    **dict.fromkeys(["median", "nanmedian"], "... -> | ...:whole"),
    **dict.fromkeys(["max.dim", "min.dim"], _extreme("[dim] -> ..., ... | dim:none dim:local")),
    **dict.fromkeys(["argmax", "argmin"], _extreme("[dim] -> ... | dim:none dim:local")),
}
