"""Bags of one length: rows of a table that each row of an index names, added up, averaged or compared.

ATen's ops take indices in a row and where each bag begins, which says nothing about how the bags of a batch may be cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
SUM, MEAN, MAX = range(3)


def bags(table: Tensor, index: Tensor, weights: Tensor | None, mode: int, padding: int) -> tuple[Tensor, ...]:
    """The bags; where it is no sum, how many rows each has; of a maximum, which rows it is from.

    Example:
        >>> table, index = torch.arange(6.0).view(3, 2), torch.tensor([[0, 1], [2, 2]])
        >>> bags(table, index, None, MEAN, 2)[:2]
        (tensor([[1., 2.],
                [0., 0.]]), tensor([2, 0]))
    """
    flat = _row(index), _starts(index), False, mode, False, _row(weights), False, padding
    out, _, _, rows = aten._embedding_bag.default(table, *flat)
    counts = index.ne(padding).sum(1).to(index.dtype) if mode != SUM else index.new_empty(0)
    return out, counts, rows if mode == MAX else index.new_empty(0)


def bags_backward(
    grad: Tensor, index: Tensor, counts: Tensor | None, rows: Tensor | None, num_weights: int, scale_grad_by_freq: bool,
    mode: int, weights: Tensor | None, padding: int,
) -> Tensor:  # fmt: skip
    """The gradient of the table."""
    counts, rows = (index.new_empty(0) if x is None else x for x in (counts, rows))
    how = num_weights, scale_grad_by_freq, mode, _row(weights), padding
    return aten._embedding_bag_dense_backward.default(grad, _row(index), _bag_of(index), counts, rows, *how)  # type: ignore[no-any-return]


def bags_weights_backward(grad: Tensor, table: Tensor, index: Tensor, padding: int) -> Tensor:
    """The gradient of the weights of sums."""
    where = _row(index), _starts(index), _bag_of(index), SUM, padding
    each = aten._embedding_bag_per_sample_weights_backward.default(grad, table, *where)
    return each.view(index.shape)  # type: ignore[no-any-return]


def _starts(index: Tensor) -> Tensor:
    """Where each bag begins."""
    return torch.arange(len(index), dtype=index.dtype, device=index.device) * index.shape[1]


def _bag_of(index: Tensor) -> Tensor:
    """The bag of each element."""
    bag = torch.arange(len(index), dtype=index.dtype, device=index.device)
    return bag.unsqueeze(1).repeat(1, index.shape[1]).view(-1)


def _row(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1).contiguous()


for _form, _schema in (
    (bags, "(Tensor table, Tensor index, Tensor? weights, int mode, int padding) -> (Tensor, Tensor, Tensor)"),
    (bags_backward, "(Tensor grad, Tensor index, Tensor? counts, Tensor? rows, SymInt num_weights, "
     "bool scale_grad_by_freq, int mode, Tensor? weights, int padding) -> Tensor"),
    (bags_weights_backward, "(Tensor grad, Tensor table, Tensor index, int padding) -> Tensor"),
):  # fmt: skip
    torch.library.define(f"shardlib::{_form.__name__}", _schema)
    torch.library.impl(f"shardlib::{_form.__name__}", "CompositeExplicitAutograd", _form)

BAGS = torch.ops.shardlib.bags.default
BAGS_BACKWARD = torch.ops.shardlib.bags_backward.default
BAGS_WEIGHTS_BACKWARD = torch.ops.shardlib.bags_weights_backward.default
