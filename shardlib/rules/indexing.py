"""Reading at indices, also along a cut dim.

Along a cut dim every device looks only at the indices that fall into its shard: a read gives zeros elsewhere, and a
pending sum over the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardlib.rules.lineup import Advanced, alongside, masks, whole
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import check, cut, localise, never_empty
from shardlib.rules.space import Dim, Space, arg, axis, numel, result_shape

aten = torch.ops.aten


def _read(local: Local, x: Any, indices: Sequence[Any], dims: Sequence[Dim]) -> tuple[Any, list[Any], Any]:
    """The table x, the indices into its `dims` as this shard counts, and where one lies outside (None: nowhere)."""
    factors = cut(local, (f for d in dims for f in d))
    outside = None
    out = []
    for index, dim in zip(indices, dims, strict=True):
        for factor in cut(local, dim):
            index, miss = localise(local, index, factor)
            outside = miss if outside is None else local.op(aten.bitwise_or.Tensor, outside, miss)
        out.append(index)
    return never_empty(local, x, 0, factors), out, outside


def _zeroed(local: Local, value: Any, outside: Any) -> Any:
    return value if outside is None else local.op(aten.masked_fill.Scalar, value, outside, 0)


def _unsqueezed(local: Local, x: Any, dims: int) -> Any:
    """x with so many dims of size 1 behind its own."""
    for _ in range(dims if x is not None else 0):
        x = local.op(aten.unsqueeze.default, x, -1)
    return x


def _embedding(local: Local) -> Any:
    index = check(local, local.args[1], local.call.operands[0].shape[0])
    table, (index,), outside = _read(local, local.args[0], [index], [("v",)])
    rows = local.op(aten.embedding.default, table, index)
    return _zeroed(local, rows, _unsqueezed(local, outside, 1))


def _gather(call: Call) -> Rule:
    """`gather(x, dim, index)`. Other dims of the index may be shorter than x's; those stay whole."""
    space = Space()
    shape, index = call.operands[0].shape, call.operands[1].shape
    if len(shape) != len(index):  # an index without elements, or a number
        return whole(call)
    at = axis(arg(call, 1, "dim"), len(shape))
    x, ind = alongside(space, shape, index, at)

    def local(local: Local) -> Any:
        given = check(local, local.args[2], shape[at])
        table, (mine,), outside = _read(local, local.args[0], [given], [x[at]])
        return _zeroed(local, local.op(aten.gather.default, table, at, mine), outside)

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
        given = check(local, local.args[2], shape[at])
        table, (mine,), outside = _read(local, local.args[0], [given], [x[at]])
        rows = local.op(aten.index_select.default, table, at, mine)
        return _zeroed(local, rows, _unsqueezed(local, outside, len(shape) - 1 - at))

    row = x[at] if shape else ()
    return space.rule([x, ind], [out], reduce=dict.fromkeys(row, "sum"), linear=[{0}], local=local, local_factors=row)


def _index(call: Call) -> Rule | None:
    if masks(call):
        return None
    space = Space()
    a = Advanced(space, call)

    def local(local: Local) -> Any:
        table, indices, outside = _read(local, local.args[0], a.positive(local), a.indexed)
        value = local.op(aten.index.Tensor, table, a.listed(indices))
        return _zeroed(local, value, _unsqueezed(local, outside, a.behind))

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
    "embedding": pattern("v d, ... -> ... d | v:sum v:local {0}", local=_embedding),
    "gather": _gather,
    "index_select": _index_select,
    **dict.fromkeys(["index.Tensor", "_unsafe_index.Tensor"], _index),
}
