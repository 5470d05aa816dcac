"""What the gradients of a row of log-probabilities add up to is often known without adding them up: a loss gave one to
its target, a few to those that were chosen, or the same to all. Then nobody who has a part of a row asks the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.basic import MEAN, call
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_argument
from shardlib.ops.scores import SCORES_BACKWARD

aten = torch.ops.aten
Node = Any  # of fx, whose arguments are what its op takes
Made = Callable[[], Node]  # writes what is known, when it is needed


def know_sums_of_scores(gm: fx.GraphModule) -> None:
    """Gradients of log-softmaxes are told the sums of their rows, where these are known."""
    for node in gm.graph.nodes:
        if node.target is not aten._log_softmax_backward_data.default:
            continue
        grad, scores, dim, dtype = node.args
        val = scores.meta["val"]
        if not (grad.meta["val"].dtype == val.dtype == dtype and val.dim() and grad.meta["val"].shape == val.shape):
            continue
        dim %= val.dim()
        if total := _Rows(gm, node, dim, val).total(grad):
            node.target, node.args = SCORES_BACKWARD, (grad, scores, total(), dim)


@dataclass(frozen=True)
class _Rows:
    """Values like `val`, in front of node `at`, whose rows lie along `dim`."""

    gm: fx.GraphModule
    at: Node
    dim: int
    val: torch.Tensor

    def total(self, x: Node) -> Made | None:
        """What the rows of a value add up to."""
        known = _TOTALS.get(x.target)
        like = isinstance(x.meta.get("val"), torch.Tensor) and x.meta["val"].shape == self.val.shape
        return known(self, x) if known is not None and like and x.meta["val"].dtype == self.val.dtype else None

    def alike(self, x: Any) -> Made | None:
        """A value that is the same all along a row, without that dim."""
        if not isinstance(x, fx.Node):
            return (lambda: x) if isinstance(x, int | float) else None
        if x.target is aten.expand.default:
            return self.alike(x.args[0])
        if x.target in _OF_ALIKE and not x.kwargs and x.meta["val"].shape == self.val.shape:
            parts = [one for arg in x.args if (one := self.alike(arg))]
            return partial(_written, self, x.target, parts) if len(parts) == len(x.args) else None
        shape = x.meta["val"].shape
        d = self.dim - (self.val.dim() - len(shape))
        if d < 0:
            return lambda: x
        return (lambda: self.write(aten.squeeze.dim, x, d)) if shape[d] == 1 else None

    def write(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.gm.graph.inserting_before(self.at):
            return call(self.gm, self.at, target, *args, **kwargs)


def _of_target(rows: _Rows, x: Node) -> Made | None:
    """A loss takes what is at its target, unless that is ignored."""
    grad, _, target, weight, reduction, ignore, _ = x.args
    if weight is not None or reduction == MEAN or rows.dim != min(1, rows.val.dim() - 1):
        return None

    def made() -> Node:
        one = rows.write(aten.expand.default, rows.write(aten.neg.default, grad), list(target.meta["val"].shape))
        return rows.write(aten.masked_fill.Scalar, one, rows.write(aten.eq.Scalar, target, ignore), 0)

    return made


def _of_chosen(rows: _Rows, x: Node) -> Made | None:
    """What is added to zeros at places of the same row."""
    zeros, dim, index, source = x.args
    zero = has_trait(zeros.target, "fills") and (
        has_trait(zeros.target, "zeros") or get_argument(zeros, "fill_value") == 0
    )
    added, shape = (t.meta["val"].shape for t in (source, index))
    fits = added == shape and all(n == rows.val.shape[d] for d, n in enumerate(shape) if d != rows.dim)
    known = zero and dim % rows.val.dim() == rows.dim and len(shape) == rows.val.dim() and fits
    return (lambda: rows.write(aten.sum.dim_IntList, source, [rows.dim])) if known else None


def _of_same(rows: _Rows, x: Node) -> Made | None:
    """The same all along the row, as often as that is long."""
    if (one := rows.alike(x)) is None:
        return None
    size, shape = rows.val.shape[rows.dim], [n for d, n in enumerate(rows.val.shape) if d != rows.dim]
    return lambda: rows.write(aten.expand.default, rows.write(aten.mul.Tensor, one(), size), shape)


def _of_sum(rows: _Rows, x: Node) -> Made | None:
    known = [rows.total(a) for a in x.args if isinstance(a, fx.Node)]
    if x.kwargs or len(known) != 2 or None in known:
        return None
    return lambda: rows.write(aten.add.Tensor, *[made() for made in known if made])


def _of_multiple(rows: _Rows, x: Node) -> Made | None:
    """A row times what is the same all along it."""
    turns = [x.args, x.args[::-1]] if x.target is aten.mul.Tensor else [x.args]
    for row, *rest in turns if not x.kwargs else ():
        total = rows.total(row) if isinstance(row, fx.Node) else None
        others = [one for other in rest if (one := rows.alike(other))]
        if total is not None and len(others) == len(rest):
            return partial(_written, rows, x.target, [total, *others])
    return None


def _written(rows: _Rows, target: Any, parts: Sequence[Made]) -> Node:
    return rows.write(target, *[one() for one in parts])


def _of_probabilities(rows: _Rows, x: Node) -> Made | None:
    shape = [n for d, n in enumerate(rows.val.shape) if d != rows.dim]
    like = {"dtype": rows.val.dtype, "device": rows.val.device}
    whole = get_argument(x, "dim") % rows.val.dim() == rows.dim
    return (lambda: rows.write(aten.full.default, shape, 1, **like)) if whole else None


def _of_exponentials(rows: _Rows, x: Node) -> Made | None:
    """Those of log-probabilities are probabilities."""
    (scores,) = x.args
    return _of_probabilities(rows, scores) if scores.target is aten._log_softmax.default else None


_OF_ALIKE = (aten.neg.default, aten.mul.Tensor, aten.div.Tensor)
_TOTALS: Mapping[Any, Callable[[_Rows, Node], Made | None]] = {
    aten.nll_loss_backward.default: _of_target,
    aten.nll_loss2d_backward.default: _of_target,
    aten.scatter_add.default: _of_chosen,
    aten.expand.default: _of_same,
    aten.add.Tensor: _of_sum,
    aten.neg.default: _of_multiple,
    aten.mul.Tensor: _of_multiple,
    aten.div.Tensor: _of_multiple,
    aten._softmax.default: _of_probabilities,
    aten.exp.default: _of_exponentials,
}
