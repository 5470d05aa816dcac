"""Counting: how many fall into a bin, come before a value, or are there at all.

Counts over pieces add up. So does a position in a sorted sequence: it is the number of elements before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardlib.manual.collectives import psum
from shardlib.rules.lineup import whole
from shardlib.rules.patterns import pattern
from shardlib.rules.pointwise import pointwise
from shardlib.rules.rule import Call, Local, Meta, Rule, RuleFn
from shardlib.rules.space import Space, arg, meta, result_shape

aten = torch.ops.aten


def _searchsorted(call: Call) -> Rule:
    """`searchsorted(sequence, values)`: one sequence for all values, or a row for every row of values."""
    rows = "... n" if len(call.operands[0].shape) > 1 else "n"
    values = "... m" if rows == "... n" else "..."
    if len(call.operands) == 1:  # a number
        return pattern("n -> | n:sum n:local", local=_contiguous)(call)
    cut = "...:local" + (" m:local" if "m" in values else "")
    if len(call.operands) == 3:  # with a sorter, which counts in the whole sequence
        return pattern(f"{rows}, {values}, {rows} -> {values} | {cut}", local=_contiguous)(call)
    cut += " n:sum n:local"
    return pattern(f"{rows}, {values} -> {values} | {cut}", local=_contiguous)(call)


def _contiguous(local: Local) -> Any:
    """Torch warns of operands that are not contiguous, or cannot view them, as slices may be."""
    given = zip(local.args, local.call.args, strict=True)
    args = [local.op(aten.contiguous.default, x) if isinstance(m, Meta) else x for x, m in given]
    return local.op(local.call.target, *args, **local.kwargs)


def _isin(call: Call) -> Rule:
    """An element is there if some piece of the tests has it, and missing if it is missing in all of them."""
    kind = "min" if call.kwargs.get("invert") else "max"
    space = Space()
    elements = space.dims(result_shape(call), "e")
    tests = space.dims(call.operands[-1].shape, "t")
    operands = [elements] * (len(call.operands) - 1) + [tests]
    return space.rule(
        operands,
        [elements],
        reduce=dict.fromkeys((f for d in tests for f in d), kind),
        local=_contiguous,
        local_factors=(f for d in (*elements, *tests) for f in d),
    )


def _histc(call: Call) -> Rule:
    """Without bounds, which then are those of all values, nothing may be cut."""
    if arg(call, 2, "min", 0) == arg(call, 3, "max", 0):
        return whole(call)
    space = Space()
    x = space.dims(call.operands[0].shape)
    counts = space.dims(result_shape(call), "o", whole=[0])
    return space.rule([x], [counts], reduce=dict.fromkeys(space.sizes.keys() - space.whole, "sum"))


def _histogram(call: Call) -> Rule:
    """`histogram(x, bins, range, weight, density)`: counts, and the edges of the bins, which all devices have."""
    bins = meta(call, 1, "bins")
    fixed = isinstance(bins, Meta) or call.kwargs.get("range") is not None
    if not fixed or call.kwargs.get("density"):
        return whole(call)
    space = Space()
    x = space.dims(call.operands[0].shape)
    operands = [x, *(space.dims(bins.shape, "b", whole=[0]) for _ in [0] if isinstance(bins, Meta))]
    operands += [x] * (len(call.operands) - len(operands))
    outs = [space.dims(result_shape(call, i), "o", whole=[0]) for i in range(2)]
    row = [f for d in x for f in d]

    def form(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        counts, edges = call.target(*args, **kwargs)
        return psum(counts, row), edges

    local = lambda local: local.run(form, *local.args, **local.kwargs)
    return space.rule(operands, outs, reduce=dict.fromkeys(row, "none"), local=local, local_factors=row)


_WHOLE = [
    "_histogramdd_bin_edges",
    "_histogramdd_from_bin_cts",
    "_histogramdd_from_bin_tensors",
    "nonzero_static",
    "repeat_interleave.Tensor",
]

ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["searchsorted.Tensor", "searchsorted.Scalar"], _searchsorted),
    "bucketize.Tensor": pattern("..., n -> ... | n:sum n:local ...:local", local=_contiguous),
    "bucketize.Scalar": "n -> | n:sum",
    **dict.fromkeys(["isin.Tensor_Tensor", "isin.Scalar_Tensor"], _isin),
    "isin.Tensor_Scalar": pointwise(),
    "histc": _histc,
    **dict.fromkeys(["histogram.bin_ct", "histogram.bins_tensor"], _histogram),
    **dict.fromkeys(_WHOLE, whole),
}
