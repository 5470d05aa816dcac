"""Convolutions: batch, channels and space; sharded spatial dims exchange their borders.

x is `[n, (g ci), *in]`, the weight `[(g co), ci, *kernel]` (transposed: `[(g ci), co, *kernel]`), the result
`[n, (g co), *out]`, with g groups. Along a sharded spatial dim a device computes its shard of the result from its shard
of x and the elements of its neighbors that its windows reach. In the backward pass it fetches the gradients of all
results that read its shard of x. So dx is complete, each product of dw is counted on the owner of its element of x, and
one exchange serves both. If dx is not requested, dw uses the elements of x that the forward pass has fetched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.iteration_space import arg, dim_names, result_shape
from shardlib.rules.local_forms.helpers import keep_on_first, positional_args, sharded_factors
from shardlib.rules.local_forms.stencil import Reach, Stencil
from shardlib.rules.local_forms.window import Window, per_dim
from shardlib.rules.notation import gradient_pattern
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn

aten = torch.ops.aten
Shape = tuple[int, ...]


def _stencil(
    call: Call, reads: str, weight: Shape, sizes: tuple[Shape, Shape], *, every: bool, **options: Any
) -> Stencil:
    """Returns the stencil of the spatial dims; `reads` is "i" if the op reads x, and "o" if it reads the gradient.

    `sizes` are the spatial sizes of the tensor that it reads, and of the one that it computes.
    """
    dims, reach, back = len(weight) - 2, {}, _is_transposed(call) == (reads == "i")
    stride, padding, dilation = (per_dim(arg(call, name), dims) for name in ("stride", "padding", "dilation"))
    for k, (size, count) in enumerate(zip(*sizes, strict=True)):
        source, target = (f"{'h' if size == count else name}{k}" for name in (reads, "o" if reads == "i" else "i"))
        if count != 1:
            window = Window(weight[2 + k], stride[k], padding[k], dilation[k])
            name = source if size != 1 else ""
            reach[target] = Reach.sliding(window, name, size, count, back=back, every=every, dim=2 + k)
    return Stencil(reach, **options)


def _is_transposed(call: Call) -> bool:
    return bool(arg(call, "transposed"))


def _text(call: Call, x: Shape, weight: Shape, out: Shape) -> str:
    """Returns the pattern of a convolution of x with a weight to `out`; spatial dims that keep their size are `h`."""
    spatial = range(len(weight) - 2)
    same = [x[2 + k] == out[2 + k] for k in spatial]
    before, after = (" ".join(f"{'h' if same[k] else name}{k}" for k in spatial) for name in "io")
    channels = "(g ci) co" if _is_transposed(call) else "(g co) ci"
    space = dict.fromkeys(f"{before} {after}".split())
    kinds = " ".join([*(f"k{k}:whole" for k in spatial), *(f"{f}:local" for f in space)])
    return (
        f"n (g ci) {before}, {channels} {dim_names('k', len(spatial))}, (g co) -> n (g co) {after} "
        f"| g:size(groups) g:local ci:local co:local {kinds}"
    )


def _forward(call: Call) -> Rule:
    x, weight = (m.shape for m in call.operands[:2])
    out = result_shape(call)
    linear = "{0,2} {1,2}" if len(call.operands) > 2 else "{0} {1}"
    stencil = _stencil(call, "i", weight, (x[2:], out[2:]), every=True, read=0, run=_convolve)
    flops = 2 * math.prod(x if _is_transposed(call) else out) * math.prod(weight[1:])
    return pattern(f"{_text(call, x, weight, out)} ci:sum {linear}", stencil=stencil, flops=lambda *_: flops)(call)


def _convolve(local: LocalBuilder, args: dict[str, Any], begins: Mapping[int, int]) -> Any:
    """Runs the op. If input channels are sharded, only one device adds the bias."""
    args, labels = _without_padding(args, begins), local.rule.operands[1]
    if (bias := args["bias"]) is not None:
        summed = {f for d in labels for f in d if local.rule.reduce.get(f) == "sum"}
        args["bias"] = keep_on_first(bias, sharded_factors(local, summed))
    return local.call.target(**args)


def _without_padding(args: dict[str, Any], begins: Mapping[int, int]) -> dict[str, Any]:
    """Returns the op's arguments without padding for the dims in `begins`, whose frames contain the zeros already."""
    for name in args.keys() & {"padding", "output_padding"}:
        numbers = per_dim(args[name], len(args["weight"].shape) - 2)
        args[name] = [0 if 2 + k in begins else n for k, n in enumerate(numbers)]
    return args


def _backward(call: Call) -> Rule:
    """Computes both gradients where the elements of x are, or the weight's alone where the elements of the result are.

    In the latter case the op fetches the same elements of x as the forward pass.
    """
    grad, x, weight = (m.shape for m in call.operands[:3])
    weight_only = call.results[0] is None and not _is_transposed(call)
    reads, sizes = ("i", (x[2:], grad[2:])) if weight_only else ("o", (grad[2:], x[2:]))
    name = "input" if weight_only else "gradient"
    stencil = _stencil(call, reads, weight, sizes, every=False, read=int(weight_only), name=name, run=_gradients)
    single = " ".join(f"{reads}{k}:whole" for k, (n, m) in enumerate(zip(*sizes, strict=True)) if n != m == 1)
    text = gradient_pattern(_text(call, x, weight, grad), "0 1", wrt="0 1 2")
    work = 2 * math.prod(x if _is_transposed(call) else grad) * math.prod(weight[1:])
    flops = work * sum(m is not None for m in call.results[:2])
    local = partial(_backward_local, stencil)
    return pattern(f"{text} ci:none {single}", emit=local, stencil=stencil, flops=lambda *_: flops)(call)


def _backward_local(stencil: Stencil, local: LocalBuilder) -> Any:
    args, gradients = positional_args(local), stencil.form(local)
    mask = args[-1]

    def form(firsts: dict[int, int], grad: Tensor, *rest: Any) -> tuple[Any, ...]:
        first = gradients(grad, *rest)[:2] if any(mask[:2]) else (None, None)
        for at, yes in firsts.items():
            grad = grad.narrow(at, 0, yes * grad.shape[at])
        return *first, grad.sum([0, *range(2, grad.dim())]) if mask[2] else None

    return local.run(form, {} if stencil.read else _first_holders(local), *args)


def _gradients(local: LocalBuilder, args: dict[str, Any], begins: Mapping[int, int]) -> Any:
    """Returns the gradients of x and of the weight; the bias's gradient reads no neighbors."""
    args = _without_padding(args, begins)
    return local.call.target(**args | {"bias_sizes": None, "output_mask": [*args["output_mask"][:2], False]})


def _first_holders(local: LocalBuilder) -> dict[int, Any]:
    """For spatial dims whose gradient several devices hold alike: 1 on the first of these devices, else 0.

    Devices hold equal shards if x is sharded over more devices than the gradient.
    """
    labels, is_first = local.rule.operands, {}
    for at, (o, i) in enumerate(zip(labels[0], labels[1], strict=True)):
        if at > 1 and o != i and i and local.axes(i[0]):
            start, n = (local.offset(o[0]), local.size(o[0])) if o else (0, 1)
            held = local.values(local.calc(lambda a, n: (a, n), start, n), i[0])
            first = [int(held.index(x) == k) for k, x in enumerate(held)]
            is_first[at] = local.calc(first.__getitem__, local.position(i[0]))
    return is_first


def _plain(x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """`_convolution` without its choice of kernels."""
    return aten.convolution.default(x, weight, bias, *args[:6])


ROWS: dict[str, RuleFn | str] = {
    "convolution": _forward,
    "convolution_backward": _backward,
}
DECOMPOSED = {"_convolution": _plain}
