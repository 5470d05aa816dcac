"""Slices, and values put together from slices.

With I = gcd(start, stop, size) a sliced dim is `(n I)` and its result `(m I)`: n and m stay whole, I may be cut, and
the slice arguments are multiples of its local size. Where nothing larger than 1 divides all three, the dim stays whole.
So a fused `[768, 3 * 768]` weight is split, or put together, without a look at how the 768 are cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.space import Dim, Ints, Space, arg, axis, path, result_shape, shape_ints

aten = torch.ops.aten


def strided(space: Space, sizes: Sequence[int], marks: Sequence[int] = ()) -> tuple[list[Dim], Dim, int]:
    """Labels `(n I)` for dims of `sizes` that hold equal blocks, cut at `marks`: the dims, I, and the size of I."""
    block = math.gcd(*sizes, *marks)
    if len({*sizes}) == 1 and all(m in (0, sizes[0]) for m in marks):
        inner = space.dim(sizes[0], "i")
        return [inner] * len(sizes), inner, sizes[0]
    inner = space.dim(block, "i") if block else ()
    dims = [(*space.dim(n // block if block else n, "n", whole=True), *inner) for n in sizes]
    return dims, inner, block


def _range(call: Call, size: int, first: int) -> tuple[int, int, int]:
    """start, stop and step of a slice whose dim argument stands at `first`, as Python would count them."""
    step = arg(call, first + 3, "step", 1)
    start, stop, _ = slice(arg(call, first + 1, "start"), arg(call, first + 2, "end")).indices(size)
    return start, max(start, stop), step


def _slice_ints(call: Call, first: int, start: int, stop: int, inner: Dim, block: int) -> Ints:
    ints: Ints = {}
    for k, name, value in ((1, "start", start), (2, "end", stop)):
        if isinstance(arg(call, first + k, name), int):
            ints[path(call, first + k, name)] = (value // block, inner) if block else (value, ())
    return ints


def _sliced(space: Space, call: Call, size: int, length: int, first: int) -> tuple[Dim, Dim, Ints]:
    """Labels of a dim of `size` and of its slice of `length`, and the slice arguments."""
    start, stop, step = _range(call, size, first)
    if step != 1 or (start, stop) == (0, 0):
        return space.dim(size, "n", whole=True), space.dim(length, "n", whole=True), {}
    (long, short), inner, block = strided(space, (size, stop - start), (start,))
    return long, short, _slice_ints(call, first, start, stop, inner, block)


def _slice(call: Call) -> Rule:
    space = Space()
    shape = call.operands[0].shape
    at = axis(arg(call, 1, "dim", 0), len(shape))
    long, short, ints = _sliced(space, call, shape[at], result_shape(call)[at], 1)
    rest = [() if i == at else space.dim(n) for i, n in enumerate(shape)]
    x, out = ([d if i == at else r for i, r in enumerate(rest)] for d in (long, short))
    return space.rule([x], [out], linear=[{0}], ints=ints)


def _slice_backward(call: Call) -> Rule:
    """`slice_backward(grad, sizes, dim, start, end, step)`: grad in its place among zeros."""
    space = Space()
    shape, grad = result_shape(call), call.operands[0].shape
    at = axis(arg(call, 2, "dim"), len(shape))
    long, short, ints = _sliced(space, call, shape[at], grad[at], 2)
    rest = [() if i == at else space.dim(n) for i, n in enumerate(shape)]
    x, out = ([d if i == at else r for i, r in enumerate(rest)] for d in (short, long))
    return space.rule([x], [out], linear=[{0}], ints={**ints, **shape_ints(path(call, 1, "input_sizes"), out)})


def _slice_scatter(call: Call) -> Rule:
    """`slice_scatter(self, src, dim, start, end, step)`: src in its place in self."""
    space = Space()
    shape, src = call.operands[0].shape, call.operands[1].shape
    at = axis(arg(call, 2, "dim", 0), len(shape))
    long, short, ints = _sliced(space, call, shape[at], src[at], 2)
    rest = [() if i == at else space.dim(n) for i, n in enumerate(shape)]
    x, part = ([d if i == at else r for i, r in enumerate(rest)] for d in (long, short))
    return space.rule([x, part], [x], linear=[{0, 1}], ints=ints)


def _select(call: Call) -> Rule:
    space = Space()
    shape = call.operands[0].shape
    at = axis(arg(call, 1, "dim"), len(shape))
    x = space.dims(shape, whole=[at])
    return space.rule([x], [x[:at] + x[at + 1 :]], linear=[{0}])


def _select_backward(call: Call) -> Rule:
    space = Space()
    shape = result_shape(call)
    at = axis(arg(call, 2, "dim"), len(shape))
    out = space.dims(shape, whole=[at])
    ints = shape_ints(path(call, 1, "input_sizes"), out)
    return space.rule([out[:at] + out[at + 1 :]], [out], linear=[{0}], ints=ints)


def _select_scatter(call: Call) -> Rule:
    space = Space()
    shape = call.operands[0].shape
    at = axis(arg(call, 2, "dim"), len(shape))
    x = space.dims(shape, whole=[at])
    return space.rule([x, x[:at] + x[at + 1 :]], [x], linear=[{0, 1}])


def _unbind(call: Call) -> Rule:
    space = Space()
    shape = call.operands[0].shape
    at = axis(arg(call, 1, "dim", 0), len(shape))
    x = space.dims(shape, whole=[at])
    return space.rule([x], [x[:at] + x[at + 1 :]] * len(call.results), linear=[{0}])


def _split(call: Call) -> Rule:
    """Parts that are multiples of a block. An empty shard has as many parts, so the local form slices one by one."""
    space = Space()
    shape = call.operands[0].shape
    at = axis(arg(call, 2, "dim", 0), len(shape))
    parts = [m.shape[at] for m in call.results if m is not None]
    (whole, *short), inner, block = strided(space, (shape[at], *parts))
    rest = space.dims([1 if i == at else n for i, n in enumerate(shape)])
    x, *out = ([d if i == at else r for i, r in enumerate(rest)] for d in (whole, *short))

    def local(local: Local) -> Any:
        size = local.size(inner[0])
        ends = [sum(parts[:i]) // block for i in range(len(parts) + 1)]
        slices = itertools.pairwise(ends)
        return tuple(local.op(aten.slice.Tensor, local.args[0], at, size * lo, size * hi) for lo, hi in slices)

    return space.rule([x], out, linear=[{0}], local=local, local_factors=inner)


def _cat(call: Call) -> Rule:
    """Old-style empty operands (shape [0]) count as nothing."""
    space = Space()
    shape = result_shape(call)
    at = axis(arg(call, 1, "dim", 0), len(shape))
    real = [m.shape for m in call.operands if len(m.shape) == len(shape)]
    (total, *parts), _, _ = strided(space, (shape[at], *(s[at] for s in real)))
    rest = space.dims([1 if i == at else n for i, n in enumerate(shape)])
    rows = [[d if i == at else r for i, r in enumerate(rest)] for d in (total, *parts)]
    queue = iter(rows[1:])
    operands = [next(queue) if len(m.shape) == len(shape) else space.dims(m.shape, whole=[0]) for m in call.operands]
    return space.rule(operands, [rows[0]], linear=[range(len(operands))])


def _stack(call: Call) -> Rule:
    space = Space()
    shape = result_shape(call)
    at = axis(arg(call, 1, "dim", 0), len(shape))
    out = space.dims(shape, whole=[at])
    count = len(call.operands)
    return space.rule([out[:at] + out[at + 1 :]] * count, [out], linear=[range(count)])


def _pad(call: Call) -> Rule:
    space = Space()
    shape, grown = call.operands[0].shape, result_shape(call)
    pad = list(arg(call, 1, "pad"))
    prefix = path(call, 1, "pad")
    x: list[Dim] = []
    out: list[Dim] = []
    ints: Ints = {}
    for i, (old, new) in enumerate(zip(shape, grown, strict=True)):
        k = 2 * (len(shape) - 1 - i)
        before, after = (pad[k], pad[k + 1]) if k < len(pad) else (0, 0)
        if before == after == 0:
            d = e = space.dim(old)
        else:
            (d, e), inner, block = strided(space, (old, new), (abs(before), abs(after)))
            if block:
                ints |= {(*prefix, k): (before // block, inner), (*prefix, k + 1): (after // block, inner)}
        x.append(d)
        out.append(e)
    return space.rule([x], [out], linear=[] if arg(call, 2, "value", 0) else [{0}], ints=ints)


def _mirror(call: Call) -> Rule:
    """flip and roll: their dims stay whole; roll without dims rolls the flattened value."""
    space = Space()
    shape = call.operands[0].shape
    dims = arg(call, 2, "dims", ()) if call.target == aten.roll.default else arg(call, 1, "dims")
    x = space.dims(shape, whole=[axis(d, len(shape)) for d in dims] or range(len(shape)))
    return space.rule([x], [x], linear=[{0}])


def _triangle(call: Call) -> Rule:
    """tril and triu keep `column - row` on one side of the diagonal, which offsets of rows and columns shift."""
    space = Space()
    x = space.dims(call.operands[0].shape)
    row, column = x[-2], x[-1]

    def local(local: Local) -> Any:
        diagonal = arg(local, 1, "diagonal", 0)
        for f in row:
            diagonal = local.offset(f) + diagonal
        for f in column:
            diagonal = diagonal - local.offset(f)
        return local.op(local.call.target, local.args[0], diagonal)

    return space.rule([x], [x], linear=[{0}], local=local, local_factors=(*row, *column))


ROWS: dict[str, RuleFn | str] = {
    "slice.Tensor": _slice,
    "slice_backward": _slice_backward,
    "slice_scatter": _slice_scatter,
    "select.int": _select,
    "select_backward": _select_backward,
    "select_scatter": _select_scatter,
    "unbind.int": _unbind,
    **dict.fromkeys(["split.Tensor", "split_with_sizes", "chunk", "split_with_sizes_copy"], _split),
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "flip": _mirror,
    "roll": _mirror,
    "tril": _triangle,
    "triu": _triangle,
}
