"""Counting: elements in a bin, elements before a value, membership.

Counts over shards add up. So does a position in a sorted sequence, which is the number of elements before it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardlib.primitives.collectives import psum
from shardlib.rules.iteration_space import arg, count_elements, dim_names
from shardlib.rules.local_forms.index_dims import replicated
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Meta, Rule, RuleFn
from shardlib.rules.tensor_ops.pointwise import pointwise


def _searchsorted(call: Call) -> Rule:
    """`searchsorted(sequence, values)`: one sequence for all values, or one row per row of values."""
    rows = "... n" if len(call.operands[0].shape) > 1 else "n"
    values = "... m" if rows == "... n" else "..."
    if len(call.operands) == 1:  # a number
        return pattern("n -> | n:sum")(call)
    if len(call.operands) == 3:  # with a sorter, whose positions count in the whole sequence
        return pattern(f"{rows}, {values}, {rows} -> {values}")(call)
    return pattern(f"{rows}, {values} -> {values} | n:sum")(call)


def _isin(call: Call) -> Rule:
    """An element is present if any shard of the tests has it, and missing if all shards miss it."""
    kind = "min" if call.kwargs.get("invert") else "max"
    tests = dim_names("t", call.operands[-1].rank)
    reduced = " ".join(f"{t}:{kind}" for t in tests.split())
    elements = "..., " * (len(call.operands) - 1)
    return pattern(f"{elements} {tests} -> ... | {reduced}")(call)


def _histc(call: Call) -> Rule:
    """Without bounds, the op takes those of all values, so the values stay whole."""
    bounds = [arg(call, "min"), arg(call, "max")]
    return pattern(f"... -> _ | ...:{'whole' if len({*bounds}) == 1 else 'sum'}", flops=count_elements)(call)


def _histogram(call: Call) -> Rule:
    """`histogram(x, bins, range, weight, density)` returns counts, and the edges of the bins."""
    bins = isinstance(arg(call, "bins"), Meta)
    fixed = (bins or call.kwargs.get("range") is not None) and not call.kwargs.get("density")
    operands = ", ".join(["...", *(["_"] if bins else []), *["..."] * (len(call.operands) - 1 - bins)])

    def form(local: LocalBuilder, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        counts, edges = call.target(*args, **kwargs)
        return psum(counts, list(local.rule.reduce)), edges

    kinds = "...:none ...:local" if fixed else "...:whole"
    return pattern(f"{operands} -> _, _ | {kinds}", form=form, flops=count_elements)(call)


_WHOLE = [
    "_histogramdd_bin_edges",
    "_histogramdd_from_bin_cts",
    "_histogramdd_from_bin_tensors",
    "nonzero_static",
    "repeat_interleave.Tensor",
]

ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["searchsorted.Tensor", "searchsorted.Scalar"], _searchsorted),
    "bucketize.Tensor": "..., n -> ... | n:sum",
    "bucketize.Scalar": "n -> | n:sum",
    **dict.fromkeys(["isin.Tensor_Tensor", "isin.Scalar_Tensor"], _isin),
    "isin.Tensor_Scalar": pointwise(),
    "histc": _histc,
    **dict.fromkeys(["histogram.bin_ct", "histogram.bins_tensor"], _histogram),
    **dict.fromkeys(_WHOLE, replicated),
}
