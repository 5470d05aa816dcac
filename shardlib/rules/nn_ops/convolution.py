"""Convolutions: batch, channels and space; a cut spatial dim exchanges its borders.

x is `[n, (g ci), *in]`, the weight `[(g co), ci, *kernel]` (transposed: `[(g ci), co, *kernel]`), the result
`[n, (g co), *out]`, with g groups. Where a spatial dim is cut, a device works out its own piece of the result, from its
piece of x and what its windows reach of its neighbors'. In the backward pass it takes the gradients of all results
that read its piece of x: so dx is complete, and every product of dw is counted where its element of x is; one exchange
serves both. Where dx is not asked for, dw reads of x what the forward pass has fetched, and nothing is sent for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.iteration_space import arg, result_shape, words
from shardlib.rules.local_forms.helpers import cut, once, positional
from shardlib.rules.local_forms.stencil import Reach, Stencil
from shardlib.rules.local_forms.window import Window, each
from shardlib.rules.notation import gradient
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn

aten = torch.ops.aten
Shape = tuple[int, ...]


def _stencil(call: Call, reads: str, weight: Shape, sizes: tuple[Shape, Shape], *, every: bool, **how: Any) -> Stencil:
    """Of what is made of dims `reads` of space: from which `sizes` to which, a dim."""
    dims, reach, back = len(weight) - 2, {}, _is_transposed(call) == (reads == "i")
    stride, padding, dilation = (each(arg(call, name), dims) for name in ("stride", "padding", "dilation"))
    for k, (size, count) in enumerate(zip(*sizes, strict=True)):
        source, made = (f"{'h' if size == count else name}{k}" for name in (reads, "o" if reads == "i" else "i"))
        if count != 1:
            window = Window(weight[2 + k], stride[k], padding[k], dilation[k])
            where = source * (size != 1), size, count
            reach[made] = Reach.sliding(window, *where, back=back, every=every, dim=2 + k)
    return Stencil(reach, **how)


def _is_transposed(call: Call) -> bool:
    return bool(arg(call, "transposed"))


def _text(call: Call, x: Shape, weight: Shape, out: Shape) -> str:
    """The labels of one convolution of x with a weight, which gives `out`; dims that keep their size are `h`."""
    spatial = range(len(weight) - 2)
    same = [x[2 + k] == out[2 + k] for k in spatial]
    before, after = (" ".join(f"{'h' if same[k] else name}{k}" for k in spatial) for name in "io")
    channels = "(g ci) co" if _is_transposed(call) else "(g co) ci"
    cut = dict.fromkeys(f"{before} {after}".split())
    kinds = " ".join([*(f"k{k}:whole" for k in spatial), *(f"{f}:local" for f in cut)])
    return (
        f"n (g ci) {before}, {channels} {words('k', len(spatial))}, (g co) -> n (g co) {after} "
        f"| g:size(groups) g:local ci:local co:local {kinds}"
    )


def _forward(call: Call) -> Rule:
    x, weight = (m.shape for m in call.operands[:2])
    out = result_shape(call)
    linear = "{0,2} {1,2}" if len(call.operands) > 2 else "{0} {1}"
    stencil = _stencil(call, "i", weight, (x[2:], out[2:]), every=True, read=0, run=_convolved)
    flops = 2 * math.prod(x if _is_transposed(call) else out) * math.prod(weight[1:])
    return pattern(f"{_text(call, x, weight, out)} ci:sum {linear}", stencil=stencil, flops=lambda *_: flops)(call)


def _convolved(local: Local, given: dict[str, Any], begins: Mapping[int, int]) -> Any:
    """A sum over input channels that are cut has the bias once."""
    given, labels = _inside(given, begins), local.rule.operands[1]
    if (bias := given["bias"]) is not None:
        given["bias"] = once(bias, cut(local, {f for d in labels for f in d if local.rule.reduce.get(f) == "sum"}))
    return local.call.target(**given)


def _inside(given: dict[str, Any], begins: Mapping[int, int]) -> dict[str, Any]:
    """Arguments without padding in dims whose operands were extended with zeros or halos already."""
    for name in given.keys() & {"padding", "output_padding"}:
        around = each(given[name], len(given["weight"].shape) - 2)
        given[name] = [0 if 2 + k in begins else n for k, n in enumerate(around)]
    return given


def _backward(call: Call) -> Rule:
    """The gradient of the weight alone is made where the result's is: so what it fetches of x is what the forward pass
    did. Else all is made where x is."""
    grad, x, weight = (m.shape for m in call.operands[:3])
    alone = call.results[0] is None and not _is_transposed(call)
    reads, sizes = ("i", (x[2:], grad[2:])) if alone else ("o", (grad[2:], x[2:]))
    name = "input" if alone else "gradient"
    stencil = _stencil(call, reads, weight, sizes, every=False, read=int(alone), name=name, run=_pulled)
    lonely = " ".join(f"{reads}{k}:whole" for k, (n, m) in enumerate(zip(*sizes, strict=True)) if n != m == 1)
    text = gradient(_text(call, x, weight, grad), "0 1", of="0 1 2")
    work = 2 * math.prod(x if _is_transposed(call) else grad) * math.prod(weight[1:])
    flops = work * sum(m is not None for m in call.results[:2])
    local = partial(_backward_local, stencil)
    return pattern(f"{text} ci:none {lonely}", local=local, stencil=stencil, flops=lambda *_: flops)(call)


def _backward_local(stencil: Stencil, local: Local) -> Any:
    given, pulled = positional(local), stencil.form(local)
    mask = given[-1]

    def form(firsts: dict[int, int], grad: Tensor, *rest: Any) -> tuple[Any, ...]:
        found = pulled(grad, *rest)[:2] if any(mask[:2]) else (None, None)
        for at, yes in firsts.items():
            grad = grad.narrow(at, 0, yes * grad.shape[at])
        return *found, grad.sum([0, *range(2, grad.dim())]) if mask[2] else None

    return local.run(form, {} if stencil.read else _firsts(local), *given)


def _pulled(local: Local, given: dict[str, Any], begins: Mapping[int, int]) -> Any:
    """The gradients of x and of the weight: that of the bias has nothing to do with what is read around."""
    given = _inside(given, begins)
    return local.call.target(**given | {"bias_sizes": None, "output_mask": [*given["output_mask"][:2], False]})


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


def _plain(x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """`_convolution` without its choice of kernels."""
    return aten.convolution.default(x, weight, bias, *args[:6])


ROWS: dict[str, RuleFn | str] = {
    "convolution": _forward,
    "convolution_backward": _backward,
}
DECOMPOSED = {"_convolution": _plain}
