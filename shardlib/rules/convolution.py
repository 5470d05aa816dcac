"""Convolutions: batch, channels and space; a cut spatial dim exchanges its borders.

x is `[n, (g ci), *in]`, the weight `[(g co), ci, *kernel]` (transposed: `[(g ci), co, *kernel]`), the result
`[n, (g co), *out]`, with g groups. Where a spatial dim is cut, a device works out its own piece of the result, from its
piece of x and what its windows reach of its neighbours'. In the backward pass it takes the gradients of all results
that read its piece of x: so dx is complete, and every product of dw is counted where its element of x is; one exchange
serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.rules.halo import Piece, Range, extent, length, sent
from shardlib.rules.rule import Call, Halo, Labels, Local, Rule, RuleFn
from shardlib.rules.space import Dim, Space, arg, path, result_shape
from shardlib.rules.window import Window, each

aten = torch.ops.aten
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """The arguments of a convolution behind its tensors, per spatial dim where they are; `first` stands first."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: Any

    @staticmethod
    def of(call: Call | Local, first: int, dims: int) -> Settings:
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
        s, p, d, t, o, g = (arg(call, first + i, name) for i, name in enumerate(names))
        return Settings(each(s, dims), each(p, dims), each(d, dims), t, each(o, dims), g)

    def window(self, k: int, weight: Shape) -> Window:
        return Window(weight[2 + k], self.stride[k], self.padding[k], self.dilation[k])

    def need(self, k: int, weight: Shape, size: int, *, forward: bool) -> Callable[[Range], Range]:
        """Which of the `size` inputs a range of results needs (`forward`), or of the results a range of inputs."""
        window = self.window(k, weight)
        return window.reads if forward != self.transposed else lambda r: window.readers(r, size)

    @property
    def args(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


class Dims:
    """The labels of one convolution of x (of shape `x`) with a weight, which gives `out`."""

    def __init__(self, x: Shape, weight: Shape, out: Shape, how: Settings) -> None:
        self.space = space = Space()
        g = space.dim(how.groups, "g")
        n, ci, co = space.dim(x[0], "n"), space.dim(x[1] // how.groups, "ci"), space.dim(out[1] // how.groups, "co")
        kernel = [space.dim(k, "k", whole=True) for k in weight[2:]]
        self.pairs: list[tuple[Dim, Dim]] = []  # per spatial dim, the labels of x and of the result
        for a, b in zip(x[2:], out[2:], strict=True):
            i = space.dim(a, "h" if a == b else "i")
            self.pairs.append((i, i if a == b else space.dim(b, "o")))
        self.x = [n, (*g, *ci), *(i for i, _ in self.pairs)]
        self.weight = [(*g, *ci), co, *kernel] if how.transposed else [(*g, *co), ci, *kernel]
        self.out = [n, (*g, *co), *(o for _, o in self.pairs)]
        self.bias = [(*g, *co)]
        self.channels = (*g, *ci, *co)
        self.n, self.ci, self.co, self.groups = n, ci, co, g

    def tied(self, *, forward: bool) -> dict[str, str]:
        """The input may be cut with the output (`forward`), or the output with the input; alone it stays whole."""
        follows = {}
        for pair in self.pairs:
            follower, leader = pair if forward else pair[::-1]
            if follower != leader and follower:
                if leader:
                    follows[follower[0]] = leader[0]
                else:
                    self.space.whole.add(follower[0])
        return follows

    def rule(self, operands: Any, results: Any, *, call: Call, first: int, **rest: Any) -> Rule:
        ints = {path(call, first + 5, "groups"): (1, self.groups)} if self.groups else {}
        cut = {f for pair in self.pairs for d in pair for f in d} | set(self.channels)
        return self.space.rule(operands, results, ints=ints, local_factors=cut, loose=self.channels, **rest)


def _forward(call: Call) -> Rule:
    x, weight = (m.shape for m in call.operands[:2])
    out = result_shape(call)
    how = Settings.of(call, 3, len(x) - 2)
    dims = Dims(x, weight, out, how)
    follows = dims.tied(forward=True)
    bias = len(call.operands) > 2
    return dims.rule(
        [dims.x, dims.weight, dims.bias][: len(call.operands)],
        [dims.out],
        call=call,
        first=3,
        reduce=dict.fromkeys(dims.ci, "sum") | dict.fromkeys(follows, "none"),
        linear=[{0, 2}, {1, 2}] if bias else [{0}, {1}],
        local=_forward_local,
        follows=follows,
        halos=_halos(dims.x, x, out, weight, how, forward=True),
        flops=2 * math.prod(x if how.transposed else out) * math.prod(weight[1:]),
    )


def _forward_local(local: Local) -> Any:
    labels = local.rule.operands
    x, weight = (_solid(local, i, ("input", "weight")[i]) for i in (0, 1))
    bias = _once(local) if len(labels) > 2 else None
    kernel = local.call.operands[1].shape
    how = Settings.of(local, 3, len(kernel) - 2)
    covered: dict[int, Any] = {}
    results, shape = local.rule.results[0], result_shape(local.call)
    for k in _cut(local, labels[0], results):
        at, window = 2 + k, how.window(k, kernel)
        mine = extent(local, results[at], shape[at])
        need = frame = local.calc(how.need(k, kernel, local.call.operands[0].shape[at], forward=True), mine)
        covered[at] = local.calc(_one_at_least, mine)
        if how.transposed:
            frame = local.calc(_around, window, need, mine)
            covered[at] = local.calc(window.reads, frame)
        x.fetch(at, labels[0][at], need, frame)
        how.padding[k] = how.output_padding[k] = 0
    args = (*how.args[:-1], local.calc(lambda g: max(g, 1), how.groups))
    y = local.op(aten.convolution.default, x.value, weight.value, bias and bias.value, *args)
    out = Piece.of(local, y, results, "y")
    channels, out.shape[1] = out.shape[1], _full(local, results[1])
    for at, have in covered.items():
        out.reframe(at, have, extent(local, results[at], shape[at]))
    out.keep(1, 0, channels)
    return out.value


def _around(window: Window, need: Range, mine: Range) -> Range:
    """Inputs that reach over all of the results `mine`, of which those in `need` alone matter."""
    if not length(mine):
        return -1, 0
    low = (mine[0] + window.padding) // window.stride
    high = -(-(mine[1] + window.padding - window.span) // window.stride) + 1
    return (min(need[0], low), max(need[1], high)) if length(need) else (low, max(high, low + 1))


def _backward(call: Call) -> Rule:
    grad, x, weight = (m.shape for m in call.operands[:3])
    how = Settings.of(call, 4, len(x) - 2)
    dims = Dims(x, weight, grad, how)
    follows = dims.tied(forward=False)
    spatial = {f for pair in dims.pairs for d in pair for f in d} - follows.keys()
    results = [[] if m is None else d for m, d in zip(call.results, (dims.x, dims.weight, dims.bias), strict=True)]
    work = 2 * math.prod(x if how.transposed else grad) * math.prod(weight[1:])
    return dims.rule(
        [dims.out, dims.x, dims.weight],
        results,
        call=call,
        first=4,
        reduce=dict.fromkeys((*dims.n, *dims.co, *spatial), "sum") | dict.fromkeys((*dims.ci, *follows), "none"),
        linear=[{0}],
        local=_backward_local,
        follows=follows,
        halos=_halos(dims.out, grad, x, weight, how, forward=False),
        flops=work * sum(m is not None for m in call.results[:2]),
    )


def _backward_local(local: Local) -> Any:
    labels, shapes = local.rule.operands, [m.shape for m in local.call.operands]
    grad, x, weight = (_solid(local, i, name) for i, name in enumerate(("gradient", "input", "weight")))
    how = Settings.of(local, 4, len(shapes[1]) - 2)
    dbias = _dbias(local) if local.call.results[2] is not None else None
    covered: dict[int, Any] = {}
    for k in _cut(local, *labels[:2]):
        at, mine = 2 + k, extent(local, labels[1][2 + k], shapes[1][2 + k])
        need = frame = local.calc(how.need(k, shapes[2], shapes[0][at], forward=False), mine)
        covered[at] = local.calc(_one_at_least, mine)
        if not how.transposed:
            frame = local.calc(_one_at_least, need)
            covered[at] = local.calc(how.window(k, shapes[2]).reads, frame)
        grad.fetch(at, labels[0][at], need, frame)
        x.reframe(at, mine, covered[at])
        how.padding[k] = how.output_padding[k] = 0
    args = (*how.args[:-1], local.calc(lambda g: max(g, 1), how.groups))
    mask = [m is not None for m in local.call.results[:2]]
    dx, dweight, _ = local.op(
        aten.convolution_backward.default, grad.value, x.value, weight.value, None, *args, [*mask, False]
    )
    outs: list[Any] = [None, None, dbias]
    for i, (value, piece) in enumerate(zip((dx, dweight), (x, weight), strict=True)):
        if mask[i]:
            out = Piece(local, value, list(piece.shape), "")
            for at, have in covered.items() if i == 0 else ():
                out.reframe(at, have, extent(local, labels[1][at], shapes[1][at]))
            for at, n in enumerate(Piece.of(local, None, labels[1 + i], "").shape[:2]):
                out.keep(at, 0, n)
            outs[i] = out.value
    return tuple(outs)


def _dbias(local: Local) -> Any:
    """The sum of this device's gradients; of those that several devices hold, because x is cut more often, one's."""
    labels = local.rule.operands
    grad = Piece.of(local, local.args[0], labels[0], "gradient")
    for at, (o, i) in enumerate(zip(labels[0], labels[1], strict=True)):
        if at > 1 and o != i and i and local.axes(i[0]):
            mine = extent(local, o, local.call.operands[0].shape[at])
            held = tuple(tuple(sorted(r)) for r in local.values(mine, i[0]))
            first = local.calc(lambda p, held=held: int(held.index(held[p]) == p), local.position(i[0]))
            grad.keep(at, 0, local.calc(lambda n, first: n * first, grad.shape[at], first))
    return local.op(aten.sum.dim_IntList, grad.value, [0, *range(2, len(labels[0]))])


# What both share ------------------------------------------------------------------------------------------------------


def _halos(labels: list[Dim], ours: Shape, theirs: Shape, weight: Shape, how: Settings, *, forward: bool) -> list[Halo]:
    """What is sent of the first operand, of shape `ours`, for results (`forward`) or inputs of shape `theirs`."""
    out = []
    for k, (label, a, b) in enumerate(zip(labels[2:], ours[2:], theirs[2:], strict=True)):
        if label:
            out.append(Halo(label[0], 0, True, sent(a, b, how.need(k, weight, a, forward=forward))))
    return out


def _one_at_least(r: Range) -> Range:
    """torch does not convolve with nothing: a row that means nothing, where there is none."""
    return r[0], max(r[1], r[0] + 1)


def _cut(local: Local, one: Labels, other: Labels) -> list[int]:
    """The spatial dims of which either side is cut."""
    pairs = zip(one[2:], other[2:], strict=True)
    return [k for k, pair in enumerate(pairs) if any(local.axes(f) for d in pair for f in d)]


def _full(local: Local, dim: Dim) -> Any:
    """The local size of a dim of channels, where none may be missing."""
    return local.calc(lambda *n: math.prod(max(x, 1) for x in n), *map(local.size, dim))


def _solid(local: Local, i: int, name: str) -> Piece:
    """Operand i, with a channel of zeros where a device has none: torch wants one."""
    position = [k for k, a in enumerate(local.call.args[:3]) if a is not None][i]
    labels = local.rule.operands[i]
    piece = Piece.of(local, local.args[position], labels, name)
    for at, dim in enumerate(labels[:2] if len(labels) > 1 else labels):
        if not set(dim) & set(local.rule.loose):
            continue
        have, want = (local.calc(lambda n: (0, n), n) for n in (piece.shape[at], _full(local, dim)))
        piece.reframe(at, have, want)
    return piece


def _once(local: Local) -> Piece:
    """The bias, where the sum over input channels is cut on the first device only."""
    bias = _solid(local, 2, "bias")
    contracted = {f for d in local.rule.operands[1] for f in d if local.rule.reduce.get(f) == "sum"}
    for f in contracted:  # one factor at most
        whole = bias.shape[0]
        here = local.calc(lambda n, at: n if at == 0 else 0, whole, local.position(f))
        bias.keep(0, 0, here)
        bias.reframe(0, *(local.calc(lambda n: (0, n), n) for n in (here, whole)))
    return bias


def _plain(x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """`_convolution` without its choice of kernels."""
    return aten.convolution.default(x, weight, bias, *args[:6])


ROWS: dict[str, RuleFn | str] = {
    "convolution": _forward,
    "convolution_backward": _backward,
}
DECOMPOSED = {"_convolution": _plain}
