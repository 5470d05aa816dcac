"""Zeros around what is convolved, and slices of what comes out, are part of the convolution: cut apart from it, the
padded dim has other pieces than what is padded and what comes out, and both ends move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardlib.core.aten.schemas import get_argument
from shardlib.ops.convolve import CONVOLVE, CONVOLVE_BACKWARD

aten = torch.ops.aten
Ends = list[tuple[int, int]]  # per spatial dim, the zeros in front and behind


def convolve_padded(gm: fx.GraphModule) -> None:
    """Convolutions with their pads and slices, forward and backward each for itself."""
    for node in list(gm.graph.nodes):
        if node.target is aten.convolution.default and not get_argument(node, "transposed"):
            _forward(node)
        elif node.target is aten.convolution_backward.default and not get_argument(node, "transposed"):
            _backward(node)


def _forward(node: fx.Node) -> None:
    x, *tensors = (get_argument(node, name) for name in ("input", "weight", "bias"))
    ends = _given(node)
    if (padded := _padded(x, ends)) is not None:
        (x, *_), ends = x.args, padded
    last = node
    while len(last.users) == 1 and (taken := _taken(user := next(iter(last.users)), last, node, ends)) is not None:
        last, ends = user, taken
    if ends != _given(node):
        _write(last, node, (x, *tensors), ends)


def _backward(node: fx.Node) -> None:
    grad, x, *rest = (get_argument(node, name) for name in ("grad_output", "input", "weight", "bias_sizes"))
    ends, items = _given(node), {user.args[1]: user for user in node.users}
    dx = list(items[0].users) if 0 in items and get_argument(node, "output_mask")[0] else []
    if (padded := _padded(x, ends)) is not None and all(_undoes(user, x) for user in dx):
        (x, *_), ends = x.args, padded
        for user in dx:
            user.replace_all_uses_with(items[0])
        if get_argument(node, "output_mask")[0]:
            short = (dx[0] if dx else x).meta["val"]
            node.meta["val"] = (short, *node.meta["val"][1:])
            if 0 in items:
                items[0].meta["val"] = short
    while grad.target is aten.slice_backward.default and (taken := _taken(grad, grad, node, ends)) is not None:
        (grad, *_), ends = grad.args, taken
    if ends != _given(node):
        _write(node, node, (grad, x, *rest), ends, get_argument(node, "output_mask"))


def _each(node: fx.Node, name: str) -> list[int]:
    """An argument of a convolution, for every spatial dim."""
    dims, value = get_argument(node, "weight").meta["val"].dim() - 2, get_argument(node, name)
    return [*value] * dims if len(value) == 1 else [*value]


def _given(node: fx.Node) -> Ends:
    return [(n, n) for n in _each(node, "padding")]


def _padded(x: fx.Node, ends: Ends) -> Ends | None:
    """The ends with what zeros around x, of its spatial dims alone, add; None if it is no such pad."""
    if x.target is not aten.constant_pad_nd.default or get_argument(x, "value") != 0:
        return None
    amounts = get_argument(x, "pad")
    if len(amounts) > 2 * len(ends):
        return None
    amounts = [*amounts, *[0] * (2 * len(ends) - len(amounts))]
    pairs = list(zip(amounts[-2::-2], amounts[::-2], strict=True))
    if any(n > 0 > more for given, pair in zip(ends, pairs, strict=True) for n, more in zip(given, pair, strict=True)):
        return None  # what is dropped first is not there again
    return [(a + before, b + after) for (a, b), (before, after) in zip(ends, pairs, strict=True)]


def _undoes(node: fx.Node, pad: fx.Node) -> bool:
    """Whether a node takes away what `pad` put there."""
    mine = get_argument(node, "pad") if node.target is pad.target else None
    return mine is not None and [*mine] == [-n for n in get_argument(pad, "pad")]


def _taken(node: fx.Node, long: fx.Node, conv: fx.Node, ends: Ends) -> Ends | None:
    """The ends where only a slice of a spatial dim of what comes out, `long`, is wanted; None of another op."""
    if node.target not in (aten.slice.Tensor, aten.slice_backward.default) or get_argument(node, "step") != 1:
        return None
    shape = long.meta["val"].shape
    k = get_argument(node, "dim") % len(shape) - 2
    start, stop, _ = slice(get_argument(node, "start"), get_argument(node, "end")).indices(shape[k + 2])
    if k < 0 or stop <= start:
        return None
    stride = _each(conv, "stride")[k]
    (a, b), more = ends[k], (start * stride, (shape[k + 2] - stop) * stride)
    return [*ends[:k], (a - more[0], b - more[1]), *ends[k + 1 :]]


def _write(node: fx.Node, conv: fx.Node, tensors: Sequence[Any], ends: Ends, *mask: Any) -> None:
    """Make a node of the convolution `conv` with other operands and ends: ATen's, where both ends are alike."""
    before, after = ([pair[i] for pair in ends] for i in range(2))
    alike = before == after and min(before) >= 0
    targets = (aten.convolution_backward.default, CONVOLVE_BACKWARD) if mask else (aten.convolution.default, CONVOLVE)
    how = _each(conv, "stride"), before, _each(conv, "dilation"), False, [0] * len(ends) if alike else after
    node.target, node.kwargs = targets[not alike], {}
    node.args = (*tensors, *how, get_argument(conv, "groups"), *mask)
