"""Concatenates the gradients of slices, which autograd pads with zeros to the whole tensor and adds.

A partial sum over devices is then reduced once, and at the size of the slices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardlib.compiler.simplify.emit import Emit
from shardlib.core.aten.schemas import get_argument

aten = torch.ops.aten


@dataclass(frozen=True)
class _Ranges:
    """A tensor like `whole` that is zero outside of ranges of one dim; `parts` are the tensors at the ranges."""

    dim: int
    parts: dict[tuple[int, int], fx.Node]
    whole: fx.Node

    def can_add(self, other: _Ranges) -> bool:
        """Returns whether the sum of both has such a form."""
        a, b = self.whole.meta["val"], other.whole.meta["val"]
        if (self.dim, a.shape, a.dtype) != (other.dim, b.shape, b.dtype):
            return False
        return all(x == y or x[1] <= y[0] or y[1] <= x[0] for x in self.parts for y in other.parts)


def join_slice_gradients(gm: fx.GraphModule) -> None:
    """Replaces sums of tensors that are zero outside of a range by a concatenation; equal ranges are added first."""
    forms: dict[fx.Node, _Ranges] = {}
    for node in list(gm.graph.nodes):
        emit = Emit(gm, node)
        if (form := _find_range(emit, node)) or (form := _add_ranges(emit, node, forms)):
            forms[node] = form
    for node, form in forms.items():
        if node.target is aten.add.Tensor and not any(user in forms for user in node.users):
            node.replace_all_uses_with(_join_parts(Emit(gm, node), node, form))


def _find_range(emit: Emit, node: fx.Node) -> _Ranges | None:
    """Returns the form of a slice's gradient."""
    if node.target not in (aten.slice_backward.default, aten.select_backward.default) or len(node.users) != 1:
        return None
    grad, shape = node.args[0], node.meta["val"].shape
    assert isinstance(grad, fx.Node)
    if grad.meta["val"].dtype != node.meta["val"].dtype or not all(type(n) is int for n in (*shape, *node.args[2:])):
        return None
    dim = get_argument(node, "dim") % len(shape)
    if node.target is aten.slice_backward.default:
        begin, end, step = slice(*(get_argument(node, name) for name in ("start", "end", "step"))).indices(shape[dim])
        return _Ranges(dim, {(begin, end): grad}, node) if step == 1 and begin < end else None
    begin = get_argument(node, "index") % shape[dim]
    return _Ranges(dim, {(begin, begin + 1): emit(aten.unsqueeze.default, grad, dim)}, node)


def _add_ranges(emit: Emit, node: fx.Node, forms: dict[fx.Node, _Ranges]) -> _Ranges | None:
    """Returns the form of a sum of two tensors that have forms."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    a, b = (forms.get(x) if isinstance(x, fx.Node) and len(x.users) == 1 else None for x in node.args)
    if a is None or b is None or not a.can_add(b):
        return None
    parts = a.parts | b.parts
    for both in a.parts.keys() & b.parts.keys():
        parts[both] = emit(aten.add.Tensor, a.parts[both], b.parts[both])
    return _Ranges(a.dim, parts, node)


def _join_parts(emit: Emit, node: fx.Node, form: _Ranges) -> fx.Node:
    """Emits the parts in order, with zeros between them."""
    shape, dim = list(node.meta["val"].shape), form.dim
    joined: fx.Node
    if len(form.parts) == 1:
        (((begin, end), part),) = form.parts.items()
        joined = emit(aten.slice_backward.default, part, shape, dim, begin, end, 1)
        return joined
    operands: list[fx.Node] = []

    def append_zeros(size: int, like: fx.Node) -> None:
        if size:
            operands.append(emit(aten.new_zeros.default, like, [*shape[:dim], size, *shape[dim + 1 :]]))

    position = 0
    for (begin, end), part in sorted(form.parts.items(), key=lambda item: item[0]):
        append_zeros(begin - position, part)
        operands.append(part)
        position = end
    append_zeros(shape[dim] - position, operands[-1])
    joined = emit(aten.cat.default, operands, dim)
    joined = emit(aten.add.Tensor, joined, 0)  # autograd adds zeros to each element, and -0.0 + 0.0 is 0.0
    return joined
