"""Cat, padding and rolls of a cut dim: every device fetches what comes to lie in its piece.

Blocks as in `shifting`: a fused weight is put together without a look at how its parts are cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardlib.rules.halo import Piece, Range, extent, sent
from shardlib.rules.rule import Call, Halo, Local, Rule
from shardlib.rules.shifting import Shift, exposed, joined, shift_rule
from shardlib.rules.space import Dim, Ints, Space, arg, axis, path, result_shape

aten = torch.ops.aten


def cat(call: Call) -> Rule:
    """Each operand is a slice of the result; old-style empty ones (shape [0]) count as nothing."""
    space, shape = Space(), result_shape(call)
    at = axis(arg(call, 1, "dim", 0), len(shape))
    places = [i for i, m in enumerate(call.operands) if len(m.shape) == len(shape)]
    sizes = [call.operands[i].shape[at] for i in places]
    block = math.gcd(shape[at], *sizes)
    if len(sizes) == 1 or not block:
        inner = space.dim(shape[at], "i")
        outer: list[Dim] = [()] * (1 + len(sizes))
    else:
        inner = space.dim(block, "i")
        outer = [space.dim(n // block, "p") for n in (shape[at], *sizes)]
    rest = space.dims([1 if i == at else n for i, n in enumerate(shape)])
    rows = [[(*d, *inner) if i == at else r for i, r in enumerate(rest)] for d in outer]
    queue = iter(rows[1:])
    operands = [next(queue) if len(m.shape) == len(shape) else space.dims(m.shape, whole=[0]) for m in call.operands]
    begins = list(itertools.accumulate((n // max(block, 1) for n in sizes), initial=0))

    def part(k: int) -> Callable[[Range], Range]:
        """Which blocks of operand k are in a range of the result."""
        low, high = begins[k], begins[k + 1]
        return lambda r: (min(max(r[0], low), high) - low, min(max(r[1], low), high) - low)

    def local(local: Local) -> Any:
        mine = extent(local, outer[0], begins[-1])
        parts = zip(places, outer[1:], strict=True)
        pieces = [exposed(local, local.args[0][i], local.rule.operands[i], at, d) for i, d in parts]
        for k, piece in enumerate(pieces):
            need = local.calc(part(k), mine)
            piece.fetch(at, outer[1 + k], need, need)
        whole = Piece.of(local, None, local.rule.results[0], "").shape
        return local.op(aten.reshape.default, local.op(aten.cat.default, [p.value for p in pieces], at), whole)

    follows = {d[0]: outer[0][0] for d in outer[1:] if d and outer[0] and d[0] not in space.whole}
    halos = [
        Halo(d[0], i, True, sent(begins[k + 1] - begins[k], begins[-1], part(k)))
        for k, (i, d) in enumerate(zip(places, outer[1:], strict=True))
        if d and d[0] in follows
    ]
    return space.rule(
        operands,
        [rows[0]],
        reduce=dict.fromkeys(follows, "none"),
        linear=[range(len(operands))],
        local=local,
        local_factors={*follows, *outer[0]},
        follows=follows,
        halos=halos,
    )


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
    labels, value, rest = list(local.rule.operands[0]), local.args[0], list(arg(local, 1, "pad"))
    fill = arg(local, 2, "value", 0)
    for at, shift in shifts.items():
        if shift.cut(local):
            piece = exposed(local, value, tuple(labels), at, shift.outer[0])
            need = local.calc(shift.needs, extent(local, shift.outer[1], shift.counts[1]))
            piece.fetch(at, shift.outer[0], need, need, fill)
            value, labels[at] = joined(piece, at), shift.short
            k = 2 * (len(labels) - 1 - at)
            rest[k : k + 2] = [0, 0]
    return local.op(aten.constant_pad_nd.default, value, rest, fill)


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
    halos = [Halo(x[at][0], 0, True, sent(shape[at], shape[at], part)) for at, parts in moved.items() for part in parts]

    def local(local: Local) -> Any:
        labels, value = local.rule.operands[0], local.args[0]
        cut = [at for at in moved if any(map(local.axes, x[at]))]
        for at in cut:
            mine = extent(local, x[at], shape[at])
            pieces = [Piece.of(local, value, labels, "input") for _ in moved[at]]
            for piece, part in zip(pieces, moved[at], strict=True):
                need = local.calc(part, mine)
                piece.fetch(at, x[at], need, need)
            value = local.op(aten.cat.default, [p.value for p in pieces], at)
        rest = [at for at in by if at not in cut]
        if dims and not by:
            return local.op(aten.clone.default, value)
        return local.op(aten.roll.default, value, [by[at] for at in rest], rest) if rest else value

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
        piece, (factor,) = Piece.of(local, local.args[0], local.rule.operands[0], "input"), x[0]
        if local.values(local.size(factor), factor) == [{1}] * n:
            return local.send(piece.value, factor, pairs, piece.shape, name=piece.name)
        whole = local.all_gather(piece.value, factor, 0, local.rule.operands[0], local.size(factor))
        sent = local.op(call.target, whole, *local.args[1:])
        return local.op(aten.narrow.default, sent, 0, local.offset(factor), local.size(factor))

    halos = [Halo(factor, 0, True, lambda ways: (1, n // ways)) for factor in x[0]]
    cut = {*x[0]} if pairs else ()  # with nothing to send there are zeros everywhere
    return space.rule([x], [x], linear=[{0}], local=local, local_factors=cut, halos=halos if pairs else ())
