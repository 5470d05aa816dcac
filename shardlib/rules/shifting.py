"""Slices of a cut dim, and their way back.

Every device fetches what moves into its piece from whoever holds it. With I = gcd(start, stop, size) a sliced dim is
`(p I)` and its result `(q I)`. A cut of I needs no communication: the slice arguments are multiples of its local size
(so a fused `[768, 3 * 768]` weight is sliced without a look at how the 768 are cut). A cut of p and q moves blocks of I
between neighbours. One block is a pending sum: of it where it is, and of zeros elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.halo import Range, extent, fetch, length, reframe, sent
from shardlib.rules.rule import Call, Halo, Local, Rule
from shardlib.rules.shards import adds_up, held, nothing
from shardlib.rules.space import Dim, Ints, Space, arg, axis, path, result_shape, shape_ints
from shardlib.rules.window import Window

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
        block = math.gcd(*sizes, start) if step == 1 else 1
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

    def ties(self, *, forward: bool) -> dict[str, str]:
        """The long dim is cut with the short one (`forward`), or the other way round."""
        pair = self.outer if forward else self.outer[::-1]
        return dict(zip(*pair, strict=True)) if all(pair) else {}

    def needs(self, mine: Range) -> Range:
        """Blocks of the long dim that make a range of the short one."""
        return self.window.reads(mine) if length(mine) else (0, 0)

    def halos(self, *, forward: bool, position: int = 0) -> list[Halo]:
        """What is sent of an operand: of the long dim for the short one (`forward`), or the other way round."""
        if not self.ties(forward=forward):
            return []
        a, b = self.counts if forward else self.counts[::-1]
        need = self.needs if forward else (lambda r: self.window.readers(r, self.counts[1]))
        return [Halo(self.outer[0 if forward else 1][0], position, True, sent(a, b, need))]

    def cut(self, local: Local) -> bool:
        return any(local.axes(f) for d in self.outer for f in d)

    def inside(self, local: Local) -> Any:
        """How much this device has of a block."""
        return held(local, self.inner)


def exposed(x: Tensor, at: int, outer: Dim, count: int, inside: int) -> Tensor:
    """A piece with dim `at` as blocks (`count` in all, of label `outer`), and behind it what is in a block."""
    return x.reshape(*x.shape[:at], length(extent(outer, count)), inside, *x.shape[at + 1 :])


def joined(x: Tensor, at: int) -> Tensor:
    """The blocks put together again."""
    return x.flatten(at, at + 1)


def shift_rule(
    space: Space,
    operands: list[list[Dim]],
    result: list[Dim],
    shifts: list[Shift],
    local: Callable[[Local], Any],
    *,
    forward: bool,
    position: int = 0,
    ints: Ints | None = None,
    linear: Any = (),
) -> Rule:
    follows = {k: v for shift in shifts for k, v in shift.ties(forward=forward).items()}
    lonely = {f for shift in shifts if not shift.outer[1] for f in shift.outer[0]}
    return space.rule(
        operands,
        [result],
        reduce=dict.fromkeys(follows, "none") | (dict.fromkeys(lonely, "sum") if forward else {}),
        linear=linear,
        ints=ints,
        local=local,
        local_factors={f for pair in follows.items() for f in pair} | lonely,
        follows=follows,
        halos=[h for shift in shifts for h in shift.halos(forward=forward, position=position)],
    )


# Slices ---------------------------------------------------------------------------------------------------------------


def _range(call: Call, size: int, first: int) -> tuple[int, int, int]:
    """start, stop and step of a slice whose dim argument stands at `first`, as Python would count them."""
    step = arg(call, first + 3, "step", 1)
    start, stop, _ = slice(arg(call, first + 1, "start"), arg(call, first + 2, "end")).indices(size)
    return start, max(start, stop), step


def _slice_ints(call: Call, first: int, shift: Shift, start: int, stop: int, step: int) -> Ints:
    ints: Ints = {}
    for k, name, value in ((1, "start", start), (2, "end", stop)):
        if step == 1 and shift.block and isinstance(arg(call, first + k, name), int):
            ints[path(call, first + k, name)] = (value // shift.block, shift.inner)
    return ints


def _sliced(space: Space, call: Call, size: int, length: int, first: int) -> tuple[Shift, Ints]:
    """A dim of `size`, its slice of `length`, and the slice arguments."""
    start, stop, step = _range(call, size, first)
    shift = Shift.of(space, (size, length), start if length else 0, step)
    return shift, _slice_ints(call, first, shift, start, stop, step)


def slice_(call: Call) -> Rule:
    space = Space()
    shape = call.operands[0].shape
    at = axis(arg(call, 1, "dim", 0), len(shape))
    shift, ints = _sliced(space, call, shape[at], result_shape(call)[at], 1)
    rest = [() if i == at else space.dim(n) for i, n in enumerate(shape)]
    x, out = ([d if i == at else r for i, r in enumerate(rest)] for d in (shift.long, shift.short))

    _only_numbers(space, call, shift)
    local = lambda local: local.run(taken, local.args[0], at, shift, shift.inside(local))
    return shift_rule(space, [x], out, [shift], local, forward=True, ints=ints, linear=[{0}])


def _only_numbers(space: Space, call: Call, shift: Shift) -> None:
    """One block of a cut dim is a sum of what devices have of it; not everything can be added up."""
    if not shift.outer[1] and not adds_up(call.operands[0].dtype):
        space.whole |= {*shift.outer[0]}


def taken(x: Tensor, at: int, shift: Shift, inside: int, fill: float = 0) -> Tensor:
    """A device's blocks of a slice; one block is where it is, and zeros on the other devices."""
    (p, q), (long, short) = shift.outer, shift.counts
    need = shift.needs(extent(q, short))
    x = exposed(x, at, p, long, inside)
    if not q:
        return joined(reframe(x, at, extent(p, long), need, nothing(x.dtype)), at)
    x = fetch(x, at, p, need, fill=fill, name="input")
    return joined(aten.slice.Tensor(x, at, 0, None, shift.window.stride), at)


def written(base: Tensor, value: Tensor, at: int, shift: Shift, inside: int) -> Tensor:
    """`value`, a slice, in its place in `base`."""
    (p, q), (long, short), step = shift.outer, shift.counts, shift.window.stride
    mine = extent(p, long)
    need = shift.window.readers(mine, short)
    part = fetch(exposed(value, at, q, short, inside), at, q, need, name="input")
    low = need[0] * step - shift.window.padding - mine[0]
    low, high = (low, low + (length(need) - 1) * step + 1) if length(need) else (0, 0)
    return joined(aten.slice_scatter.default(exposed(base, at, p, long, inside), part, at, low, high, step), at)


def _zeros(like: Tensor, at: int, shift: Shift, inside: int) -> Tensor:
    """What a device has of the whole of which `like` has a slice: zeros."""
    n = length(extent(shift.outer[0], shift.counts[0])) * inside
    return like.new_zeros([*like.shape[:at], n, *like.shape[at + 1 :]])


def slice_scatter(call: Call) -> Rule:
    """`slice_scatter(self, src, dim, start, end, step)`: src in its place in self."""
    space = Space()
    shape, src = call.operands[0].shape, call.operands[1].shape
    at = axis(arg(call, 2, "dim", 0), len(shape))
    shift, ints = _sliced(space, call, shape[at], src[at], 2)
    rest = [() if i == at else space.dim(n) for i, n in enumerate(shape)]
    x, part = ([d if i == at else r for i, r in enumerate(rest)] for d in (shift.long, shift.short))

    local = lambda local: local.run(written, *local.args[:2], at, shift, shift.inside(local))
    return shift_rule(space, [x, part], x, [shift], local, forward=False, position=1, ints=ints, linear=[{0, 1}])


def slice_backward(call: Call) -> Rule:
    """`slice_backward(grad, sizes, dim, start, end, step)`: grad in its place among zeros."""
    space = Space()
    shape, grad = result_shape(call), call.operands[0].shape
    at = axis(arg(call, 2, "dim"), len(shape))
    shift, ints = _sliced(space, call, shape[at], grad[at], 2)
    rest = [() if i == at else space.dim(n) for i, n in enumerate(shape)]
    x, out = ([d if i == at else r for i, r in enumerate(rest)] for d in (shift.short, shift.long))
    ints |= shape_ints(path(call, 1, "input_sizes"), out)

    def form(grad: Tensor, inside: int) -> Tensor:
        return written(_zeros(grad, at, shift, inside), grad, at, shift, inside)

    local = lambda local: local.run(form, local.args[0], shift.inside(local))
    return shift_rule(space, [x], out, [shift], local, forward=False, ints=ints, linear=[{0}])


def select(call: Call) -> Rule:
    space, shape = Space(), call.operands[0].shape
    at, shift = _selected(space, call, shape, 1)
    _only_numbers(space, call, shift)
    x = [shift.long if i == at else space.dim(n) for i, n in enumerate(shape)]

    local = lambda local: local.run(lambda x: taken(x, at, shift, 1).select(at, 0), local.args[0])
    return shift_rule(space, [x], x[:at] + x[at + 1 :], [shift], local, forward=True, linear=[{0}])


def select_scatter(call: Call) -> Rule:
    """`select_scatter(self, src, dim, index)`: src in its place in self."""
    space, shape = Space(), call.operands[0].shape
    at, shift = _selected(space, call, shape, 2)
    x = [shift.long if i == at else space.dim(n) for i, n in enumerate(shape)]
    local = lambda local: local.run(lambda x, one: written(x, one.unsqueeze(at), at, shift, 1), *local.args[:2])
    return shift_rule(space, [x, x[:at] + x[at + 1 :]], x, [shift], local, forward=False, linear=[{0, 1}])


def select_backward(call: Call) -> Rule:
    """`select_backward(grad, sizes, dim, index)`: grad in its place among zeros."""
    space, shape = Space(), result_shape(call)
    at, shift = _selected(space, call, shape, 2)
    out = [shift.long if i == at else space.dim(n) for i, n in enumerate(shape)]

    def form(grad: Tensor) -> Tensor:
        one = grad.unsqueeze(at)
        return written(_zeros(one, at, shift, 1), one, at, shift, 1)

    ints = shape_ints(path(call, 1, "input_sizes"), out)
    local = lambda local: local.run(form, local.args[0])
    return shift_rule(space, [out[:at] + out[at + 1 :]], out, [shift], local, forward=False, ints=ints, linear=[{0}])


def _selected(space: Space, call: Call, shape: tuple[int, ...], first: int) -> tuple[int, Shift]:
    at = axis(arg(call, first, "dim"), len(shape))
    index = arg(call, first + 1, "index")
    return at, Shift.of(space, (shape[at], 1), index + shape[at] if index < 0 else index)
