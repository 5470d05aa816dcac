"""Rewrites single elements of a dim that are read or written as ranges of one, so that moves along the dim compose."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.compiler.simplify.emit import Emit, Node
from shardlib.compiler.simplify.rewrite import Call, Rewrite, RewritePass
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten


def _has_known_index(node: Node) -> bool:
    return type(get_argument(node, "index")) is int


def _scatter_range(emit: Emit, node: Node) -> Call:
    x, row = node.args[:2]
    dim = _get_dim(node, x)
    row = emit(*(_slice_row(row, dim) or (aten.unsqueeze.default, row, dim)))
    return Call(aten.slice_scatter.default, (x, row, dim, *_get_range(node, x)))


def _unsqueeze_row(emit: Emit, node: Node) -> Call | None:
    call = _slice_row(node.args[0], get_argument(node, "dim") % node.meta["val"].dim())
    return None if call is None else Call(call[0], call[1:])


def _slice_row(row: Node, dim: int) -> tuple[Any, ...] | None:
    """Returns the call that reads a row as a range along `dim`; None unless the row is one of that dim."""
    if row.target is not aten.select.int or not _has_known_index(row) or _get_dim(row, row.args[0]) != dim:
        return None
    return aten.slice.Tensor, row.args[0], dim, *_get_range(row, row.args[0])


def _get_range(node: Node, source: Node) -> tuple[int, int]:
    begin = get_argument(node, "index") % source.meta["val"].shape[_get_dim(node, source)]
    return begin, begin + 1


def _get_dim(node: Node, source: Node) -> int:
    return int(get_argument(node, "dim") % source.meta["val"].dim())


slice_selected_rows = RewritePass(
    "slice_selected_rows",
    Rewrite([[aten.select_scatter.default]], _scatter_range, _has_known_index),  # -> slice_scatter
    Rewrite([[aten.unsqueeze.default], [aten.select.int]], _unsqueeze_row),  # unsqueeze(select(x)) -> slice(x)
)
