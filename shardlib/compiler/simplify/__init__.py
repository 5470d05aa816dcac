"""Normalize: remove from a traced graph whatever must not influence a decision, and say the rest in one way.

Every pass is a small function over the graph; `PASSES` lists them in order. What a graph computes stays the same to
the last bit (Fourier transforms over several dims, and sums of lookups in several tables, may round otherwise), and so
does which results share memory: a tensor that the function returns is never merged with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from shardlib.compiler.simplify.attention.band_masks import know_bands
from shardlib.compiler.simplify.attention.grouped_heads import group_heads
from shardlib.compiler.simplify.basic import (
    compose_reshapes,
    divide_losses_late,
    drop_dead,
    drop_identities,
    fill_by_masks,
    forget_totals,
    forget_values,
    free_draws,
    leave_out_empty,
    merge_repeated,
    no_vectors,
    one_permute,
)
from shardlib.compiler.simplify.drop_likes import free_likes
from shardlib.compiler.simplify.gather.equal_bags import even_bags
from shardlib.compiler.simplify.gather.stack_gathers import look_up_at_once
from shardlib.compiler.simplify.gather.table_gather import look_up_aligned
from shardlib.compiler.simplify.movement.fft_dims import dim_by_dim
from shardlib.compiler.simplify.movement.reverse_scan import scan_from_behind
from shardlib.compiler.simplify.movement.slice_gradients import join_slices, range_of_one
from shardlib.compiler.simplify.movement.splice import join_moves
from shardlib.compiler.simplify.movement.strided_gradients import differentiate_views
from shardlib.compiler.simplify.row_sums import know_sums_of_scores
from shardlib.compiler.simplify.value_ranges import know_counts
from shardlib.core.aten.schemas import written_arguments
from shardlib.frontend.traced_graph import Traced
from shardlib.primitives.out_spec_claims import check_claims

PASSES: Sequence[Callable[[fx.GraphModule], None]] = (
    check_claims,  # before anything goes that nobody reads
    free_draws,
    know_bands,
    fill_by_masks,
    leave_out_empty,
    drop_identities,
    one_permute,
    merge_repeated,  # before reshapes are composed: it tells which copies are shared
    drop_dead,
    no_vectors,
    differentiate_views,
    even_bags,
    look_up_aligned,
    dim_by_dim,
    group_heads,
    compose_reshapes,
    divide_losses_late,
    forget_totals,
    know_counts,
    know_sums_of_scores,
    join_slices,
    drop_dead,  # before it is asked who reads what is looked up
    look_up_at_once,
    drop_dead,
    scan_from_behind,
    range_of_one,
    join_moves,
    merge_repeated,
    free_likes,  # when no node goes any more but those that nobody reads
    drop_dead,
)


def normalize(traced: Traced) -> Traced:
    """Run all passes on the traced graph, in place, and return it.

    Example:
        >>> import torch
        >>> from shardlib.frontend.trace import trace
        >>> def f(x):
        ...     return (x.t().t().detach() * 2).reshape(2, 6).reshape(12), x.sin(), x.sin().cos()
        >>> [n.name for n in normalize(trace(f, (torch.zeros(3, 4),))).graph.graph.nodes]
        ['x', 'mul', 'view_1', 'sin', 'cos', 'output']
    """
    for run in PASSES:
        run(traced.graph)
    forget_values(traced.graph)
    verify(traced.graph)
    traced.graph.recompile()
    return traced


def verify(gm: fx.GraphModule) -> None:
    """Check what every stage relies on; an AssertionError here is a bug of the stage before.

    Values are defined before they are used, no op writes to memory, and every node has its value and its line.
    """
    seen: set[fx.Node] = set()
    for node in gm.graph.nodes:
        late = [n.name for n in node.all_input_nodes if n not in seen]
        assert not late, f"{node.name} reads {late}, defined later"
        seen.add(node)
        assert "line" in node.meta, f"{node.name} has no line"
        if node.op == "output":
            continue
        assert "val" in node.meta, f"{node.name} has no value"
        assert node.op in ("placeholder", "get_attr", "call_function"), f"{node.name} is a {node.op}"
        assert not written_arguments(node.target), f"{node.name} writes to memory: {node.target}"
