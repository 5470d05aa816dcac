"""Writes at indices, also along a sharded dim, with any reduction; reads and writes of a tensor as one row.

Along a sharded dim each device writes the entries of other devices to one spare row after its last, and drops that row.
Entries may be sharded if they are added, or compared with each other and with the old values. Every other reduction
needs its entries on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.rules.dtype_sums import is_inexact
from shardlib.rules.iteration_space import Dim, Space, arg, broadcast_labels, count_elements
from shardlib.rules.local_forms.helpers import from_torch_code, keep_on_first, locate_index, sharded_factors
from shardlib.rules.local_forms.index_dims import IndexedDims, has_mask, replicated
from shardlib.rules.out_variants import by_torch
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Lookup, Rule, RuleFn

aten = torch.ops.aten


def _embedding_backward(_: LocalBuilder, grad: Tensor, index: Tensor, n: int, padding: int, by_count: bool) -> Tensor:
    """Torch skips rows of the padding index. Here that is -1, and stands for all rows that are not in this shard."""
    mine, skipped = locate_index(index, "v", padding)
    out: Tensor = aten.embedding_dense_backward.default(grad, mine.masked_fill(skipped, -1), n, -1, by_count)
    return out


def _write_shard(x: Tensor, sharded: Mapping[int, Sequence[str]], indices: Sequence[Tensor], write: Any) -> Tensor:
    """`write(x, indices)`, without the entries of other devices; `sharded` has the factors of each indexed dim."""
    mine, pads = [], [0, 0] * x.dim()
    for (at, factors), index in zip(sharded.items(), indices, strict=True):
        for factor in factors:  # the spare row takes the entries of other devices
            index, outside = locate_index(index, factor)
            index = index + outside * x.shape[at]
            pads[2 * (x.dim() - 1 - at) + 1] = 1
        mine.append(index)
    out: Tensor = write(pad(x, pads) if any(pads) else x, mine)
    for at, factors in sharded.items():
        out = out.narrow(at, 0, x.shape[at]) if factors else out
    return out


def _reduction(call: Call) -> str | None:
    """Returns the reduction of new and old values; None if new values replace the old ones."""
    accumulates = arg(call, "accumulate", False) or schema_of(call.target).name.endswith("_add")
    return "add" if accumulates else arg(call, "reduce", None)


def _writes(call: Call, dims: IndexedDims, values: list[list[Dim]], flops: int | None = None) -> Rule:
    """Returns the rule of an op that writes `values` at indices of a tensor.

    Sharded entries have no order, so they must be added or compared, else they stay whole. Each device starts from x
    itself, which is right for a sum, a maximum and a minimum, but for no other reduction.
    """
    entries, reduction = dims.entries, _reduction(call)
    kind = {"add": "sum", "sum": "sum", "amax": "max", "amin": "min"}.get(reduction or "")
    if kind is None or not call.kwargs.get("include_self", True):
        kind = None
        dims.space.whole |= set(entries)
    added = entries if kind == "sum" else ()
    # Partial sums pass through x and the values, but no number other than 0. A mean of integers rounds.
    adds_up = reduction in (None, "add", "sum") or (reduction == "mean" and is_inexact(call.operands[0].dtype))
    linear: list[set[int]] = [{0, len(call.operands) - 1}] if adds_up else []
    if not values:
        linear = [] if reduction or arg(call, "value") else [{0}]

    def form(local: LocalBuilder, x: Tensor, *args: Any, **named: Any) -> Tensor:
        sharded, n = dims.sharded(local), dims.argument_count
        write = lambda x, mine: call.target(x, *dims.arguments(mine), *args[n:], **named)
        # Where entries are sharded, only one device may add its entries to x.
        complete = [f for f in sharded_factors(local, added) if not local.has_partial(0, f)]
        return _write_shard(keep_on_first(x, complete), sharded, dims.normalize(args[n - 1], sharded), write)

    return dims.space.rule(
        [dims.x, *dims.indices, *values],
        [dims.x],
        reduce=dict.fromkeys(entries, kind) if kind else {},
        linear=linear,
        onto=0 if kind == "sum" else None,
        emit=from_torch_code(form),
        local_factors=(*dims.rows, *added),
        loose=added,
        gathers=entries,
        lookup=Lookup(dims.rows, dims.index_operands, 1 + len(dims.indices)) if values else None,
        flops=math.prod(call.operands[-1].shape) if flops is None else flops,
    )


def _scattered(call: Call) -> Rule:
    """`scatter(x, dim, index, src)` and its like."""
    dims = IndexedDims.elementwise(call)
    if dims is None:
        return replicated(call)
    src, index = [], call.operands[1].shape
    for m in call.operands[2:]:
        fits = [a == b for a, b in zip(m.shape, index, strict=False)]
        dims.space.whole |= {f for same, d in zip(fits, dims.out, strict=False) if not same for f in d}
        sized = zip(fits, dims.out, m.shape, strict=False)
        src = [[d if same else dims.space.dim(n, "s", whole=True) for same, d, n in sized]]
    return _writes(call, dims, src, math.prod(index))


def _indexed(call: Call) -> Rule:
    """`op(x, dim, index, source, ...)`, which writes rows of `source` (or a number) to the rows that `index` names."""
    dims = IndexedDims.along(call, wraps=call.target in _WRAPS)
    rows = [(dims.entries if i in dims.dims else d) for i, d in enumerate(dims.x)]
    return _writes(call, dims, [rows if m.shape else [] for m in call.operands[2:]])


# Ops that take negative indices from the end.
_WRAPS = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)


def _index_put(call: Call) -> Rule:
    """`index_put(x, indices, values, accumulate)`. Without accumulation later entries win, so entries stay whole."""
    if has_mask(call):
        return _masked_write(call)
    dims = IndexedDims.advanced(call)
    return _writes(call, dims, [broadcast_labels(dims.out, call.operands[-1].shape)])


def _masked_write(call: Call) -> Rule:
    """`x[mask] = value`: a shard suffices to write one number; rows of values are counted in the whole mask."""
    indices, shape, values = arg(call, "indices"), call.operands[0].shape, call.operands[-1].shape
    (mask, *others), one = [m for m in indices if m is not None], math.prod(values) == 1
    if others or (indices[0] is None and not one):
        return replicated(call)
    space = Space()
    x = space.dims(shape)
    covered = x[indices.index(mask) :][: len(mask.shape)]
    rest = x[len(covered) :]
    if one:
        return space.rule([x, covered, [()] * len(values)], [x], flops=math.prod(shape))
    space.whole |= {f for d in covered for f in d}
    rest = [space.dim(values[0], "n", whole=True) if len(values) > len(rest) else (), *rest]
    return space.rule([x, covered, broadcast_labels(rest, values)], [x], flops=math.prod(shape))


# A tensor as one row --------------------------------------------------------------------------------------------------


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat: Tensor = aten.index_put.default(x.reshape(-1), [index], source.reshape(index.shape), accumulate)
    return flat.reshape(x.shape)


# Masked indices -------------------------------------------------------------------------------------------------------


def _clamped(x: Tensor, indices: list[Tensor | None]) -> list[Tensor | None]:
    return [i if i is None else i.clamp(-n, n - 1) for i, n in zip(indices, x.shape, strict=False)]


def _masked_index(x: Tensor, mask: Tensor, indices: list[Tensor | None], fill: float) -> Tensor:
    """Reads where the mask is set. Elsewhere an index may have any value, and the table may be empty."""
    if x.numel() == 0:
        indexed = [i is not None for i in indices] + [False] * x.dim()
        x = x.new_full([max(n, 1) if is_indexed else n for n, is_indexed in zip(x.shape, indexed, strict=False)], fill)
    out: Tensor = aten.index.Tensor(x, _clamped(x, indices))
    return out.masked_fill(~mask, fill)


def _masked_put(x: Tensor, mask: Tensor, indices: list[Tensor | None], values: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.clone()
    out: Tensor = aten.index_put.default(x, _clamped(x, indices), values.masked_fill(~mask, 0), True)
    return out


# Rows of one index add up across devices. Scaling by the frequency of the index needs all of them on one device.
_ROWS_ADDED = pattern(
    "... d, ... -> v d | ...:sum ...:gather ...:whole(scale_grad_by_freq) v:whole(scale_grad_by_freq) v:local "
    "v:size(num_weights) {0}",
    form=_embedding_backward,
    lookup=Lookup(("v",), (1,), 0),
    flops=count_elements,
)

ROWS: dict[str, RuleFn | str] = {
    "embedding_dense_backward": _ROWS_ADDED,
    **dict.fromkeys(["scatter.src", "scatter.value", "scatter_add", "scatter_reduce.two"], _scattered),
    **dict.fromkeys(["scatter.reduce", "scatter.value_reduce"], _scattered),
    **dict.fromkeys(["index_add", "index_copy", "index_reduce"], _indexed),
    **dict.fromkeys(["index_fill.int_Scalar", "index_fill.int_Tensor"], _indexed),
    **dict.fromkeys(["index_put", "_unsafe_index_put", "_index_put_impl"], _index_put),
    **dict.fromkeys(["masked_scatter", "masked_scatter_backward"], replicated),
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    **by_torch("take"),
    "put": _put,
    "_unsafe_masked_index": _masked_index,
    "_unsafe_masked_index_put_accumulate": _masked_put,
}
