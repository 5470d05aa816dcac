"""Writing at indices, also along a cut dim, with any reduction; reading and writing a tensor as one row.

Along a cut dim every device drops what lies on the others: it goes into one row more than the shard has, which is then
left out. What is added up may come from all devices; so may what is compared, as long as the old values count too.
Every other reduction needs its entries in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardlib.core.torch_private import schema_of
from shardlib.rules.dtype_sums import adds
from shardlib.rules.iteration_space import Dim, Space, arg, broadcast, elements, numel
from shardlib.rules.local_forms.helpers import cut, located, once, torch_code
from shardlib.rules.local_forms.index_dims import Places, masks, whole
from shardlib.rules.out_variants import by_torch
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Looks, Rule, RuleFn

aten = torch.ops.aten


def _embedding_backward(_: Local, grad: Tensor, index: Tensor, n: int, padding: int, by_count: bool) -> Tensor:
    """Torch skips rows of the padding index: what lies outside becomes one that no row of the shard has."""
    mine, skipped = located(index, "v", padding)
    out: Tensor = aten.embedding_dense_backward.default(grad, mine.masked_fill(skipped, -1), n, -1, by_count)
    return out


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


def _reduction(call: Call) -> str | None:
    """How what is written goes together with what is there; None: it replaces that."""
    adds = arg(call, "accumulate", False) or schema_of(call.target).name.endswith("_add")
    return "add" if adds else arg(call, "reduce", None)


def _writes(call: Call, places: Places, values: list[list[Dim]], flops: int | None = None) -> Rule:
    """The rule of an op that writes `values` to places of a tensor.

    Of entries no order is known where devices share them out: these add up, or are compared, or stay together. Every
    device starts from x itself; that is the same for a sum, a maximum, a minimum, but no other reduction.
    """
    entries, said = places.entries, _reduction(call)
    how = {"add": "sum", "sum": "sum", "amax": "max", "amin": "min"}.get(said or "")
    if how is None or not call.kwargs.get("include_self", True):
        how = None
        places.space.whole |= set(entries)
    added = entries if how == "sum" else ()
    # Sums on x and on what is written may stay pending: not where a number is written, unless it is 0.
    adds_up = said in (None, "add", "sum") or (said == "mean" and adds(call.operands[0].dtype))  # of integers it rounds
    linear: list[set[int]] = [{0, len(call.operands) - 1}] if adds_up else []
    if not values:
        linear = [] if said or arg(call, "value") else [{0}]

    def form(local: Local, x: Tensor, *given: Any, **named: Any) -> Tensor:
        cuts, (*_, indices), rest = places.cuts(local), given[: places.until], given[places.until :]
        there = lambda x, mine: call.target(x, *places.arguments(mine), *rest, **named)
        # A value that addends share is added by each, which is right only where entries are not shared out.
        alike = [f for f in cut(local, added) if not local.owes(0, f)]
        return _write(once(x, alike), cuts, places.ready(indices, cuts), there)

    return places.space.rule(
        [places.x, *places.indices, *values],
        [places.x],
        reduce=dict.fromkeys(entries, how) if how else {},
        linear=linear,
        onto=0 if how == "sum" else None,
        local=torch_code(form),
        local_factors=(*places.rows, *added),
        loose=added,
        gathers=entries,
        looks=Looks(places.rows, places.given_as, 1 + len(places.indices)) if values else None,
        flops=numel(call.operands[-1].shape) if flops is None else flops,
    )


def _scattered(call: Call) -> Rule:
    """`scatter(x, dim, index, src)` and its like."""
    places = Places.beside(call)
    if places is None:
        return whole(call)
    src, index = [], call.operands[1].shape
    for m in call.operands[2:]:
        fits = [a == b for a, b in zip(m.shape, index, strict=False)]
        places.space.whole |= {f for same, d in zip(fits, places.out, strict=False) if not same for f in d}
        sized = zip(fits, places.out, m.shape, strict=False)
        src = [[d if same else places.space.dim(n, "s", whole=True) for same, d, n in sized]]
    return _writes(call, places, src, numel(index))


def _indexed(call: Call) -> Rule:
    """`op(x, dim, index, source, ...)`, which writes rows of `source` (or a number) to the rows that `index` names."""
    places = Places.along(call, wraps=call.target in _WRAPS)
    rows = [(places.entries if i in places.dims else d) for i, d in enumerate(places.x)]
    return _writes(call, places, [rows if m.shape else [] for m in call.operands[2:]])


# Ops that count negative indices from the end.
_WRAPS = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)


def _index_put(call: Call) -> Rule:
    """`index_put(x, indices, values, accumulate)`; without accumulation later entries win, so they stay together."""
    if masks(call):
        return _put_where(call)
    places = Places.advanced(call)
    values = broadcast(places.out, call.operands[-1].shape)
    return _writes(call, places, [values])


def _put_where(call: Call) -> Rule:
    """`x[mask] = value`: one number goes wherever a piece of the mask says; rows of values are counted on the whole."""
    given, shape, values = arg(call, "indices"), call.operands[0].shape, call.operands[-1].shape
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


# A tensor as one row --------------------------------------------------------------------------------------------------


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat: Tensor = aten.index_put.default(x.reshape(-1), [index], source.reshape(index.shape), accumulate)
    return flat.reshape(x.shape)


# Masked indices -------------------------------------------------------------------------------------------------------


def _clamped(x: Tensor, indices: list[Tensor | None]) -> list[Tensor | None]:
    return [i if i is None else i.clamp(-n, n - 1) for i, n in zip(indices, x.shape, strict=False)]


def _masked_index(x: Tensor, mask: Tensor, indices: list[Tensor | None], fill: float) -> Tensor:
    """Read where the mask says; elsewhere an index may be anything, and the table may be empty."""
    if x.numel() == 0:
        indexed = [i is not None for i in indices] + [False] * x.dim()
        x = x.new_full([max(n, 1) if at else n for n, at in zip(x.shape, indexed, strict=False)], fill)
    out: Tensor = aten.index.Tensor(x, _clamped(x, indices))
    return out.masked_fill(~mask, fill)


def _masked_put(x: Tensor, mask: Tensor, indices: list[Tensor | None], values: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    out: Tensor = aten.index_put.default(x, _clamped(x, indices), values.masked_fill(~mask, 0), True)
    return out


# Rows of one index add up, wherever they are; scaling by how often it occurs needs all of them in one place.
_ROWS_ADDED = pattern(
    "... d, ... -> v d | ...:sum ...:gather ...:whole(scale_grad_by_freq) v:whole(scale_grad_by_freq) v:local "
    "v:size(num_weights) {0}",
    form=_embedding_backward,
    looks=Looks(("v",), (1,), 0),
    flops=elements,
)

ROWS: dict[str, RuleFn | str] = {
    "embedding_dense_backward": _ROWS_ADDED,
    **dict.fromkeys(["scatter.src", "scatter.value", "scatter_add", "scatter_reduce.two"], _scattered),
    **dict.fromkeys(["scatter.reduce", "scatter.value_reduce"], _scattered),
    **dict.fromkeys(["index_add", "index_copy", "index_reduce"], _indexed),
    **dict.fromkeys(["index_fill.int_Scalar", "index_fill.int_Tensor"], _indexed),
    **dict.fromkeys(["index_put", "_unsafe_index_put", "_index_put_impl"], _index_put),
    **dict.fromkeys(["masked_scatter", "masked_scatter_backward"], whole),
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    **by_torch("take"),
    "put": _put,
    "_unsafe_masked_index": _masked_index,
    "_unsafe_masked_index_put_accumulate": _masked_put,
}
