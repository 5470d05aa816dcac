"""Writing at indices, also along a cut dim.

Along a cut dim every device drops what lies on the others: it goes into one row more than the shard has, which is then
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardlib.rules.lineup import Advanced, alongside, masks, whole
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Meta, Rule, RuleFn
from shardlib.rules.shards import checked, cut, located, once
from shardlib.rules.space import Dim, Space, arg, axis, broadcast, meta, numel

aten = torch.ops.aten


def _embedding_backward(local: Local) -> Any:
    """Torch skips rows of the padding index: what lies outside becomes one that no row of the shard has."""

    def form(grad: Tensor, index: Tensor, n: int, padding: int, by_count: bool) -> Tensor:
        mine, outside = located(index, "v")
        skipped = outside | (index == padding) if padding >= 0 else outside
        return aten.embedding_dense_backward.default(grad, mine.masked_fill(skipped, -1), n, -1, by_count)  # type: ignore[no-any-return]

    return local.run(form, *local.args)


def _write(x: Tensor, places: Mapping[int, Sequence[str]], indices: Sequence[Tensor], write: Any) -> Tensor:
    """`write(x, indices)`, each index into a dim of x; `places` says what cuts these dims."""
    mine, pads = [], [0, 0] * x.dim()
    for (at, factors), index in zip(places.items(), indices, strict=True):
        for factor in factors:  # the row behind the shard's last takes what lies on other devices
            index, outside = located(index, factor)
            index = index + outside * x.shape[at]
            pads[2 * (x.dim() - 1 - at) + 1] = 1
        mine.append(index)
    out: Tensor = write(pad(x, pads) if any(pads) else x, mine)
    for at, factors in places.items():
        out = out.narrow(at, 0, x.shape[at]) if factors else out
    return out


def scattered(kind: Callable[[Call], str | None]) -> RuleFn:
    """`scatter(x, dim, index, src)` and its like; `kind` says how results of shared out entries combine.

    None: their order matters, or what x holds where nothing is written does; they stay together.
    """

    def rule(call: Call) -> Rule:
        space = Space()
        shape, index = call.operands[0].shape, call.operands[1].shape
        if len(shape) != len(index):  # an index without elements, or a number
            return whole(call)
        at = axis(arg(call, 1, "dim"), len(shape))
        x, ind = alongside(space, shape, index, at)
        how = kind(call)
        entries = ind[at] if shape else ()
        source = meta(call, 3, "src")
        src: list[list[Dim]] = []
        if isinstance(source, Meta):
            fits = [n == m for n, m in zip(source.shape, index, strict=False)]
            space.whole |= {f for same, d in zip(fits, ind, strict=False) if not same for f in d}
            sized = zip(fits, ind, source.shape, strict=False)
            src = [[d if same else space.dim(n, "s", whole=True) for same, d, n in sized]]
        if how is None:
            space.whole |= set(entries)
        row = x[at] if shape else ()

        def local(local: Local) -> Any:
            mine, shared = cut(local, row), cut(local, entries if how == "sum" else ())

            def form(x: Tensor, index: Tensor, rest: Sequence[Any], named: Any) -> Tensor:
                index = checked(index, shape[at]) if mine else index
                write = lambda x, indices: call.target(x, at, *indices, *rest, **named)
                return _write(once(x, shared), {at: mine}, [index], write)

            x, _, index, *rest = local.args
            return local.run(form, x, index, rest, local.kwargs)

        linear = {0, 2} if src else {0}
        return space.rule(
            [x, ind, *src],
            [x],
            reduce=dict.fromkeys(entries, how) if how else {},
            linear=[linear] if _is_linear(call) else [],
            local=local,
            local_factors=(*row, *(entries if how == "sum" else ())),
            flops=numel(index),
        )

    return rule


def _is_linear(call: Call) -> bool:
    """Whether sums on x and on what is written may stay pending: not where a number is written, unless it is 0."""
    reduce = call.kwargs.get("reduce", arg(call, 4, "reduce"))
    if reduce is not None:
        return reduce in ("add", "sum", "mean") and isinstance(arg(call, 3, "src"), Meta)
    return isinstance(arg(call, 3, "src"), Meta) or not arg(call, 3, "value")


def indexed(kind: Callable[[Call], str | None] | None = None) -> RuleFn:
    """`op(x, dim, index, source, ...)`, which writes rows of `source` (or a number) to the rows that `index` names.

    `kind` says how results of shared out entries combine; None: the entries stay together.
    """

    def rule(call: Call) -> Rule:
        space = Space()
        shape = call.operands[0].shape
        at = axis(arg(call, 1, "dim"), len(shape))
        x = space.dims(shape)
        ind = space.dims(call.operands[1].shape, "j")
        entries = ind[0] if ind else ()
        how = kind(call) if kind else None
        if how is None:
            space.whole |= set(entries)
        rows = [[entries if i == at else d for i, d in enumerate(x)]]
        source = [rows[0] if m.shape else [] for m in call.operands[2:]]
        row = x[at] if shape else ()

        def local(local: Local) -> Any:
            mine, shared = cut(local, row), cut(local, entries if how == "sum" else ())
            wraps = call.target in _WRAPS

            def form(x: Tensor, index: Tensor, rest: Sequence[Any], named: Any) -> Tensor:
                if mine:
                    index = checked(index, shape[at], -shape[at] if wraps else 0)
                    index = index % shape[at] if wraps else index
                write = lambda x, indices: call.target(x, at, *indices, *rest, **named)
                return _write(once(x, shared), {at: mine}, [index], write)

            x, _, index, *rest = local.args
            return local.run(form, x, index, rest, local.kwargs)

        return space.rule(
            [x, ind, *source],
            [x],
            reduce=dict.fromkeys(entries, how) if how else {},
            linear=_linear(call),
            local=local,
            local_factors=(*row, *(entries if how == "sum" else ())),
            flops=numel(call.operands[-1].shape),
        )

    return rule


def _linear(call: Call) -> list[set[int]]:
    if call.target in _WRAPS:
        return [] if arg(call, 3, "value") else [{0}]
    return [{0, 2}] if arg(call, 4, "reduce", "sum") == "sum" else []


# Ops that count negative indices from the end.
_WRAPS = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)


def extremes(call: Call) -> str | None:
    """Every device starts from x itself; that is the same for a maximum, a minimum, but no other reduction."""
    kind = {"amax": "max", "amin": "min"}.get(arg(call, 4, "reduce"))
    return kind if call.kwargs.get("include_self", True) else None


def _index_put(call: Call) -> Rule:
    """`index_put(x, indices, values, accumulate)`; without accumulation later entries win, so they stay together."""
    if masks(call):
        return _put_where(call)
    space = Space()
    a = Advanced(space, call)
    adds = bool(arg(call, 3, "accumulate", False))
    values = broadcast(a.out, call.operands[-1].shape)
    if not adds:
        space.whole |= set(a.index_factors)

    def local(local: Local) -> Any:
        cuts, shared = a.cuts(local), cut(local, a.index_factors)

        def form(x: Tensor, given: Sequence[Any], rest: Sequence[Any], named: Any) -> Tensor:
            write = lambda x, mine: call.target(x, a.listed(mine), *rest, **named)
            indices = a.positive([i for i in given if i is not None], cuts)
            # A value that the addends share is added by each, which is right only where entries are not shared out.
            return _write(once(x, shared), dict(zip(a.dims, cuts, strict=True)), indices, write)

        x, given, *rest = local.args
        return local.run(form, x, given, rest, local.kwargs)

    return space.rule(
        [a.x, *a.indices, values],
        [a.x],
        reduce=dict.fromkeys(a.index_factors, "sum") if adds else {},
        linear=[{0, len(call.operands) - 1}],
        local=local,
        local_factors=(*a.table_factors, *(a.index_factors if adds else ())),
        flops=numel(call.operands[-1].shape),
    )


def _put_where(call: Call) -> Rule:
    """`x[mask] = value`: one number goes wherever a piece of the mask says; rows of values are counted on the whole."""
    given, shape, values = arg(call, 1, "indices"), call.operands[0].shape, call.operands[-1].shape
    (mask, *others), one = [m for m in given if m is not None], numel(values) == 1
    if others or (given[0] is None and not one):
        return whole(call)
    space = Space()
    x = space.dims(shape)
    covered = x[given.index(mask) :][: len(mask.shape)]
    rest = x[len(covered) :]
    if one:
        return space.rule([x, covered, [()] * len(values)], [x], flops=numel(shape))
    space.whole |= {f for d in covered for f in d}
    rest = [space.dim(values[0], "n", whole=True) if len(values) > len(rest) else (), *rest]
    return space.rule([x, covered, broadcast(rest, values)], [x], flops=numel(shape))


ROWS: dict[str, RuleFn | str] = {
    # Rows of one index add up, wherever they are; scaling by how often it occurs needs all of them in one place.
    "embedding_dense_backward": pattern(
        "... d, ... -> v d | ...:sum ...:whole(scale_grad_by_freq) v:whole(scale_grad_by_freq) v:local "
        "v:size(num_weights) {0}",
        local=_embedding_backward,
        flops=lambda call, _: numel(call.operands[0].shape),
    ),
    **dict.fromkeys(["scatter.src", "scatter.value"], scattered(lambda call: None)),
    "scatter_add": scattered(lambda call: "sum"),
    "index_add": indexed(lambda call: "sum"),
    **dict.fromkeys(["index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor"], indexed()),
    "index_reduce": indexed(extremes),
    **dict.fromkeys(["index_put", "_unsafe_index_put", "_index_put_impl"], _index_put),
}
