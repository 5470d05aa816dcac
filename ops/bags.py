"""Embedding bags of one length: the sum, mean or maximum of the table's rows that each row of an index names.

ATen's ops take flat indices and the bags' offsets, which hides the batch dim from sharding. These ops keep it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardlib.ops import define_op

aten = torch.ops.aten
SUM, MEAN, MAX = range(3)


def bags(table: Tensor, index: Tensor, weights: Tensor | None, mode: int, padding: int) -> tuple[Tensor, ...]:
    """Returns the bags, the rows counted in each (unless sums), and the rows of the maxima (for maxima)."""
    flat = _flatten(index), _bag_starts(index), False, mode, False, _flatten(weights), False, padding
    out, _, _, rows = aten._embedding_bag.default(table, *flat)
    counts = index.ne(padding).sum(1).to(index.dtype) if mode != SUM else index.new_empty(0)
    return out, counts, rows if mode == MAX else index.new_empty(0)


def bags_backward(
    grad: Tensor, index: Tensor, counts: Tensor | None, rows: Tensor | None, num_weights: int, scale_grad_by_freq: bool,
    mode: int, weights: Tensor | None, padding: int,
) -> Tensor:  # fmt: skip
    """Computes the gradient of the table."""
    counts, rows = (index.new_empty(0) if x is None else x for x in (counts, rows))
    options = num_weights, scale_grad_by_freq, mode, _flatten(weights), padding
    return aten._embedding_bag_dense_backward.default(  # type: ignore[no-any-return]
        grad, _flatten(index), _bag_numbers(index), counts, rows, *options
    )


def bags_weights_backward(grad: Tensor, table: Tensor, index: Tensor, padding: int) -> Tensor:
    """Computes the gradient of the weights of sums."""
    flat = _flatten(index), _bag_starts(index), _bag_numbers(index), SUM, padding
    dweights = aten._embedding_bag_per_sample_weights_backward.default(grad, table, *flat)
    return dweights.view(index.shape)  # type: ignore[no-any-return]


def _bag_starts(index: Tensor) -> Tensor:
    """Returns the offset of each bag in the flat index."""
    return torch.arange(len(index), dtype=index.dtype, device=index.device) * index.shape[1]


def _bag_numbers(index: Tensor) -> Tensor:
    """Returns the bag of each element of the flat index."""
    return torch.arange(len(index), dtype=index.dtype, device=index.device).repeat_interleave(index.shape[1])


def _flatten(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1).contiguous()


BAGS = define_op(
    "bags(Tensor table, Tensor index, Tensor? weights, int mode, int padding) -> (Tensor, Tensor, Tensor)", bags
)
BAGS_BACKWARD = define_op(
    "bags_backward(Tensor grad, Tensor index, Tensor? counts, Tensor? rows, SymInt num_weights, "
    "bool scale_grad_by_freq, int mode, Tensor? weights, int padding) -> Tensor",
    bags_backward,
)
BAGS_WEIGHTS_BACKWARD = define_op(
    "bags_weights_backward(Tensor grad, Tensor table, Tensor index, int padding) -> Tensor", bags_weights_backward
)
