"""Pooling: batch and channels pass through; a cut spatial dim exchanges its borders.

Where a spatial dim is cut, a device works out its own piece of the result. It runs the op itself, padding, rounding and
all, on a frame of the input that begins at a multiple of the stride: so every window meets the padding that it meets in
the whole, and results that belong to others are left out. Indices are places in the whole plane. In the backward pass
what a device adds to the gradient of its neighbours' input goes back to them.

Adaptive pools are pools with windows side by side where the sizes divide, and stay whole in the other dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.internals import schema_of
from shardlib.rules.halo import Piece, Range, extent, length, sent
from shardlib.rules.rule import Call, Halo, Labels, Local, Meta, Rule, RuleFn
from shardlib.rules.shards import may_be_empty
from shardlib.rules.space import Dim, Space, arg, result_shape
from shardlib.rules.window import Window, each

aten = torch.ops.aten


@dataclass(frozen=True)
class Pool:
    """How one spatial dim of `size` is pooled to `count`."""

    window: Window
    size: int
    count: int
    ceil: bool = False

    def need(self, mine: Range) -> Range:
        """Which inputs a range of results reads."""
        low, high = self.window.reads(mine)
        return (max(low, 0), min(high, self.size)) if length(mine) else (low, high)

    def skipped(self, mine: Range) -> int:
        """How many results the op makes on the frame in front of a device's own: so many that it has no padding there,
        and that a window fits in, where one fits in the whole."""
        stride = self.window.stride
        before = max(-(-self.window.padding // stride), mine[0] - max(self.size - self.window.span, 0) // stride)
        return min(mine[0], before) if length(mine) else 0

    def frame(self, mine: Range) -> Range:
        """The inputs that the op is run on, of which those in `need` matter for a device's own results."""
        low, high = self.need(mine)
        if not length(mine):
            return low, high
        low = (mine[0] - self.skipped(mine)) * self.window.stride
        return low, max(high, min(low + self.window.span, self.size))

    def made(self, mine: Range) -> Range:
        """The results that the op makes there."""
        w, n = self.window, length(self.frame(mine))
        room = n + 2 * w.padding - w.span
        count = (-(-room // w.stride) if self.ceil else room // w.stride) + 1
        if self.ceil and (count - 1) * w.stride >= n + w.padding:
            count -= 1
        first = mine[0] - self.skipped(mine)
        return first, first + count


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

Frames = dict[int, tuple[Pool, Any]]  # for every dim that is cut: how it is pooled, and which results are ours


def _forward(local: Local) -> Any:
    labels, results = local.rule.operands, local.rule.results[0]
    x, out = local.call.operands[0].shape, result_shape(local.call)
    frames = _frames(local, labels[0], results, x, out)
    piece, *others = _pieces(local, "input")
    shape = Piece.of(local, None, results, "").shape
    for at, (pool, mine) in frames.items():
        piece.fetch(at, labels[0][at], local.calc(pool.need, mine), local.calc(pool.frame, mine))
        shape[at] = local.calc(length, local.calc(pool.made, mine))
    size = [shape[at] if at in frames else out[at] for at in range(len(out) - _dims(local.call), len(out))]
    adaptive = "adaptive" in str(local.call.target)
    values = _run(local, [piece, *others], shape, {"output_size": size} if adaptive else {})
    outs = [Piece(local, v, list(shape), "") for v in values]
    for at, (pool, mine) in frames.items():
        for y in outs:
            y.keep(at, local.calc(pool.skipped, mine), local.calc(length, mine))
    if len(outs) == 2 and frames:
        outs[1].value = _placed(local, outs[1].value, piece.shape, x, frames, 1)
    return tuple(y.value for y in outs) if len(outs) > 1 else outs[0].value


def _backward(local: Local) -> Any:
    labels, results = local.rule.operands, local.rule.results[0]
    x, out = local.call.operands[1].shape, local.call.operands[0].shape
    frames = _frames(local, results, labels[0], x, out)
    grad, inside, *indices = _pieces(local, "gradient")
    for at, (pool, mine) in frames.items():
        inside.shape[at] = local.calc(length, local.calc(pool.frame, mine))
    if frames:  # the op reads the shape of its input alone
        inside.value = local.op(aten.new_empty.default, inside.value, list(inside.shape))
    for y in indices if frames else ():
        y.value = _placed(local, y.value, inside.shape, x, frames, -1)
    for at, (pool, mine) in frames.items():
        for y in (grad, *indices):
            y.reframe(at, mine, local.calc(pool.made, mine))
    (value,) = _run(local, [grad, inside, *indices], inside.shape, {})
    dx = Piece(local, value, list(inside.shape), "gradient")
    for at, (pool, mine) in frames.items():
        need = local.calc(pool.need, mine)
        dx.reframe(at, local.calc(pool.frame, mine), need)
        dx.give_back(at, results[at], need, x[at])
    return dx.value


def _frames(local: Local, big: Labels, small: Labels, x: Sequence[int], out: Sequence[int]) -> Frames:
    pools = _pools(local.call, x, out)
    found = {}
    for at, pool in enumerate(pools, len(x) - len(pools)):
        if pool is not None and any(local.axes(f) for f in (*big[at], *small[at])):
            found[at] = pool, extent(local, small[at], out[at])
    return found


def _placed(local: Local, index: Any, frame: Sequence[Any], plane: Sequence[int], frames: Frames, sign: int) -> Any:
    """Indices into the frame as indices into the whole plane (`sign` 1), or the other way round (-1)."""
    dims = _dims(local.call)
    have, want = (frame[-dims:], plane[-dims:])[::sign]
    coordinates = []
    for n in have[:0:-1]:
        n = local.calc(lambda n: max(n, 1), n)
        rest = local.op(aten.floor_divide.Scalar, index, n)
        coordinates.append(local.op(aten.sub.Tensor, index, local.op(aten.mul.Scalar, rest, n)))
        index = rest
    total = None
    for at, n, x in zip(range(len(plane) - dims, len(plane)), want, (index, *coordinates[::-1]), strict=True):
        if at in frames:
            pool, mine = frames[at]
            x = local.op(aten.add.Scalar, x, local.calc(lambda r: sign * r[0], local.calc(pool.frame, mine)))
        total = x if total is None else local.op(aten.add.Tensor, local.op(aten.mul.Scalar, total, n), x)
    return total


def _pieces(local: Local, name: str) -> list[Piece]:
    tensors = [a for a, m in zip(local.args, local.call.args, strict=True) if isinstance(m, Meta)]
    return [Piece.of(local, x, labels, name) for x, labels in zip(tensors, local.rule.operands, strict=True)]


def _run(local: Local, pieces: Sequence[Piece], shape: Sequence[Any], changed: dict[str, Any]) -> list[Any]:
    """The op on these tensors; torch does not pool without channels, so where a device may have none, they join the
    batch."""
    fractional, dims = "fractional" in str(local.call.target), _dims(local.call)
    apart = any(may_be_empty(local, f) for f in local.rule.loose)
    tails = [1 if fractional and len(local.call.results) == 2 and i == 1 else dims for i in range(len(pieces))]
    values = [_alone(p, tail) if apart else p.value for p, tail in zip(pieces, tails, strict=True)]
    if fractional:  # torch reads the indices wrongly if they are not contiguous, and a slice of the channels is not
        values = [local.op(aten.clone.default, x, memory_format=torch.contiguous_format) for x in values]
    queue = iter(values)
    args = []
    for a in schema_of(local.call.target).arguments:
        given = _argument(local.call, a.name)
        args.append(next(queue) if isinstance(given, Meta) else changed.get(a.name, given))
    out = local.op(local.call.target, *args)
    outs = list(out) if isinstance(out, tuple) else [out]
    return [local.op(aten.reshape.default, y, list(shape)) for y in outs] if apart else outs


def _alone(piece: Piece, tail: int) -> Any:
    """Every channel as a sample of its own: `[n * c, 1, ...]`, the last `tail` dims as they are."""
    lead = piece.local.calc(lambda *n: math.prod(n), *piece.shape[:-tail])
    return piece.local.op(aten.reshape.default, piece.value, [lead, 1, *piece.shape[-tail:]])


def _argument(call: Call, name: str) -> Any:
    """An argument of an op, by its name in the schema."""
    arguments = schema_of(call.target).arguments
    at = next((i for i, a in enumerate(arguments) if a.name == name), None)
    return None if at is None else arg(call, at, name, arguments[at].default_value)


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
