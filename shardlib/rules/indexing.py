"""Reading and writing at indices, also along a cut dim.

Along a cut dim every device looks only at the indices that fall into its shard. A read gives zeros elsewhere, and a pending
sum over the devices; a write drops what lies elsewhere: it goes into one row more than the shard has, which is then left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardlib.rules.notation import pattern
from shardlib.rules.rule import Call, Local, Meta, Rule, RuleFn
from shardlib.rules.shards import cut, is_zero, localise, never_empty
from shardlib.rules.space import Dim, Space, arg, axis, broadcast, meta, numel, result_shape

aten = torch.ops.aten


# Reading --------------------------------------------------------------------------------------------------------------


def _read(local: Local, x: Any, indices: Sequence[Any], dims: Sequence[Dim]) -> tuple[Any, list[Any], Any]:
    """The table x and the indices into its `dims` as this shard counts, and where some index lies outside (None: nowhere)."""
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
    table, (index,), outside = _read(local, local.args[0], [local.args[1]], [("v",)])
    rows = local.op(aten.embedding.default, table, index)
    return _zeroed(local, rows, _unsqueezed(local, outside, 1))


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


def _gather(call: Call) -> Rule:
    """`gather(x, dim, index)`. Other dims of the index may be shorter than x's; those stay whole."""
    space = Space()
    shape, index = call.operands[0].shape, call.operands[1].shape
    at = axis(arg(call, 1, "dim"), len(shape))
    x, ind = _alongside(space, shape, index, at)

    def local(local: Local) -> Any:
        table, (mine,), outside = _read(local, local.args[0], [local.args[2]], [x[at]])
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


def _alongside(space: Space, shape: Sequence[int], index: Sequence[int], at: int) -> tuple[list[Dim], list[Dim]]:
    """Labels of a table and of the index into its dim `at`; other dims are shared where their sizes agree."""
    x: list[Dim] = []
    ind: list[Dim] = []
    for i, (n, m) in enumerate(zip(shape, index, strict=False)):
        if i == at:
            x.append(space.dim(n, "v"))
            ind.append(space.dim(m, "j"))
        else:
            same = n == m
            x.append(space.dim(n, whole=not same))
            ind.append(x[-1] if same else space.dim(m, "j", whole=True))
    return x, ind


def _index_select(call: Call) -> Rule:
    space = Space()
    shape, index = call.operands[0].shape, call.operands[1].shape
    at = axis(arg(call, 1, "dim"), len(shape))
    x = space.dims(shape)
    ind = space.dims(index, "j")
    out = [*x[:at], *(ind or [()]), *x[at + 1 :]] if shape else []

    def local(local: Local) -> Any:
        table, (mine,), outside = _read(local, local.args[0], [local.args[2]], [x[at]])
        rows = local.op(aten.index_select.default, table, at, mine)
        return _zeroed(local, rows, _unsqueezed(local, outside, len(shape) - 1 - at))

    row = x[at] if shape else ()
    return space.rule(
        [x, ind], [out], reduce=dict.fromkeys(row, "sum"), linear=[{0}], local=local, local_factors=row
    )


class _Advanced:
    """How `x[indices]` lines up: the indexed dims, and where the dims of the index stand among the result's."""

    def __init__(self, space: Space, call: Call) -> None:
        given: list[Meta | None] = list(arg(call, 1, "indices"))
        shape = call.operands[0].shape
        self.x = space.dims(shape)
        self.dims = [i for i, m in enumerate(given) if m is not None]
        metas = [m for m in given if m is not None]
        size = _broadcast(m.shape for m in metas)
        self.rank = len(size)
        index = space.dims(size, "j")
        self.indices = [broadcast(index, m.shape) for m in metas]
        adjacent = self.dims == list(range(self.dims[0], self.dims[-1] + 1))
        kept = [i for i in range(len(shape)) if i not in self.dims]
        # Torch puts the dims of the index where the indexed dims were, or in front when these do not stand together.
        front = [i for i in kept if i < self.dims[0]] if adjacent else []
        self.behind = len(kept) - len(front)
        self.out = [*(self.x[i] for i in front), *index, *(self.x[i] for i in kept[len(front) :])]
        self.indexed = [self.x[i] for i in self.dims]
        self.index_factors = [f for d in index for f in d]
        self.table_factors = [f for d in self.indexed for f in d]

    def positive(self, local: Local) -> list[Any]:
        """The index tensors, counted from the front where the dim is cut."""
        shape = local.call.operands[0].shape
        given = [i for i in arg(local, 1, "indices") if i is not None]
        return [
            local.op(aten.remainder.Scalar, index, shape[d]) if cut(local, dim) else index
            for index, d, dim in zip(given, self.dims, self.indexed, strict=True)
        ]

    def listed(self, indices: Iterable[Any]) -> list[Any]:
        """The indices with None for every dim that is not indexed."""
        queue = iter(indices)
        return [next(queue) if i in self.dims else None for i in range(self.dims[-1] + 1)]


def _broadcast(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape of all of them together."""
    columns = itertools.zip_longest(*(reversed(s) for s in shapes), fillvalue=1)
    return tuple(next((n for n in column if n != 1), 1) for column in columns)[::-1]


def _masks(call: Call) -> bool:
    """Whether some index is a mask: what it selects depends on the data."""
    given = [m for m in arg(call, 1, "indices") if m is not None]
    return not given or any(m.dtype in (torch.bool, torch.uint8) for m in given)


def _index(call: Call) -> Rule | None:
    if _masks(call):
        return None
    space = Space()
    a = _Advanced(space, call)

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


# Writing --------------------------------------------------------------------------------------------------------------


def _write(
    local: Local, x: Any, dims: Sequence[tuple[int, Dim]], indices: Sequence[Any], write: Any
) -> Any:
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
        x, ind = _alongside(space, shape, index, at)
        entries = ind[at] if shape else ()
        source = meta(call, 3, "src")
        src: list[list[Dim]] = []
        if source is not None:
            fits = [n == m for n, m in zip(source.shape, index, strict=False)]
            space.whole |= {f for same, d in zip(fits, ind, strict=False) if not same for f in d}
            src = [[d if same else space.dim(n, "s", whole=True) for same, d, n in zip(fits, ind, source.shape, strict=False)]]
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
    if _masks(call):
        return None
    space = Space()
    a = _Advanced(space, call)
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


# Cross-entropy --------------------------------------------------------------------------------------------------------


def _classes(local: Local, target: Any, ignore: int) -> Any:
    """Targets as this shard of the classes counts; -1, which no class has, where they lie outside or are ignored."""
    mine, outside = localise(local, target, "c")
    ignored = local.op(aten.eq.Scalar, target, ignore)
    return local.op(aten.masked_fill.Scalar, mine, local.op(aten.bitwise_or.Tensor, outside, ignored), -1)


def _nll(local: Local) -> Any:
    x, target, weight, reduction, ignore = local.args
    return local.op(aten.nll_loss_forward.default, x, _classes(local, target, ignore), weight, reduction, -1)


def _nll_backward(local: Local) -> Any:
    grad, x, target, weight, reduction, ignore, total = local.args
    mine = _classes(local, target, ignore)
    return local.op(aten.nll_loss_backward.default, grad, x, mine, weight, reduction, -1, total)


def _nll_loss_forward(call: Call) -> Rule:
    """Sums and single losses add up over rows and classes; a mean divides by a count that no device has."""
    mean = arg(call, 3, "reduction") == 1
    kind = "n:whole c:whole" if mean else "n:sum c:sum c:local"
    row = "n" if len(call.operands[0].shape) == 2 else ""
    loss = row if arg(call, 3, "reduction") == 0 else ""
    kind = kind if row else kind.replace("n:sum", "").replace("n:whole", "")
    return pattern(f"{row} c, {row}, c -> {loss}, | {kind}", local=_nll)(call)


def _nll_loss_backward(call: Call) -> Rule:
    row = "n" if len(call.operands[1].shape) == 2 else ""
    loss = row if arg(call, 4, "reduction") == 0 else ""
    return pattern(f"{loss}, {row} c, {row}, c, -> {row} c | c:local {{0}}", local=_nll_backward)(call)


ROWS: dict[str, RuleFn | str] = {
    "embedding": pattern("v d, ... -> ... d | v:sum v:local {0}", local=_embedding),
    "embedding_dense_backward": _embedding_dense_backward,
    "gather": _gather,
    "index_select": _index_select,
    **dict.fromkeys(["index.Tensor", "_unsafe_index.Tensor"], _index),
    "scatter.src": _scatter(adds=False),
    "scatter.value": _scatter(adds=False),
    "scatter_add": _scatter(adds=True),
    "index_add": _index_add,
    **dict.fromkeys(["index_put", "_unsafe_index_put"], _index_put),
    "nll_loss_forward": _nll_loss_forward,
    "nll_loss_backward": _nll_loss_backward,
}
