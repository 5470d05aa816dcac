"""Reads at indices, also along a sharded dim.

Along a sharded dim each device reads the entries whose indices fall into its shard, with zeros for the others. The
result is a partial sum over the devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.iteration_space import result_shape
from shardlib.rules.local_forms.helpers import (
    ReducedDims,
    check_index,
    from_torch_code,
    locate_index,
    neutral_addend,
    sharded_factors,
)
from shardlib.rules.local_forms.index_dims import IndexedDims, has_mask, replicated
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Lookup, Rule, RuleFn

aten = torch.ops.aten


def _read_shard(
    table: Tensor, indices: Sequence[Tensor], sharded: Sequence[Sequence[str]], read: Callable[..., Tensor], inner: int
) -> Tensor:
    """`read(table, indices)`, with zeros for entries on other devices.

    `sharded` has the sharded factors of each indexed dim. The last `inner` dims of the result follow those of the
    indices.
    """
    mine, outside = [], None
    for index, factors in zip(indices, sharded, strict=True):
        for factor in factors:
            index, miss = locate_index(index, factor)
            outside = miss if outside is None else outside | miss
        mine.append(index)
    value = read(table, mine)
    return value if outside is None else value.masked_fill(outside[(..., *[None] * inner)], neutral_addend(value.dtype))


def _embedding(local: LocalBuilder, table: Tensor, index: Tensor, *_: Any) -> Tensor:
    read = lambda table, mine: aten.embedding.default(table, *mine)
    indices = [check_index(index, local.call.operands[0].shape[0])]
    return _read_shard(
        ReducedDims.over(local, [0]).fill_empty(table, 0), indices, [sharded_factors(local, ["v"])], read, 1
    )


def _reads(call: Call, dims: IndexedDims) -> Rule:
    """Returns the rule of an op that reads a table at indices."""

    def form(local: LocalBuilder, table: Tensor, *args: Any, **named: Any) -> Tensor:
        sharded, n = dims.sharded(local), dims.argument_count
        read = lambda table, mine: call.target(table, *dims.arguments(mine), *args[n:], **named)
        filled = ReducedDims.over(local, [d for d, factors in sharded.items() if factors]).fill_empty(table, 0)
        return _read_shard(filled, dims.normalize(args[n - 1], sharded), [*sharded.values()], read, dims.inner)

    return dims.space.rule(
        [dims.x, *dims.indices],
        [dims.out],
        reduce=dict.fromkeys(dims.rows, "sum"),
        linear=[{0}],
        emit=from_torch_code(form),
        local_factors=dims.rows,
        lookup=Lookup(dims.rows, dims.index_operands),
        flops=math.prod(result_shape(call)),
    )


def _gather(call: Call) -> Rule:
    """`gather(x, dim, index)`. Dims of the index that are shorter than those of x stay whole."""
    dims = IndexedDims.elementwise(call)
    return _reads(call, dims) if dims else replicated(call)


def _index(call: Call) -> Rule | None:
    return None if has_mask(call) else _reads(call, IndexedDims.advanced(call))


ROWS: dict[str, RuleFn | str] = {
    "embedding": pattern(
        "v d, ... -> ... d | v:sum v:local {0}",
        form=_embedding,
        lookup=Lookup(("v",), (1,)),
        flops=lambda call, _: math.prod(result_shape(call)),
    ),
    "gather": _gather,
    "index_select": lambda call: _reads(call, IndexedDims.along(call)),
    **dict.fromkeys(["index.Tensor", "_unsafe_index.Tensor"], _index),
}
