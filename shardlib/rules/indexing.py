"""Reading at indices, also along a cut dim.

Along a cut dim every device looks only at the indices that fall into its shard: a read gives zeros elsewhere, and a
pending sum over the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.lineup import Advanced, alongside, masks, whole
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import Rows, checked, cut, located, nothing
from shardlib.rules.space import Space, arg, axis, numel, result_shape

aten = torch.ops.aten


def _read(
    local: Local,
    cuts: Mapping[int, Sequence[str]],
    indices: Sequence[Any],
    ready: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    read: Callable[..., Tensor],
    behind: int = 0,
) -> Any:
    """`read(table, *ready(indices))`, each index into a dim of operand 0, where some of these are cut (`cuts`).

    What lies on another device gives zeros. `behind` is how many dims of the result stand behind those of the indices.
    """
    rows = Rows.of(local, [d for d, factors in cuts.items() if factors])

    def form(table: Tensor, *indices: Tensor) -> Tensor:
        mine, outside = [], None
        for index, factors in zip(ready(indices), cuts.values(), strict=True):
            for factor in factors:
                index, miss = located(index, factor)
                outside = miss if outside is None else outside | miss
            mine.append(index)
        value = read(rows.held(table, 0), *mine)
        return value if outside is None else value.masked_fill(outside[(..., *[None] * behind)], nothing(value.dtype))

    return local.run(form, local.args[0], *indices)


def _inside(n: int) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    return lambda indices: [checked(index, n) for index in indices]


def _embedding(local: Local) -> Any:
    (v, _) = local.call.operands[0].shape
    read = lambda table, index: aten.embedding.default(table, index)
    return _read(local, {0: cut(local, ["v"])}, [local.args[1]], _inside(v), read, 1)


def _gather(call: Call) -> Rule:
    """`gather(x, dim, index)`. Other dims of the index may be shorter than x's; those stay whole."""
    space = Space()
    shape, index = call.operands[0].shape, call.operands[1].shape
    if len(shape) != len(index):  # an index without elements, or a number
        return whole(call)
    at = axis(arg(call, 1, "dim"), len(shape))
    x, ind = alongside(space, shape, index, at)

    def local(local: Local) -> Any:
        read = lambda table, index: table.gather(at, index)
        return _read(local, {at: cut(local, row)}, [local.args[2]], _inside(shape[at]), read)

    row = x[at] if shape else ()
    return space.rule(
        [x, ind],
        [ind],
        reduce=dict.fromkeys(row, "sum"),
        linear=[{0}],
        local=local,
        local_factors=row,
        flops=numel(index),
    )


def _index_select(call: Call) -> Rule:
    space = Space()
    shape, index = call.operands[0].shape, call.operands[1].shape
    at = axis(arg(call, 1, "dim"), len(shape))
    x = space.dims(shape)
    ind = space.dims(index, "j")
    out = [*x[:at], *(ind or [()]), *x[at + 1 :]] if shape else []

    def local(local: Local) -> Any:
        read = lambda table, index: table.index_select(at, index)
        return _read(local, {at: cut(local, row)}, [local.args[2]], _inside(shape[at]), read, len(shape) - 1 - at)

    row = x[at] if shape else ()
    reduce, flops = dict.fromkeys(row, "sum"), numel(result_shape(call))
    return space.rule([x, ind], [out], reduce=reduce, linear=[{0}], local=local, local_factors=row, flops=flops)


def _index(call: Call) -> Rule | None:
    if masks(call):
        return None
    space = Space()
    a = Advanced(space, call)

    def local(local: Local) -> Any:
        given, cuts = [i for i in arg(local, 1, "indices") if i is not None], a.cuts(local)
        read = lambda table, *indices: aten.index.Tensor(table, a.listed(indices))
        ready = lambda indices: a.positive(indices, cuts)
        return _read(local, dict(zip(a.dims, cuts, strict=True)), given, ready, read, a.behind)

    return space.rule(
        [a.x, *a.indices],
        [a.out],
        reduce=dict.fromkeys(a.table_factors, "sum"),
        linear=[{0}],
        local=local,
        local_factors=a.table_factors,
        flops=numel(result_shape(call)),
    )


ROWS: dict[str, RuleFn | str] = {
    "embedding": pattern(
        "v d, ... -> ... d | v:sum v:local {0}", local=_embedding, flops=lambda call, _: numel(result_shape(call))
    ),
    "gather": _gather,
    "index_select": _index_select,
    **dict.fromkeys(["index.Tensor", "_unsafe_index.Tensor"], _index),
}
