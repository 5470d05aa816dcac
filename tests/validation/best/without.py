"""Mechanisms of the compiler that can be left out, to see which programs need each of them.

`python -m tests.validation.best --without NAME` prints the rows whose plans get worse without NAME, and by how much.
NAME is

* a rewrite of `shardlib.compiler.simplify`, by the name of its function,
* a pass over programs of `shardlib.compiler.passes`, by the name of its function, or
* a key of `HEURISTICS`: a heuristic of propagation, of its search, or of lowering.

A rewrite or a heuristic stays in the compiler if at least three programs from different fields, or one model family,
get better by 5 % or more. Most rows of the table are one program of one field; rows of one model are one family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from shardlib.compiler import passes, pipeline, propagate, simplify
from shardlib.compiler.graph.ir import Value
from shardlib.compiler.lower.partial_sums.gathered_rows import GatheredRows
from shardlib.compiler.lower.partial_sums.partial_sum_fanout import Branching
from shardlib.compiler.lower.partial_sums.partial_sums import PartialSums
from shardlib.compiler.lower.partial_sums.reassociate_sums import Regrouping
from shardlib.compiler.lower.value_layouts import Values
from shardlib.compiler.propagate import propagate_axes
from shardlib.compiler.propagate.solver import propose_axes
from shardlib.compiler.propagate.solver.value_records import RecordFinder
from tests.validation.best import Row

Switch = tuple[Any, str, Any]  # a module or class, the name of an attribute, and its stand-in


def returns(value: Any) -> Any:
    """A function of any arguments that returns `value`."""
    return lambda *args, **kwargs: value


HEURISTICS: Mapping[str, Sequence[Switch]] = {
    # Of propagation and its search.
    "align_chunks": [(propagate_axes, "align_shards", returns(None))],
    "fused_weights": [(propagate, "find_borrowed_dims", returns({}))],
    "hide_messages": [(propagate, "hide_messages", returns(None))],
    "offer_axes": [(propagate, "offer_axes", returns(False))],
    "offer_beside_moves": [(propose_axes, "rate_dims_near_reshards", returns({}))],
    "offer_beside_selections": [(propose_axes, "_beside_selections", returns({}))],
    "offer_eased": [(propose_axes, "_eased", returns([]))],
    "offer_summed": [(propose_axes, "_summed", returns([]))],
    "relax_cuts": [(propagate, "would_split_compute", returns(False))],
    "send_less": [(propagate, "send_less", returns(None))],
    "take_apart": [(propagate, "split_units", returns(None)), (propose_axes, "split_units", returns(None))],
    "meeting_sums": [(RecordFinder, "_meeting_sums", lambda *args: set[Value]())],
    # Of lowering.
    "branching_sums": [(Branching, "consider", returns(None))],
    "carried_sums": [(PartialSums, "carried", returns(None))],
    "crossed_factors": [(Values, "_crossed", returns(False))],
    "gathered_rows": [(GatheredRows, "reach", returns(None))],
    "local_sort": [(pipeline, "mark_orders", returns(None))],
    "reassociate_sums": [(Regrouping, "waits", returns(False))],
    "own_rows": [(pipeline, "mark_group_rows", returns(None))],
    "sums_onto_sums": [(PartialSums, "_onto", returns(None))],
}


def names() -> list[str]:
    """The names of all mechanisms that can be left out."""
    return [*HEURISTICS, *(run.__name__ for run in (*simplify.PASSES, *passes.PASSES))]


@contextmanager
def without(name: str) -> Iterator[None]:
    """Leave out the mechanism `name` in the compiler; raises `ValueError` for an unknown name."""
    if name not in names():
        raise ValueError(f"no mechanism is called {name!r}; the names are {', '.join(sorted(names()))}")
    with ExitStack() as stack:
        for owner, attribute, stand_in in HEURISTICS.get(name, ()):
            stack.enter_context(patch.object(owner, attribute, stand_in))
        for stage in (simplify, passes) if name not in HEURISTICS else ():
            stack.enter_context(patch.object(stage, "PASSES", tuple(p for p in stage.PASSES if p.__name__ != name)))
        yield


def figures(row: Row) -> dict[str, float]:
    """The counted figures of a row's plan."""
    plan = row.plan()
    counts = plan.comm_bytes, len(plan.collectives), plan.flops, plan.peak_memory
    return dict(zip(("bytes", "collectives", "work", "peak"), counts, strict=True))


def worse_without(row: Row, name: str, share: float = 0.01) -> dict[str, tuple[float, float]]:
    """The figures of a row that get worse by more than `share` without a mechanism: with it, and without it."""
    before = figures(row)
    with without(name):
        after = figures(row)
    return {figure: (n, after[figure]) for figure, n in before.items() if after[figure] > n * (1 + share)}
