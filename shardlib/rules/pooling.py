"""Pooling: batch and channels pass through; a cut spatial dim exchanges its borders.

Where a spatial dim is cut, a device works out its own piece of the result. It runs the op itself, padding, rounding and
all, on a frame of the input that begins at a multiple of the stride: so every window meets the padding that it meets in
the whole, and results that belong to others are left out. Indices are places in the whole plane. In the backward pass
what a device adds to the gradient of its neighbours' input goes back to them.

Adaptive pools are pools with windows side by side where the sizes divide, and stay whole in the other dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.internals import schema_of
from shardlib.rules.halo import extent, fetch, give_back, length, reframe, sent
from shardlib.rules.rule import Call, Halo, Labels, Local, Rule, RuleFn
from shardlib.rules.shards import may_be_empty, positional
from shardlib.rules.space import Dim, Space, argument_named, result_shape
from shardlib.rules.window import Pool, Window, each


def _pools(call: Call, x: Sequence[int], out: Sequence[int]) -> list[Pool | None]:
    """How each spatial dim is pooled; None where windows differ in size or place."""
    dims, name = _dims(call), str(call.target)
    if "adaptive" in name:
        sizes = zip(x[-dims:], out[-dims:], strict=True)
        return [Pool(Window(a // b, a // b), a, b) if b and a and a % b == 0 else None for a, b in sizes]
    if "fractional" in name or "unpool" in name:
        return [None] * dims
    kernel, padding = (each(_argument(call, name), dims) for name in ("kernel_size", "padding"))
    stride = each(_argument(call, "stride") or kernel, dims)
    dilation = each(_argument(call, "dilation") or 1, dims)
    ceil = _argument(call, "ceil_mode")
    windows = map(Window, kernel, stride, padding, dilation)
    return [Pool(w, a, b, ceil) for w, a, b in zip(windows, x[-dims:], out[-dims:], strict=True)]


def _rule(call: Call) -> Rule:
    backward = "backward" in str(call.target)
    x = call.operands[1 if backward else 0].shape
    out = call.operands[0].shape if backward else result_shape(call)
    dims, space = _dims(call), Space()
    lead = [*(space.dim(n, "n") for n in x[: -dims - 1]), space.dim(x[-dims - 1], "c")]
    halos, ends = [], []
    follows: dict[str, str] = {}
    reduce: dict[str, str] = {}
    for k, pool in enumerate(_pools(call, x, out)):
        at = len(lead) + k
        i = space.dim(x[at], "h" if x[at] == out[at] else "i", whole=pool is None)
        o = i if x[at] == out[at] else space.dim(out[at], "o", whole=pool is None)
        ends.append((i, o))
        if pool is not None and i and not o:
            space.whole.add(i[0])
        elif pool is not None and i != o:
            follows |= dict.fromkeys(i, o[0])
            reduce |= dict.fromkeys(i, "none") | dict.fromkeys(o, "sum")
        if pool is not None and i and o:
            halos.append(Halo(i[0], 0, not backward, sent(x[at], out[at], pool.need)))
    big, small = ([*lead, *(pair[j] for pair in ends)] for j in (0, 1))
    cut = {f for d in (*big, *small) for f in d} - {f for d in lead[:-1] for f in d}
    labels = [small, big, *[small] * (len(call.operands) - 2)] if backward else [big, *_beside(call, lead, big, space)]
    return space.rule(
        labels,
        [big] if backward else [small] * len(call.results),
        reduce=reduce,
        linear=[{0}] if backward or "avg" in str(call.target) or "unpool" in str(call.target) else [],
        local=_backward if backward else _forward,
        local_factors=cut,
        loose=lead[-1],
        follows={i: o for i, o in follows.items() if i not in space.whole},
        halos=halos,
        flops=math.prod(out) * math.prod(p.window.kernel for p in _pools(call, x, out) if p is not None),
    )


def _beside(call: Call, lead: list[Dim], big: list[Dim], space: Space) -> list[list[Dim]]:
    """The labels of what forward ops take beside the input: indices, or the numbers `[n, c, dims]` to place windows."""
    if len(call.operands) == 1:
        return []
    if "unpool" in str(call.target):
        return [big]
    n, c = call.operands[1].shape[:2]
    batch = lead[0] if len(lead) > 1 else space.dim(n, "n", whole=True)
    return [[batch, lead[-1] if c > 1 else (), space.dim(_dims(call), "d", whole=True)]]


# Local forms ----------------------------------------------------------------------------------------------------------


def _forward(local: Local) -> Any:
    big, small = local.rule.operands[0], local.rule.results[0]
    whole, out, dims = local.call.operands[0].shape, result_shape(local.call), _dims(local.call)
    pools, op = _cut(local, big, small, whole, out), _op(local)

    def form(*args: Any) -> Any:
        x, *others = (a for a in args if isinstance(a, Tensor))
        mine = {at: extent(small[at], out[at]) for at in pools}
        for at, pool in pools.items():
            x = fetch(x, at, big[at], pool.need(mine[at]), pool.frame(mine[at]), name="input")
        made = [length(pools[at].made(mine[at])) if at in pools else n for at, n in enumerate(out)]
        outs = op(args, [x, *others], [*x.shape[:-dims], *made[-dims:]])
        for at, pool in pools.items():
            outs = [y.narrow(at, pool.skipped(mine[at]), length(mine[at])) for y in outs]
        if len(outs) == 2 and pools:
            begin = {at: pool.frame(mine[at])[0] for at, pool in pools.items()}
            outs[1] = _placed(outs[1], x.shape, whole, begin, dims)
        return tuple(outs) if len(outs) > 1 else outs[0]

    return local.run(form, *positional(local))


def _backward(local: Local) -> Any:
    big, small = local.rule.results[0], local.rule.operands[0]
    whole, out, dims = local.call.operands[1].shape, local.call.operands[0].shape, _dims(local.call)
    pools, op = _cut(local, big, small, whole, out), _op(local)

    def form(*args: Any) -> Any:
        grad, x, *indices = (a for a in args if isinstance(a, Tensor))
        mine = {at: extent(small[at], out[at]) for at in pools}
        frames = {at: pool.frame(mine[at]) for at, pool in pools.items()}
        if pools:  # the op reads the shape of its input alone
            x = x.new_empty([length(frames[at]) if at in pools else n for at, n in enumerate(x.shape)])
            begin = {at: -frame[0] for at, frame in frames.items()}
            indices = [_placed(index, whole, x.shape, begin, dims) for index in indices]
        for at, pool in pools.items():
            grad, *indices = (reframe(y, at, mine[at], pool.made(mine[at])) for y in (grad, *indices))
        (dx,) = op(args, [grad, x, *indices], x.shape)
        for at, pool in pools.items():
            need = pool.need(mine[at])
            dx = give_back(reframe(dx, at, frames[at], need), at, big[at], need, whole[at], name="gradient")
        return dx

    return local.run(form, *positional(local))


def _cut(local: Local, big: Labels, small: Labels, x: Sequence[int], out: Sequence[int]) -> dict[int, Pool]:
    """How the spatial dims are pooled that are cut."""
    pools = _pools(local.call, x, out)
    return {
        at: pool
        for at, pool in enumerate(pools, len(x) - len(pools))
        if pool is not None and any(local.axes(f) for f in (*big[at], *small[at]))
    }


def _placed(index: Tensor, have: Sequence[int], want: Sequence[int], begin: Mapping[int, int], dims: int) -> Tensor:
    """Indices into the plane that a tensor of shape `have` has, as indices into that of `want`, in which it begins at
    `begin`."""
    coordinates = {}
    for at in range(len(have) - 1, len(have) - dims, -1):
        rest = index // max(have[at], 1)
        coordinates[at] = index - rest * have[at]
        index = rest
    first = len(have) - dims
    total = index + begin[first] if first in begin else index
    for at, x in reversed(coordinates.items()):
        total = total * want[at] + (x + begin[at] if at in begin else x)
    return total


def _op(local: Local) -> Callable[..., list[Tensor]]:
    """The op of the call, with other tensors and results of a certain shape.

    torch does not pool without channels, so where a device may have none, they join the batch.
    """
    call, dims = local.call, _dims(local.call)
    apart = any(may_be_empty(local, f) for f in local.rule.loose)
    fractional, adaptive = (kind in str(call.target) for kind in ("fractional", "adaptive"))

    def op(args: Sequence[Any], tensors: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
        if apart:  # of a fractional pool, the second one has a number for each spatial dim
            tails = [1 if fractional and len(call.results) == 2 and i == 1 else dims for i in range(len(tensors))]
            pairs = zip(tensors, tails, strict=True)
            tensors = [x.reshape(math.prod(x.shape[:-tail]), 1, *x.shape[-tail:]) for x, tail in pairs]
        if fractional:  # torch reads the indices wrongly if they are not contiguous, and a slice of the channels is not
            tensors = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
        queue = iter(tensors)
        args = [next(queue) if isinstance(a, Tensor) else a for a in args]
        if adaptive and len(tensors) == 1:
            args[1] = list(shape[-dims:])
        found = call.target(*args)
        outs = list(found) if isinstance(found, tuple) else [found]
        return [y.reshape(shape) for y in outs] if apart else outs

    return op


def _argument(call: Call, name: str) -> Any:
    """An argument of an op, by its name in the schema; None where it has none."""
    return argument_named(call, name) if name in {a.name for a in schema_of(call.target).arguments} else None


def _dims(call: Call) -> int:
    return 3 if "3d" in str(call.target) else 2


_NAMES = ("avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "fractional_max_pool")
_PLANES = ("2d", "3d")
ROWS: dict[str, RuleFn | str] = {
    f"{name}{dims}{end}": _rule
    for dims in _PLANES
    for name, ends in (
        *((name, ("", "_backward")) for name in _NAMES),
        ("max_pool", ("_with_indices", "_with_indices_backward")),
        ("max_unpool", ("",)),
    )
    for end in ends
}
