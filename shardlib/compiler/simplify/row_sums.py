"""Derives the sums of gradients over rows of log-probabilities without adding them up.

The gradient of a loss is nonzero at its target alone, or at few chosen elements, or the same all along a row. Devices
that hold a part of a row then need no sum from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit, Node
from shardlib.compiler.simplify.losses import MEAN
from shardlib.core.aten.schemas import get_argument, get_fill_value
from shardlib.ops.scores import SCORES_BACKWARD

aten = torch.ops.aten
EmitSum = Callable[[], Node]  # emits a derived value, once it is needed


def attach_row_sums(gm: fx.GraphModule) -> None:
    """Passes the sums of rows to gradients of log-softmaxes, if the sums can be derived."""
    for node in gm.graph.nodes:
        if node.target is not aten._log_softmax_backward_data.default:
            continue
        grad, scores, dim, dtype = node.args
        val = scores.meta["val"]
        if not (grad.meta["val"].dtype == val.dtype == dtype and val.dim() and grad.meta["val"].shape == val.shape):
            continue
        dim %= val.dim()
        if emit_sum := _Rows(Emit(gm, node), dim, val).derive_sum(grad):
            node.target, node.args = SCORES_BACKWARD, (grad, scores, emit_sum(), dim)


@dataclass(frozen=True)
class _Rows:
    """Tensors like `val`, whose rows lie along `dim`."""

    emit: Emit
    dim: int
    val: torch.Tensor

    def derive_sum(self, x: Node) -> EmitSum | None:
        """Derives the sums of the rows of a tensor."""
        derive = _SUMS.get(x.target)
        like = isinstance(x.meta.get("val"), torch.Tensor) and x.meta["val"].shape == self.val.shape
        return derive(self, x) if derive is not None and like and x.meta["val"].dtype == self.val.dtype else None

    def derive_common(self, x: Any) -> EmitSum | None:
        """Derives a tensor that is constant along rows, without the dim of the rows."""
        if not isinstance(x, fx.Node):
            return (lambda: x) if isinstance(x, int | float) else None
        if x.target is aten.expand.default:
            return self.derive_common(x.args[0])
        if x.target in _KEEP_COMMON and not x.kwargs and x.meta["val"].shape == self.val.shape:
            parts = [part for arg in x.args if (part := self.derive_common(arg))]
            return partial(_emit_op, self, x.target, parts) if len(parts) == len(x.args) else None
        shape = x.meta["val"].shape
        d = self.dim - (self.val.dim() - len(shape))
        if d < 0:
            return lambda: x
        return (lambda: self.emit(aten.squeeze.dim, x, d)) if shape[d] == 1 else None

    @property
    def row_shape(self) -> list[int]:
        """The shape without the dim of the rows."""
        return [n for d, n in enumerate(self.val.shape) if d != self.dim]


def _sum_loss_gradient(rows: _Rows, x: Node) -> EmitSum | None:
    """A loss reads the element at its target, unless the target is ignored."""
    grad, _, target, weight, reduction, ignore, _ = x.args
    if weight is not None or reduction == MEAN or rows.dim != min(1, rows.val.dim() - 1):
        return None

    def emit_sum() -> Node:
        emit = rows.emit
        each = emit(aten.expand.default, emit(aten.neg.default, grad), list(target.meta["val"].shape))
        return emit(aten.masked_fill.Scalar, each, emit(aten.eq.Scalar, target, ignore), 0)

    return emit_sum


def _sum_scattered(rows: _Rows, x: Node) -> EmitSum | None:
    """Rows of zeros add up to the numbers that are added to them."""
    zeros, dim, index, source = x.args
    added, shape = (t.meta["val"].shape for t in (source, index))
    fits = added == shape and all(n == rows.val.shape[d] for d, n in enumerate(shape) if d != rows.dim)
    if get_fill_value(zeros) != 0 or dim % rows.val.dim() != rows.dim or len(shape) != rows.val.dim() or not fits:
        return None
    return lambda: rows.emit(aten.sum.dim_IntList, source, [rows.dim])


def _sum_common(rows: _Rows, x: Node) -> EmitSum | None:
    """A number all along a row adds up to the number times the row's length."""
    if (emit_number := rows.derive_common(x)) is None:
        return None
    size, emit = rows.val.shape[rows.dim], rows.emit
    return lambda: emit(aten.expand.default, emit(aten.mul.Tensor, emit_number(), size), rows.row_shape)


def _sum_both(rows: _Rows, x: Node) -> EmitSum | None:
    sums = [rows.derive_sum(a) for a in x.args if isinstance(a, fx.Node)]
    if x.kwargs or len(sums) != 2 or None in sums:
        return None
    return lambda: rows.emit(aten.add.Tensor, *[emit_sum() for emit_sum in sums if emit_sum])


def _sum_scaled(rows: _Rows, x: Node) -> EmitSum | None:
    """A row times a number that is the same all along it adds up to its sum times the number."""
    orders = [x.args, x.args[::-1]] if x.target is aten.mul.Tensor else [x.args]
    for row, *rest in orders if not x.kwargs else ():
        total = rows.derive_sum(row) if isinstance(row, fx.Node) else None
        factors = [factor for other in rest if (factor := rows.derive_common(other))]
        if total is not None and len(factors) == len(rest):
            return partial(_emit_op, rows, x.target, [total, *factors])
    return None


def _emit_op(rows: _Rows, target: Any, parts: Sequence[EmitSum]) -> Node:
    return rows.emit(target, *[part() for part in parts])


def _sum_probabilities(rows: _Rows, x: Node) -> EmitSum | None:
    like = {"dtype": rows.val.dtype, "device": rows.val.device}
    is_row = get_argument(x, "dim") % rows.val.dim() == rows.dim
    return (lambda: rows.emit(aten.full.default, rows.row_shape, 1, **like)) if is_row else None


def _sum_exponentials(rows: _Rows, x: Node) -> EmitSum | None:
    """Exponentials of log-probabilities are probabilities."""
    (scores,) = x.args
    return _sum_probabilities(rows, scores) if scores.target is aten._log_softmax.default else None


_KEEP_COMMON = (aten.neg.default, aten.mul.Tensor, aten.div.Tensor)
_SUMS: Mapping[Any, Callable[[_Rows, Node], EmitSum | None]] = {
    aten.nll_loss_backward.default: _sum_loss_gradient,
    aten.nll_loss2d_backward.default: _sum_loss_gradient,
    aten.scatter_add.default: _sum_scattered,
    aten.expand.default: _sum_common,
    aten.add.Tensor: _sum_both,
    aten.neg.default: _sum_scaled,
    aten.mul.Tensor: _sum_scaled,
    aten.div.Tensor: _sum_scaled,
    aten._softmax.default: _sum_probabilities,
    aten.exp.default: _sum_exponentials,
}
