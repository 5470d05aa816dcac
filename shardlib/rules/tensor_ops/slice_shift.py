"""Slices of a cut dim, and the way back.

Every device fetches what moves into its piece from whoever holds it. With I = gcd(start, stop, size) a sliced dim is
`(p I)` and its result `(q I)`. A cut of I needs no communication: the slice arguments are multiples of its local size
(so a fused `[768, 3 * 768]` weight is sliced without a look at how the 768 are cut). A cut of p and q moves blocks of I
between neighbors. One block is a pending sum: of it where it is, and of zeros elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import schema_of
from shardlib.rules.iteration_space import Dim, Ints, Space, arg, axis, path, result_shape, shape_ints
from shardlib.rules.local_forms.halo import extent, fetch, held, length, reframe
from shardlib.rules.local_forms.helpers import adds_up, nothing, torch_code
from shardlib.rules.local_forms.window import Window
from shardlib.rules.rule import Call, Held, Local, Path, Reads, Rule

aten = torch.ops.aten


@dataclass
class Shift:
    """One dim whose blocks move: which blocks of the long one each block of the short one is (`window`)."""

    long: Dim
    short: Dim
    outer: tuple[Dim, Dim]  # their factors of blocks, () where these stay whole
    inner: Dim
    counts: tuple[int, int]  # blocks
    block: int
    window: Window

    @staticmethod
    def of(space: Space, sizes: tuple[int, int], start: int, step: int = 1) -> Shift:
        """`sizes` of the long dim and of its slice from `start`; the follower is cut with the other one."""
        block = granularity(math.gcd(*sizes, start), sizes[0], sizes[1]) if step == 1 else 1
        if sizes[0] == sizes[1] and not start and step == 1:
            same = space.dim(sizes[0], "i")
            return Shift(same, same, ((), ()), same, (1, 1), sizes[0], Window(1))
        inner = space.dim(block, "i") if block else ()
        counts = tuple(n // block if block else n for n in sizes)
        p, q = (space.dim(n, "p" if i == 0 else "q") for i, n in enumerate(counts))
        labels = (*p, *inner), (*q, *inner)
        if not (p and block and all(counts)):
            space.whole |= {*p, *q}
            p = q = ()
        window = Window(1, step, -(start // block if block else 0))
        return Shift(*labels, (p, q), inner, (counts[0], counts[1]), block, window)


def granularity(block: int, long: int, most: int) -> int:
    """How large the blocks of a dim of `long` are, where all that counts are multiples of `block`, and `most` of it
    stays side by side.

    Where that is most of it, borders move, which may be between any elements; so blocks that are so small that nobody
    would cut inside them are none.
    """
    return 1 if 2 * most > long and block * block < long else block


def exposed(x: Tensor, at: int, outer: Dim, count: int, inner: Dim, block: int) -> Tensor:
    """A piece with dim `at` as blocks (`count` in all, of label `outer`), and behind it what is in a block."""
    return x.reshape(*x.shape[:at], held(outer, count), held(inner, block), *x.shape[at + 1 :])


def joined(x: Tensor, at: int) -> Tensor:
    """The blocks put together again."""
    return x.flatten(at, at + 1)


# Ranges that are read or written --------------------------------------------------------------------------------------


def ranged(call: Call) -> Rule:
    """A range of a dim (`slice`), or one element (`select`), that is read, or written to its place in another value
    (`_scatter`) or among zeros (`_backward`)."""
    name = schema_of(call.target).name
    one, zeros, scatters = (word in name for word in ("select", "backward", "scatter"))
    reads = not (zeros or scatters)
    shape = result_shape(call) if zeros else call.operands[0].shape
    space, at = Space(), axis(arg(call, "dim"), len(shape))
    start, stop, step = _range(call, shape[at], one=one)
    count = len(range(start, stop, step))
    shift = Shift.of(space, (shape[at], count), start if count else 0, step)
    whole = [shift.long if i == at else space.dim(n) for i, n in enumerate(shape)]
    part = [*whole[:at], *([] if one else [shift.short]), *whole[at + 1 :]]
    ints: Ints = shape_ints(path(call, "input_sizes"), whole) if zeros else {}
    if shift.block and step == 1 and not one:
        ends = {path(call, "start"): start, path(call, "end"): stop}
        ints |= {where: (n // shift.block, shift.inner) for where, n in ends.items() if _said(call, where)}

    def form(_: Local, *given: Any) -> Tensor:
        *base, x = given[: len(call.operands)]
        if reads:
            x = _taken(x, at, shift)
            return x.select(at, 0) if one else x
        x = x.unsqueeze(at) if one else x
        return _written(base[0] if base else _zeros(x, at, shift), x, at, shift)

    long, short = shift.outer
    if reads and not short and not adds_up(call.operands[0].dtype):
        space.whole |= {*long}  # one block is a sum of what devices have of it
    single, at_block = () if short else long, -shift.window.padding
    follows = dict(zip(long, short, strict=False)) if reads else dict(zip(short, long, strict=False))
    lies = {p: Reads(q, step, at_block, at_block, shift.counts[1]) for p, q in zip(long, short, strict=False)}
    return space.rule(
        [whole, part] if scatters else [part] if zeros else [whole],
        [part if reads else whole],
        reduce=dict.fromkeys(follows, "none") | (dict.fromkeys(single, "sum") if reads else {}),
        linear=[range(len(call.operands))],
        ints=ints,
        local=torch_code(form),
        local_factors={*long, *short},
        gathers=single if reads else (),
        follows=follows,
        reads=lies,
        held=tuple(Held(f, at_block, None if reads else len(call.operands) - 1) for f in single),
    )


def _range(call: Call, size: int, *, one: bool) -> tuple[int, int, int]:
    """start, stop and step of a range, as Python would count them."""
    if one:
        index = arg(call, "index") % size
        return index, index + 1, 1
    step = arg(call, "step")
    start, stop, _ = slice(arg(call, "start"), arg(call, "end")).indices(size)
    return start, max(start, stop), step


def _said(call: Call, where: Path) -> bool:
    """Whether an argument is a number."""
    (key,) = where
    return isinstance(call.args[key] if isinstance(key, int) else call.kwargs.get(key), int)


def _taken(x: Tensor, at: int, shift: Shift) -> Tensor:
    """A device's blocks of a slice; one block is where it is, and zeros on the other devices."""
    (p, q), (long, short) = shift.outer, shift.counts
    wanted = extent(q, short)
    need = shift.window.reads(wanted) if length(wanted) else (0, 0)
    x = exposed(x, at, p, long, shift.inner, shift.block)
    if not q:
        return joined(reframe(x, at, extent(p, long), need, nothing(x.dtype)), at)
    if shift.window.stride == 1:
        (x,) = fetch(x, at, p, [need], "input")
        return joined(x, at)
    first, mine = extent(p, long)[0], shift.window.readers(extent(p, long), short)  # the results that it has itself
    low = mine[0] * shift.window.stride - shift.window.padding - first
    low, high = (low, low + (length(mine) - 1) * shift.window.stride + 1) if length(mine) else (0, 0)
    x = aten.slice.Tensor(x, at, low, high, shift.window.stride)
    (x,) = fetch(x, at, p, [wanted], "input", have=mine)
    return joined(x, at)


def _written(base: Tensor, value: Tensor, at: int, shift: Shift) -> Tensor:
    """`value`, a slice, in its place in `base`."""
    (p, q), (long, short), step = shift.outer, shift.counts, shift.window.stride
    inside = shift.inner, shift.block
    mine = extent(p, long)
    need = shift.window.readers(mine, short)
    (part,) = fetch(exposed(value, at, q, short, *inside), at, q, [need], "input")
    low = need[0] * step - shift.window.padding - mine[0]
    low, high = (low, low + (length(need) - 1) * step + 1) if length(need) else (0, 0)
    return joined(aten.slice_scatter.default(exposed(base, at, p, long, *inside), part, at, low, high, step), at)


def _zeros(like: Tensor, at: int, shift: Shift) -> Tensor:
    """What a device has of the whole of which `like` has a slice: zeros."""
    n = held(shift.outer[0], shift.counts[0]) * held(shift.inner, shift.block)
    return like.new_zeros([*like.shape[:at], n, *like.shape[at + 1 :]])
