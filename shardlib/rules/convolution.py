"""Convolutions: batch, channels and space; a cut spatial dim exchanges its borders.

x is `[n, (g ci), *in]`, the weight `[(g co), ci, *kernel]` (transposed: `[(g ci), co, *kernel]`), the result
`[n, (g co), *out]`, with g groups. Where a spatial dim is cut, a device works out its own piece of the result, from its
piece of x and what its windows reach of its neighbours'. In the backward pass it takes the gradients of all results
that read its piece of x: so dx is complete, and every product of dw is counted where its element of x is; one exchange
serves both. Where dx is not asked for, dw reads of x what the forward pass has fetched, and nothing is sent for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardlib.ops.convolve import CONVOLVE, CONVOLVE_BACKWARD
from shardlib.rules.halo import Range, extent, fetch, length, reframe
from shardlib.rules.notation import gradient
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Labels, Local, Rule, RuleFn
from shardlib.rules.shards import cut, may_be_empty, once, positional
from shardlib.rules.space import arg, result_shape, words
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
    lopsided: tuple[int, ...] = ()  # spatial dims with other zeros behind than in front, or less than none

    @staticmethod
    def of(call: Call, first: int, dims: int) -> Settings:
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
        return Settings.over(call, dims, *(arg(call, first + i, name) for i, name in enumerate(names)))

    @staticmethod
    def over(call: Call, dims: int, s: Any, p: Any, d: Any, transposed: bool, o: Any, groups: Any) -> Settings:
        """Of `convolve`, the arguments for the end of a result say what is behind the input."""
        p, o, ours = each(p, dims), each(o, dims), call.target in (CONVOLVE, CONVOLVE_BACKWARD)
        lopsided = tuple(k for k in range(dims) if ours and (p[k] != o[k] or p[k] < 0))
        return Settings(each(s, dims), p, each(d, dims), transposed, [0] * dims if ours else o, groups, lopsided)

    def window(self, k: int, weight: Shape) -> Window:
        return Window(weight[2 + k], self.stride[k], self.padding[k], self.dilation[k])

    def need(self, k: int, weight: Shape, size: int, *, forward: bool) -> Callable[[Range], Range]:
        """Which of the `size` inputs a range of results needs (`forward`), or of the results a range of inputs."""
        window = self.window(k, weight)
        return window.reads if forward != self.transposed else lambda r: window.readers(r, size)

    def inside(self, cut: Sequence[int]) -> tuple[Any, ...]:
        """The arguments for operands of which the spatial dims `cut` are framed; there is at least one group."""
        padding, more = ([0 if k in cut else n for k, n in enumerate(x)] for x in (self.padding, self.output_padding))
        return self.stride, padding, self.dilation, self.transposed, more, max(self.groups, 1)


def _text(x: Shape, weight: Shape, out: Shape, how: Settings) -> str:
    """The labels of one convolution of x with a weight, which gives `out`; dims that keep their size are `h`."""
    spatial = range(len(weight) - 2)
    same = [x[2 + k] == out[2 + k] for k in spatial]
    before, after = (" ".join(f"{'h' if same[k] else name}{k}" for k in spatial) for name in "io")
    channels = "(g ci) co" if how.transposed else "(g co) ci"
    cut = dict.fromkeys(f"{before} {after}".split())
    kinds = " ".join([*(f"k{k}:whole" for k in spatial), *(f"{f}:local" for f in cut)])
    return (
        f"n (g ci) {before}, {channels} {words('k', len(spatial))}, (g co) -> n (g co) {after} "
        f"| g:size(groups) g:local ci:local co:local {kinds}"
    )


def _tied(text: str, cut: str, leads: str) -> str:
    """Dims of space `cut` may be cut with those of the other size, which lead; a sum over one of these is declared."""
    pairs = [(f, f"{leads}{f[1:]}") for f in re.findall(rf"\b{cut}\d+\b", text.partition("|")[0])]
    return " ".join(f"{f}:none {f}:with({leader})" for f, leader in pairs)


def _forward(call: Call) -> Rule:
    x, weight = (m.shape for m in call.operands[:2])
    out = result_shape(call)
    how = Settings.of(call, 3, len(x) - 2)
    text = _text(x, weight, out, how)
    linear = "{0,2} {1,2}" if len(call.operands) > 2 else "{0} {1}"
    found = pattern(f"{text} {_tied(text, 'i', 'o')} ci:sum {linear}", local=_forward_local)(call)
    flops = 2 * math.prod(x if how.transposed else out) * math.prod(weight[1:])
    return _finished(found, how, weight, flops)


def _finished(rule: Rule, how: Settings, weight: Shape, flops: int) -> Rule:
    """What the text of a rule does not say."""
    reads = {}
    for k in range(len(weight) - 2):
        x, y = (f"i{k}", f"o{k}")[:: -1 if how.transposed else 1]
        if {x, y} <= rule.sizes.keys() - rule.whole:
            reads[x] = how.window(k, weight).laid(y, rule.sizes[y])
    return replace(rule, loose=frozenset({"g", "ci", "co"} & rule.sizes.keys()), reads=reads, flops=flops)


def _forward_local(local: Local) -> Any:
    labels, results, out = local.rule.operands, local.rule.results[0], result_shape(local.call)
    whole, kernel = (m.shape for m in local.call.operands[:2])
    spatial, thin = _cut(local, 3, labels[0], results), _thin(local)
    contracted = cut(local, {f for d in labels[1] for f in d if local.rule.reduce.get(f) == "sum"})

    def form(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        how = Settings.over(local.call, len(kernel) - 2, *rest)
        channels = how.groups * weight.shape[1] if how.transposed else weight.shape[0]
        if bias is not None:
            bias = once(bias, contracted)  # a sum over input channels that are cut has it once
        if thin:
            weight = _solid(weight, how)
            inputs, outputs = _channels(weight, how)
            x, bias = _grown(x, 1, inputs), None if bias is None else _grown(bias, 0, outputs)
        covered: dict[int, Range] = {}
        for k in spatial:
            at, window = 2 + k, how.window(k, kernel)
            mine = extent(results[at], out[at])
            need = frame = how.need(k, kernel, whole[at], forward=True)(mine)
            covered[at] = _one_at_least(mine)
            if how.transposed:
                frame = _around(window, need, mine)
                covered[at] = window.reads(frame)
            x = fetch(x, at, labels[0][at], need, frame, name="input")
        y: Tensor = aten.convolution.default(x, weight, bias, *how.inside(spatial))
        for at, have in covered.items():
            y = reframe(y, at, have, extent(results[at], out[at]))
        return y.narrow(1, 0, channels)

    return local.run(form, *positional(local))


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
    text = _text(x, weight, grad, how)
    alone = call.results[0] is None and not how.transposed  # the weight's, without that of x
    tied = _tied(text, "i", "o") if alone else _tied(text, "o", "i")
    back = f"{gradient(text, '0 1', of='0 1 2')} {tied} ci:none"
    found = pattern(back, local=_weight_local if alone else _backward_local)(call)
    work = 2 * math.prod(x if how.transposed else grad) * math.prod(weight[1:])
    return _finished(found, how, weight, work * sum(m is not None for m in call.results[:2]))


def _backward_local(local: Local) -> Any:
    labels, (above, whole, kernel) = local.rule.operands, (m.shape for m in local.call.operands)
    spatial, firsts, thin = _cut(local, 4, *labels[:2]), _firsts(local), _thin(local)

    def form(
        grad: Tensor, x: Tensor, weight: Tensor, _: Any, *rest: Any, firsts: dict[int, int]
    ) -> tuple[Tensor | None, ...]:
        how = Settings.over(local.call, len(kernel) - 2, *rest[:-1])
        sizes, channels, mask = weight.shape[:2], x.shape[1], rest[-1]
        dbias = grad
        for at, yes in firsts.items():
            dbias = dbias.narrow(at, 0, yes * grad.shape[at])
        if thin:
            weight = _solid(weight, how)
            inputs, outputs = _channels(weight, how)
            grad, x = _grown(grad, 1, outputs), _grown(x, 1, inputs)
        covered: dict[int, Range] = {}
        for k in spatial:
            at, mine = 2 + k, extent(labels[1][2 + k], whole[2 + k])
            need = frame = how.need(k, kernel, above[at], forward=False)(mine)
            covered[at] = _one_at_least(mine)
            if not how.transposed:
                frame = _one_at_least(need)
                covered[at] = how.window(k, kernel).reads(frame)
            grad = fetch(grad, at, labels[0][at], need, frame, name="gradient")
            x = reframe(x, at, mine, covered[at])
        dx, dweight, _ = aten.convolution_backward.default(
            grad, x, weight, None, *how.inside(spatial), [*mask[:2], False]
        )
        if dx is not None:
            for at, have in covered.items():
                dx = reframe(dx, at, have, extent(labels[1][at], whole[at]))
            dx = dx.narrow(1, 0, channels)
        if dweight is not None:
            dweight = dweight.narrow(0, 0, sizes[0]).narrow(1, 0, sizes[1])
        return dx, dweight, dbias.sum([0, *range(2, grad.dim())]) if mask[2] else None

    return local.run(form, *positional(local), firsts=firsts)


def _weight_local(local: Local) -> Any:
    """Of the weight's gradient alone, a device makes what its piece of the result's has a part in: so it fetches of x
    what it did in the forward pass."""
    labels, (above, whole, kernel) = local.rule.operands, (m.shape for m in local.call.operands)
    spatial, thin = _cut(local, 4, *labels[:2]), _thin(local)

    def form(grad: Tensor, x: Tensor, weight: Tensor, _: Any, *rest: Any) -> tuple[Tensor | None, ...]:
        how = Settings.over(local.call, len(kernel) - 2, *rest[:-1])
        sizes, mask = weight.shape[:2], rest[-1]
        dbias = grad.sum([0, *range(2, grad.dim())]) if mask[2] else None
        if not mask[1]:
            return None, None, dbias
        if thin:
            weight = _solid(weight, how)
            inputs, outputs = _channels(weight, how)
            grad, x = _grown(grad, 1, outputs), _grown(x, 1, inputs)
        for k in spatial:
            at, mine = 2 + k, extent(labels[0][2 + k], above[2 + k])
            x = fetch(x, at, labels[1][at], how.need(k, kernel, whole[at], forward=True)(mine), name="input")
            grad = reframe(grad, at, mine, _one_at_least(mine))
        _, found, _ = aten.convolution_backward.default(
            grad, x, weight, None, *how.inside(spatial), [False, True, False]
        )
        return None, found.narrow(0, 0, sizes[0]).narrow(1, 0, sizes[1]), dbias

    return local.run(form, *positional(local))


def _firsts(local: Local) -> dict[int, Any]:
    """The spatial dims of the gradient that several devices hold alike, because x is cut more often: 1 on the first."""
    labels, found = local.rule.operands, {}
    for at, (o, i) in enumerate(zip(labels[0], labels[1], strict=True)):
        if at > 1 and o != i and i and local.axes(i[0]):
            start, n = (local.offset(o[0]), local.size(o[0])) if o else (0, 1)
            held = local.values(local.calc(lambda a, n: (a, n), start, n), i[0])
            first = [int(held.index(x) == k) for k, x in enumerate(held)]
            found[at] = local.calc(first.__getitem__, local.position(i[0]))
    return found


# What both share ------------------------------------------------------------------------------------------------------


def _one_at_least(r: Range) -> Range:
    """torch does not convolve with nothing: a row that means nothing, where there is none."""
    return r[0], max(r[1], r[0] + 1)


def _cut(local: Local, first: int, one: Labels, other: Labels) -> list[int]:
    """The spatial dims of which either side is cut, or to which zeros come by hand."""
    pairs, lopsided = zip(one[2:], other[2:], strict=True), Settings.of(local.call, first, len(one) - 2).lopsided
    return [k for k, pair in enumerate(pairs) if k in lopsided or any(local.axes(f) for d in pair for f in d)]


def _thin(local: Local) -> bool:
    """Whether a device may have no channels."""
    return any(may_be_empty(local, f) for f in local.rule.loose)


def _solid(weight: Tensor, how: Settings) -> Tensor:
    """The weight, with channels of zeros where there are none: torch wants one, in every group."""
    return _grown(_grown(weight, 0, weight.shape[0] or max(how.groups, 1)), 1, max(weight.shape[1], 1))


def _channels(weight: Tensor, how: Settings) -> tuple[int, int]:
    """How many channels go into it, and come out."""
    one, other = weight.shape[0], weight.shape[1] * max(how.groups, 1)
    return (one, other) if how.transposed else (other, one)


def _grown(x: Tensor, dim: int, n: int) -> Tensor:
    return reframe(x, dim, (0, x.shape[dim]), (0, n))


def _plain(x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """`_convolution` without its choice of kernels."""
    return aten.convolution.default(x, weight, bias, *args[:6])


ROWS: dict[str, RuleFn | str] = {
    "convolution": _forward,
    "convolution_backward": _backward,
    "shardlib::convolve": _forward,
    "shardlib::convolve_backward": _backward,
}
DECOMPOSED = {"_convolution": _plain}
