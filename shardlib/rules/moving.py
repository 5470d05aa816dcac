"""Padding and rolls of a cut dim: every device fetches what comes to lie in its piece.

Blocks as in `shifting`: a fused weight is put together without a look at how its parts are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.manual.collectives import piece
from shardlib.rules.halo import Range, extent, fetch_all, padded, sent
from shardlib.rules.rule import Call, Halo, Local, Rule
from shardlib.rules.shards import gathered, held, positional
from shardlib.rules.shifting import Shift, shift_rule, taken
from shardlib.rules.space import Dim, Ints, Space, arg, axis, path, result_shape

aten = torch.ops.aten


def pad(call: Call) -> Rule:
    space = Space()
    shape, grown = call.operands[0].shape, result_shape(call)
    amounts = list(arg(call, 1, "pad"))
    prefix = path(call, 1, "pad")
    x: list[Dim] = []
    out: list[Dim] = []
    ints: Ints = {}
    shifts: dict[int, Shift] = {}
    for i, (old, new) in enumerate(zip(shape, grown, strict=True)):
        k = 2 * (len(shape) - 1 - i)
        before, after = (amounts[k], amounts[k + 1]) if k < len(amounts) else (0, 0)
        if before == after == 0:
            d = e = space.dim(old)
        else:
            shift = shifts[i] = Shift.of(space, (old, new), -before)
            d, e = shift.long, shift.short
            if not shift.outer[1]:
                space.whole |= {*shift.outer[0]}
            if shift.block:
                ints |= {(*prefix, k + j): (n // shift.block, shift.inner) for j, n in enumerate((before, after))}
        x.append(d)
        out.append(e)
    return shift_rule(
        space,
        [x],
        out,
        list(shifts.values()),
        lambda local: _padded(local, shifts),
        forward=True,
        ints=ints,
        linear=[] if arg(call, 2, "value", 0) else [{0}],
    )


def _padded(local: Local, shifts: Mapping[int, Shift]) -> Any:
    """Dims that are cut fetch and fill; the op itself pads the others."""
    cut = {at: shift for at, shift in shifts.items() if shift.cut(local)}

    def form(x: Tensor, pad: Sequence[int], fill: float, insides: Sequence[int]) -> Tensor:
        rest = list(pad)
        for (at, shift), inside in zip(cut.items(), insides, strict=True):
            x, k = taken(x, at, shift, inside, fill), 2 * (x.dim() - 1 - at)
            rest[k : k + 2] = [0, 0]
        return padded(x, rest, fill)

    return local.run(form, *positional(local), [shift.inside(local) for shift in cut.values()])


def roll(call: Call) -> Rule:
    """Without dims the flattened value is rolled: nothing may be cut."""
    shape, space = call.operands[0].shape, Space()
    shifts, dims = ([n] if isinstance(n, int) else list(n) for n in (arg(call, 1, "shifts"), arg(call, 2, "dims", ())))
    by: dict[int, int] = {}
    for d, n in zip(dims, shifts if dims else (), strict=True):
        by[axis(d, len(shape))] = by.get(axis(d, len(shape)), 0) + n
    x = space.dims(shape, whole=[] if dims else range(len(shape)))
    touched = [at for at in by if shape[at] > 1]
    by = {at: by[at] for at in touched if by[at] % shape[at]}  # the rest goes all the way round, and stays
    moved = {at: _parts(shape[at], n) for at, n in by.items()}
    halos = [Halo(x[at][0], 0, True, sent(shape[at], shape[at], *parts)) for at, parts in moved.items()]

    def local(local: Local) -> Any:
        cut = [at for at in moved if any(map(local.axes, x[at]))]
        rest = [at for at in by if at not in cut]

        def form(value: Tensor) -> Tensor:
            for at in cut:
                mine = extent(x[at], shape[at])
                value = torch.cat(fetch_all(value, at, x[at], [part(mine) for part in moved[at]], "input"), at)
            if dims and not by:
                return value.clone()
            return torch.roll(value, [by[at] for at in rest], rest) if rest else value

        return local.run(form, local.args[0])

    cut = {f for at in touched for f in x[at]}
    return space.rule([x], [x], linear=[{0}], local=local, local_factors=cut, halos=halos)


def _parts(size: int, by: int) -> list[Callable[[Range], Range]]:
    """Of a dim rolled `by`: what comes from its end to a range at its begin, and what from in front of the range."""
    by %= size

    def wrapped(r: Range) -> Range:
        low, high = r[0], min(r[1], by)
        return (low - by + size, high - by + size) if low < high else (0, 0)

    def straight(r: Range) -> Range:
        low, high = max(r[0], by), r[1]
        return (low - by, high - by) if low < high else (0, 0)

    return [wrapped, straight]


def send_rows(call: Call) -> Rule:
    """`send_rows(x, sources, rows)`: devices with a row each send it; those that hold several have to see them all."""
    space, (n, *_) = Space(), call.operands[0].shape
    x, pairs = space.dims(call.operands[0].shape, "n"), list(zip(*call.args[1:], strict=True))

    def local(local: Local) -> Any:
        value, (factor,) = local.args[0], x[0]
        if local.values(local.size(factor), factor) == [{1}] * n:
            return local.send(value, factor, pairs, [held(local, d) for d in x], name="input")

        def form(value: Tensor, *args: Any) -> Tensor:
            offset, size, whole = piece(factor)
            sent: Tensor = call.target(gathered(value, factor, 0, whole), *args)
            return sent.narrow(0, offset, size)

        return local.run(form, *local.args)

    halos = [Halo(factor, 0, True, lambda ways: (1, n // ways)) for factor in x[0]]
    cut = {*x[0]} if pairs else ()  # with nothing to send there are zeros everywhere
    return space.rule([x], [x], linear=[{0}], local=local, local_factors=cut, halos=halos if pairs else ())
