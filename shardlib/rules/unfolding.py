"""Windows of a dim as a dim of their own: what those of a piece read beyond it comes from the neighbours, and gradients
of it go back there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlib.rules.halo import extent, fetch, give_back, length, reframe, sent
from shardlib.rules.rule import Call, Halo, Rule, RuleFn
from shardlib.rules.space import Dim, Space, arg, axis, path, result_shape, shape_ints
from shardlib.rules.window import Window

aten = torch.ops.aten


@dataclass(frozen=True)
class Unfolded:
    """A value `x`, its `windows` along dim `at` (whose elements are a last dim), and the labels of both.

    Windows that touch, but do not overlap, are factors of the dim.
    """

    at: int
    window: Window
    x: Dim
    windows: Dim
    sizes: tuple[int, int]

    @property
    def fetches(self) -> bool:
        """Whether a piece of the windows may read what others have of x."""
        return bool(self.x and self.windows) and self.x[0] != self.windows[0]

    def forward(self, x: Tensor) -> Tensor:
        mine = extent(self.windows, self.sizes[1])
        if self.fetches:
            x = fetch(x, self.at, self.x, self.window.reads(mine), name="input")
        n = x.shape[self.at]
        x = reframe(x, self.at, (0, n), (0, max(n, self.window.span)))  # torch wants one window
        return x.unfold(self.at, self.window.kernel, self.window.stride).narrow(self.at, 0, length(mine))

    def backward(self, grad: Tensor) -> Tensor:
        mine, span = extent(self.windows, self.sizes[1]), self.window.span
        need = self.window.reads(mine) if self.fetches else (0, self.sizes[0] * length(mine) // self.sizes[1])
        grad = reframe(grad, self.at, mine, (mine[0], max(mine[1], mine[0] + 1)))
        n = max(length(need), span)
        sizes = [*grad.shape[: self.at], n, *grad.shape[self.at + 1 : -1]]
        x = aten.unfold_backward.default(grad, sizes, self.at, self.window.kernel, self.window.stride)
        x = x.narrow(self.at, 0, length(need))
        return give_back(x, self.at, self.x, need, self.sizes[0], name="gradient") if self.fetches else x


def _rule(call: Call, whole: Sequence[int], windows: Sequence[int], where: tuple[int, str], *, backward: bool) -> Rule:
    """The rule of either way, for these shapes; the dim stands at `where` among the arguments, then size and step."""
    space, at = Space(), axis(arg(call, *where), max(len(whole), 1))
    kernel, step = arg(call, where[0] + 1, "size"), arg(call, where[0] + 2, "step")
    count = windows[at] if whole else 1
    one, many = space.dim(kernel, "s", whole=True), space.dim(count, "w", whole=not whole)
    size = whole[at] if whole else 1
    touching = kernel == step and size == count * kernel
    along = (*many, *one) if touching else space.dim(size, "p", whole=not many)
    x = [along if i == at else space.dim(n) for i, n in enumerate(whole)]
    parts = [*(many if i == at else d for i, d in enumerate(x)), one] if whole else [one]
    how = Unfolded(at, Window(kernel, step), along, many, (size, count))
    ties = {along[0]: many[0]} if how.fetches and along[0] not in space.whole else {}
    form = how.backward if backward else how.forward
    return space.rule(
        [parts if backward else x],
        [x if backward else parts],
        linear=[{0}],
        reduce={f: kind for pair in ties.items() for f, kind in zip(pair, ("none", "sum"), strict=True)},
        ints=shape_ints(path(call, 1, "input_sizes"), x) if backward else {},
        local=lambda local: local.run(form, local.args[0]),
        local_factors=many,
        follows=ties,
        halos=[Halo(p, 0, not backward, sent(size, count, how.window.reads)) for p in ties],
    )


def _unfold(call: Call) -> Rule:
    """`unfold(x, dimension, size, step)`."""
    return _rule(call, call.operands[0].shape, result_shape(call), (1, "dimension"), backward=False)


def _unfold_backward(call: Call) -> Rule:
    """`unfold_backward(grad, input_sizes, dim, size, step)`."""
    return _rule(call, result_shape(call), call.operands[0].shape, (2, "dim"), backward=True)


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["unfold", "unfold_copy"], _unfold),
    "unfold_backward": _unfold_backward,
}
