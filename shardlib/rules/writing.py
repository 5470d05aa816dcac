"""Writing at indices, also along a cut dim.

Along a cut dim every device drops what lies on the others: it goes into one row more than the shard has, which is then
left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardlib.rules.lineup import Advanced, alongside, masks
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import cut, is_zero, localise
from shardlib.rules.space import Dim, Space, arg, axis, broadcast, meta, numel

aten = torch.ops.aten


def _embedding_backward(local: Local) -> Any:
    """Torch skips rows of the padding index: what lies outside becomes one that no row of the shard has."""
    grad, index, _, padding, by_count = local.args
    mine, outside = localise(local, index, "v")
    if padding >= 0:
        outside = local.op(aten.bitwise_or.Tensor, outside, local.op(aten.eq.Scalar, index, padding))
    mine = local.op(aten.masked_fill.Scalar, mine, outside, -1)
    return local.op(aten.embedding_dense_backward.default, grad, mine, local.size("v"), -1, by_count)


def _embedding_dense_backward(call: Call) -> Rule:
    """Rows of one index add up, wherever they are; scaling by how often it occurs needs all of them in one place."""
    kinds = "...:whole v:whole" if arg(call, 4, "scale_grad_by_freq") else "...:sum v:local"
    return pattern(f"... d, ... -> v d | {kinds} {{0}}", local=_embedding_backward, ints={(2,): "v"})(call)


def _write(local: Local, x: Any, dims: Sequence[tuple[int, Dim]], indices: Sequence[Any], write: Any) -> Any:
    """`write(x, indices)` along `dims` of x, of which some are cut."""
    mine = []
    rooms = []
    for (at, dim), index in zip(dims, indices, strict=True):
        for factor in cut(local, dim):
            # The row behind the shard's last takes what lies on other devices.
            index, outside = localise(local, index, factor)
            size = local.size(factor)
            index = local.op(aten.add.Tensor, index, local.op(aten.mul.Scalar, outside, size))
            rooms.append((at, size))
        mine.append(index)
    if rooms:
        pads: list[Any] = [0, 0] * len(local.rule.operands[0])
        for at, _ in rooms:
            pads[2 * (len(local.rule.operands[0]) - 1 - at) + 1] = 1
        x = local.op(aten.constant_pad_nd.default, x, pads, 0)
    x = write(x, mine)
    for at, size in rooms:
        x = local.op(aten.slice.Tensor, x, at, 0, size)
    return x


def _once(local: Local, x: Any, factors: Iterable[str]) -> Any:
    """x where all of `factors` begin and zeros elsewhere, so that x is counted once among the addends."""
    for factor in cut(local, factors):
        x = local.op(aten.mul.Scalar, x, is_zero(local.offset(factor)))
    return x


def _scatter(*, adds: bool) -> RuleFn:
    """`scatter(x, dim, index, src)`; added entries may come from all devices, plain ones have an order that matters."""

    def rule(call: Call) -> Rule:
        space = Space()
        shape, index = call.operands[0].shape, call.operands[1].shape
        at = axis(arg(call, 1, "dim"), len(shape))
        x, ind = alongside(space, shape, index, at)
        entries = ind[at] if shape else ()
        source = meta(call, 3, "src")
        src: list[list[Dim]] = []
        if source is not None:
            fits = [n == m for n, m in zip(source.shape, index, strict=False)]
            space.whole |= {f for same, d in zip(fits, ind, strict=False) if not same for f in d}
            src = [
                [
                    d if same else space.dim(n, "s", whole=True)
                    for same, d, n in zip(fits, ind, source.shape, strict=False)
                ]
            ]
        if not adds:
            space.whole |= set(entries)
        row = x[at] if shape else ()

        def local(local: Local) -> Any:
            start = _once(local, local.args[0], entries)
            write = lambda x, mine: local.op(local.call.target, x, at, *mine, local.args[3], **local.kwargs)
            return _write(local, start, [(at, row)], [local.args[2]], write)

        linear = ([{0, 2}] if src else []) if source is not None or not arg(call, 3, "value") else []
        return space.rule(
            [x, ind, *src],
            [x],
            reduce=dict.fromkeys(entries, "sum") if adds else {},
            linear=linear,
            local=local,
            local_factors=(*row, *(entries if adds else ())),
            flops=numel(index),
        )

    return rule


def _index_add(call: Call) -> Rule:
    """`index_add(x, dim, index, source)`."""
    space = Space()
    shape = call.operands[0].shape
    at = axis(arg(call, 1, "dim"), len(shape))
    x = space.dims(shape)
    ind = space.dims(call.operands[1].shape, "j")
    entries = ind[0] if ind else ()
    source = [entries if i == at else d for i, d in enumerate(x)]
    row = x[at] if shape else ()

    def local(local: Local) -> Any:
        start = _once(local, local.args[0], entries)
        write = lambda x, mine: local.op(aten.index_add.default, x, at, *mine, local.args[3], **local.kwargs)
        return _write(local, start, [(at, row)], [local.args[2]], write)

    return space.rule(
        [x, ind, source],
        [x],
        reduce=dict.fromkeys(entries, "sum"),
        linear=[{0, 2}],
        local=local,
        local_factors=(*row, *entries),
        flops=numel(call.operands[2].shape),
    )


def _index_put(call: Call) -> Rule | None:
    """`index_put(x, indices, values, accumulate)`; without accumulation later entries win, so they stay together."""
    if masks(call):
        return None
    space = Space()
    a = Advanced(space, call)
    adds = bool(arg(call, 3, "accumulate", False))
    values = broadcast(a.out, call.operands[-1].shape)
    if not adds:
        space.whole |= set(a.index_factors)

    def local(local: Local) -> Any:
        # A value that the addends share is added by each, which is right only where entries are not shared out.
        start = _once(local, local.args[0], a.index_factors)
        dims = list(zip(a.dims, a.indexed, strict=True))
        write = lambda x, mine: local.op(local.call.target, x, a.listed(mine), *local.args[2:], **local.kwargs)
        return _write(local, start, dims, a.positive(local), write)

    return space.rule(
        [a.x, *a.indices, values],
        [a.x],
        reduce=dict.fromkeys(a.index_factors, "sum") if adds else {},
        linear=[{0, len(call.operands) - 1}],
        local=local,
        local_factors=(*a.table_factors, *(a.index_factors if adds else ())),
        flops=numel(call.operands[-1].shape),
    )


ROWS: dict[str, RuleFn | str] = {
    "embedding_dense_backward": _embedding_dense_backward,
    "scatter.src": _scatter(adds=False),
    "scatter.value": _scatter(adds=False),
    "scatter_add": _scatter(adds=True),
    "index_add": _index_add,
    **dict.fromkeys(["index_put", "_unsafe_index_put"], _index_put),
}
