"""Mechanisms of the compiler that can be left out, to see which programs need each of them.

`python -m tests.validation.best --without NAME` prints the rows whose plans get worse without NAME, and by how much.
NAME is

* a rewrite of `shardlib.compiler.simplify`, by the name of its function,
* a pass over programs of `shardlib.compiler.passes`, by the name of its function,
* a key of `HEURISTICS`: a heuristic of propagation, of its search, of lowering, or of a pass, or
* several of these with commas between them: all are left out together.

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
from shardlib.compiler.passes.comm import merge_halos
from shardlib.compiler.passes.comm.derive_halos import DerivedBorder
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
    "wide_sums": [(PartialSums, "_joins_wide_sum", returns(False))],
    "sums_onto_sums": [(PartialSums, "_onto", returns(None))],
    # Of passes.
    "derived_borders": [(merge_halos, "derive", lambda borders, _: [DerivedBorder(b.moves[0], b) for b in borders])],
}


def names() -> list[str]:
    """The names of all mechanisms that can be left out."""
    return [*HEURISTICS, *(run.__name__ for run in (*simplify.PASSES, *passes.PASSES))]


@contextmanager
def without(name: str) -> Iterator[None]:
    """Leave out the mechanism `name`, or several with commas between them; raises `ValueError` for an unknown name."""
    together = name.split(",")
    for one in together:
        if one not in names():
            raise ValueError(f"no mechanism is called {one!r}; the names are {', '.join(sorted(names()))}")
    with ExitStack() as stack:
        for owner, attribute, stand_in in (switch for one in together for switch in HEURISTICS.get(one, ())):
            stack.enter_context(patch.object(owner, attribute, stand_in))
        for stage in (simplify, passes):
            kept = tuple(p for p in stage.PASSES if p.__name__ not in together)
            stack.enter_context(patch.object(stage, "PASSES", kept))
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
