"""Normalizes a traced graph: removes what must not influence a decision, and writes equal computations alike.

Every pass is a small function over the graph, or a `RewritePass` over local rewrites, which are data. `PASSES` lists
them in order. Results keep every bit (Fourier transforms over several dims may round otherwise). Results that share
memory still do, and no others: a returned tensor is never merged with another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from shardlib.compiler.simplify.attention.band_masks import recognize_band_masks
from shardlib.compiler.simplify.attention.grouped_heads import group_heads
from shardlib.compiler.simplify.drop_likes import drop_likes
from shardlib.compiler.simplify.emit import drop_shared_values
from shardlib.compiler.simplify.gather.table_gather import gather_aligned_rows
from shardlib.compiler.simplify.losses import count_loss_targets, divide_losses_late, drop_loss_totals
from shardlib.compiler.simplify.movement.compose_views import compose_permutes, compose_reshapes
from shardlib.compiler.simplify.movement.fft_dims import split_fft_dims
from shardlib.compiler.simplify.movement.reverse_scan import reverse_scans
from shardlib.compiler.simplify.movement.slice_gradients import join_slice_gradients
from shardlib.compiler.simplify.movement.splice import splice_moves
from shardlib.compiler.simplify.movement.strided_gradients import differentiate_views
from shardlib.compiler.simplify.redundant_nodes import (
    drop_dead_nodes,
    drop_identities,
    merge_equal_nodes,
    merge_reductions,
)
from shardlib.compiler.simplify.row_sums import attach_row_sums
from shardlib.compiler.simplify.single_ops import (
    anchor_draws_at_inputs,
    drop_empty_operands,
    drop_unread_statistics,
    fill_by_masks,
    skip_singular_vectors,
)
from shardlib.core.aten.schemas import written_arguments
from shardlib.frontend.traced_graph import TracedFunction
from shardlib.primitives.out_spec_claims import check_claims

PASSES: Sequence[Callable[[fx.GraphModule], None]] = (
    check_claims,  # before dead nodes go
    anchor_draws_at_inputs,
    recognize_band_masks,
    fill_by_masks,
    drop_empty_operands,
    drop_identities,
    compose_permutes,
    merge_equal_nodes,  # before compose_reshapes, which asks whether copies are shared
    merge_reductions,
    drop_dead_nodes,
    drop_unread_statistics,
    skip_singular_vectors,
    differentiate_views,
    gather_aligned_rows,
    split_fft_dims,
    group_heads,
    compose_reshapes,
    divide_losses_late,
    drop_loss_totals,
    count_loss_targets,
    attach_row_sums,
    join_slice_gradients,
    drop_dead_nodes,
    reverse_scans,
    splice_moves,
    merge_equal_nodes,
    drop_likes,  # when only dead nodes are left to drop
    drop_dead_nodes,
)


def normalize(traced: TracedFunction) -> TracedFunction:
    """Runs all passes on the traced graph, in place, and returns it."""
    for run in PASSES:
        run(traced.graph)
    drop_shared_values(traced.graph)
    verify(traced.graph)
    traced.graph.recompile()
    return traced


def verify(gm: fx.GraphModule) -> None:
    """Checks what every stage relies on; an AssertionError is a bug of the stage before.

    Values are defined before they are used, no op writes to memory, and every node has its value and its line.
    """
    defined: set[fx.Node] = set()
    for node in gm.graph.nodes:
        late = [n.name for n in node.all_input_nodes if n not in defined]
        assert not late, f"{node.name} reads {late}, defined later"
        defined.add(node)
        assert "line" in node.meta, f"{node.name} has no line"
        if node.op == "output":
            continue
        assert "val" in node.meta, f"{node.name} has no value"
        assert node.op in ("placeholder", "get_attr", "call_function"), f"{node.name} is a {node.op}"
        assert not written_arguments(node.target), f"{node.name} writes to memory: {node.target}"
