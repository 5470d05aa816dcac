"""Rewrites bags of one length, as `embedding_bag` of a matrix of indices makes them, as ops on that matrix.

The rows of the matrix are then sharded as any batch is.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.compiler.simplify.emit import Emit, Node, compute_value
from shardlib.compiler.simplify.rewrite import Call, Rewrite, RewritePass
from shardlib.core.aten.schemas import get_argument
from shardlib.ops.bags import BAGS, BAGS_BACKWARD, BAGS_WEIGHTS_BACKWARD, MAX, SUM

aten = torch.ops.aten
_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
_RESULTS = {0: 0, 1: 1, 2: 1, 3: 2}  # results of torch's op -> of ours, which lacks the second


def _get_length(node: Node) -> int:
    """Returns the length of all bags; 0 if it is unknown or differs."""
    offsets, n = get_argument(node, "offsets"), get_argument(node, "indices").meta["val"].numel()
    if offsets.target is not aten.arange.start_step:
        return 0
    start, stop, step = (get_argument(offsets, name) for name in ("start", "end", "step"))
    return step if (start, stop) == (0, n) and step and n % step == 0 else 0


def _have_one_length(node: Node) -> bool:
    return _get_length(node) > 0


def _can_batch(node: Node) -> bool:
    """Returns whether no node reads the bag of each index, which our op does not return."""
    reads_bags = any(user.args[1] == 1 and user.users for user in node.users)
    return _have_one_length(node) and not get_argument(node, "include_last_offset") and not reads_bags


def _batch_bags(emit: Emit, node: Node) -> Call:
    index, weights = (_reshape_to_matrix(emit, node, name) for name in ("indices", "per_sample_weights"))
    for user in list(node.users):
        user.args = (node, _RESULTS[user.args[1]])
    mode, padding = get_argument(node, "mode"), get_argument(node, "padding_idx")
    return _make_call(emit, BAGS, node.args[0], index, weights, mode, padding)


def _batch_table_gradient(emit: Emit, node: Node) -> Call:
    index, weights = (_reshape_to_matrix(emit, node, name) for name in ("indices", "per_sample_weights"))
    names = "mode", "bag_size", "maximum_indices", "num_weights", "scale_grad_by_freq", "padding_idx"
    mode, counts, rows, size, is_scaled, padding = (get_argument(node, name) for name in names)
    read = counts if mode != SUM else None, rows if mode == MAX else None
    return _make_call(emit, BAGS_BACKWARD, node.args[0], index, *read, size, is_scaled, mode, weights, padding)


def _batch_weights_gradient(emit: Emit, node: Node) -> Call:
    index = _reshape_to_matrix(emit, node, "indices")
    matrix = emit(BAGS_WEIGHTS_BACKWARD, *node.args[:2], index, get_argument(node, "padding_idx"))
    return _make_call(emit, aten.reshape.default, matrix, [-1])


def _reshape_to_matrix(emit: Emit, node: Node, name: str) -> Node | None:
    """Reshapes an argument with an element for each index to a row for each bag."""
    flat = get_argument(node, name)
    return None if flat is None else emit(aten.reshape.default, flat, [-1, _get_length(node)])


def _make_call(emit: Emit, target: Any, *args: Any) -> Call:
    return Call(target, args, val=compute_value(emit.gm, target, args, {}))


batch_equal_bags = RewritePass(
    "batch_equal_bags",
    Rewrite([_BAGS], _batch_bags, _can_batch),
    Rewrite([[aten._embedding_bag_backward.default]], _batch_table_gradient, _have_one_length),
    Rewrite([[aten._embedding_bag_per_sample_weights_backward.default]], _batch_weights_gradient, _have_one_length),
    backward=True,  # bags are rewritten when no backward op reads the bag of each index any more
)
