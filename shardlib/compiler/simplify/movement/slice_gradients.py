"""Gradients of slices: autograd puts each in its place among zeros and adds all of these, as large as the whole. They
are put side by side instead, so that a sum over devices is taken once, of what is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardlib.compiler.simplify.basic import call
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten


@dataclass(frozen=True)
class _Slices:
    """A tensor of zeros but for some ranges of one dim, and what is there; all of it like `whole`."""

    dim: int
    parts: dict[tuple[int, int], fx.Node]
    whole: fx.Node

    def fits(self, other: _Slices) -> bool:
        """Returns whether the sum of both has such a form."""
        a, b = self.whole.meta["val"], other.whole.meta["val"]
        if (self.dim, a.shape, a.dtype) != (other.dim, b.shape, b.dtype):
            return False
        return all(x == y or x[1] <= y[0] or y[1] <= x[0] for x in self.parts for y in other.parts)


def range_of_one(gm: fx.GraphModule) -> None:
    """A single element of a dim that is taken, or written, is a range of one where the dim stays: one move may follow
    another then."""
    for node in gm.graph.nodes:
        if node.target is aten.select_scatter.default and type(get_argument(node, "index")) is int:
            x, row = node.args[:2]
            dim = get_argument(node, "dim") % x.meta["val"].dim()
            with gm.graph.inserting_before(node):
                row = call(gm, node, *(_taken(row, dim) or (aten.unsqueeze.default, row, dim)))
            node.target, node.args = aten.slice_scatter.default, (x, row, dim, *_one(node, x))
        elif node.target is aten.unsqueeze.default:
            dim = get_argument(node, "dim") % node.meta["val"].dim()
            if (taken := _taken(node.args[0], dim)) is not None:
                node.target, node.args = taken[0], taken[1:]


def _taken(row: fx.Node, dim: int) -> tuple[Any, ...] | None:
    """The call that takes a row as a range along `dim`, if it is one of that dim."""
    if row.target is not aten.select.int or type(get_argument(row, "index")) is not int:
        return None
    source = row.args[0]
    assert isinstance(source, fx.Node)
    return (aten.slice.Tensor, source, dim, *_one(row, source)) if _dim(row, source) == dim else None


def _one(node: fx.Node, source: fx.Node) -> tuple[int, int]:
    at = get_argument(node, "index") % source.meta["val"].shape[_dim(node, source)]
    return at, at + 1


def _dim(node: fx.Node, source: fx.Node) -> int:
    return int(get_argument(node, "dim") % source.meta["val"].dim())


def join_slices(gm: fx.GraphModule) -> None:
    """Sums of tensors that are zero outside a range become one tensor; what lies in one range is added there."""
    forms: dict[fx.Node, _Slices] = {}
    for node in list(gm.graph.nodes):
        if (form := _placed(gm, node)) or (form := _added(gm, node, forms)):
            forms[node] = form
    for node, form in forms.items():
        if node.target is aten.add.Tensor and not any(user in forms for user in node.users):
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(_joined(gm, node, form))


def _placed(gm: fx.GraphModule, node: fx.Node) -> _Slices | None:
    """What a slice's gradient is made of."""
    if node.target not in (aten.slice_backward.default, aten.select_backward.default) or len(node.users) != 1:
        return None
    grad, shape = node.args[0], node.meta["val"].shape
    assert isinstance(grad, fx.Node)
    if grad.meta["val"].dtype != node.meta["val"].dtype or not all(type(n) is int for n in (*shape, *node.args[2:])):
        return None
    dim = get_argument(node, "dim") % len(shape)
    if node.target is aten.slice_backward.default:
        begin, end, step = slice(*(get_argument(node, name) for name in ("start", "end", "step"))).indices(shape[dim])
        return _Slices(dim, {(begin, end): grad}, node) if step == 1 and begin < end else None
    begin = get_argument(node, "index") % shape[dim]
    with gm.graph.inserting_before(node):
        return _Slices(dim, {(begin, begin + 1): call(gm, node, aten.unsqueeze.default, grad, dim)}, node)


def _added(gm: fx.GraphModule, node: fx.Node, forms: dict[fx.Node, _Slices]) -> _Slices | None:
    """The form of a sum of two."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    a, b = (forms.get(x) if isinstance(x, fx.Node) and len(x.users) == 1 else None for x in node.args)
    if a is None or b is None or not a.fits(b):
        return None
    parts = a.parts | b.parts
    with gm.graph.inserting_before(node):
        for both in a.parts.keys() & b.parts.keys():
            parts[both] = call(gm, node, aten.add.Tensor, a.parts[both], b.parts[both])
    return _Slices(a.dim, parts, node)


def _joined(gm: fx.GraphModule, node: fx.Node, form: _Slices) -> fx.Node:
    """The parts in order, with zeros between them."""
    shape, at = list(node.meta["val"].shape), 0
    if len(form.parts) == 1:
        (((begin, end), part),) = form.parts.items()
        return call(gm, node, aten.slice_backward.default, part, shape, form.dim, begin, end, 1)
    pieces: list[fx.Node] = []

    def fill(size: int, like: fx.Node) -> None:
        if size:
            zeros = [*shape[: form.dim], size, *shape[form.dim + 1 :]]
            pieces.append(call(gm, node, aten.new_zeros.default, like, zeros))

    for (begin, end), part in sorted(form.parts.items(), key=lambda of: of[0]):
        fill(begin - at, part)
        pieces.append(part)
        at = end
    fill(shape[form.dim] - at, pieces[-1])
    cat = call(gm, node, aten.cat.default, pieces, form.dim)
    return call(gm, node, aten.add.Tensor, cat, 0)  # each element met a zero, and -0.0 + 0.0 is 0.0
