"""Whole dims turned round or rolled, and rows sent from device to device: every device fetches what comes to lie in its
piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.manual.collectives import piece, ppermute
from shardlib.rules.halo import Range, extent, fetch, fetch_all, sent
from shardlib.rules.rule import Call, Halo, Local, Rule
from shardlib.rules.shards import cut, gathered, held
from shardlib.rules.space import Space, arg, axis

Needs = Sequence[Callable[[Range], Range]]  # what a range of a dim consists of, piece by piece


def flip(call: Call) -> Rule:
    """A piece is the piece at the other end, turned round: where all are alike, that is one exchange."""
    space, shape = Space(), call.operands[0].shape
    turned = [axis(d, len(shape)) for d in arg(call, 1, "dims")]
    x = space.dims(shape)
    along = {at: x[at][0] for at in turned if x[at]}

    def local(local: Local) -> Any:
        ways = {at: local.ways(f) for at, f in along.items()}
        alike = {at: len(set().union(*local.values(local.size(f), f))) == 1 for at, f in along.items()}

        def form(value: Tensor) -> Tensor:
            for at, f in along.items():
                if alike[at] and ways[at] > 1:
                    value = ppermute(value, f, [(i, ways[at] - 1 - i) for i in range(ways[at])])
                else:
                    value = fetch(value, at, (f,), _mirrored(shape[at])(extent((f,), shape[at])), name="input")
            return torch.flip(value, turned)

        return local.run(form, local.args[0])

    halos = [Halo(f, 0, True, _crosswise(shape[at])) for at, f in along.items()]
    return space.rule([x], [x], linear=[{0}], local=local, local_factors=along.values(), halos=halos)


def _mirrored(size: int) -> Callable[[Range], Range]:
    return lambda r: (size - r[1], size - r[0])


def _crosswise(size: int) -> Callable[[int], tuple[int, int]]:
    """Messages and rows of a flip over so many devices."""
    return lambda n: sent(size, size, _mirrored(size))(n) if size % n else (1, size // n)


def roll(call: Call) -> Rule:
    """Without dims the flattened value is rolled: nothing may be cut."""
    shape = call.operands[0].shape
    shifts, dims = ([n] if isinstance(n, int) else list(n) for n in (arg(call, 1, "shifts"), arg(call, 2, "dims", ())))
    by: dict[int, int] = {}
    for d, n in zip(dims, shifts if dims else (), strict=True):
        by[axis(d, len(shape))] = by.get(axis(d, len(shape)), 0) + n
    by = {at: n % shape[at] for at, n in by.items() if shape[at]}
    moved = {at: _wrapped(shape[at], n) if n else [] for at, n in by.items()}

    def rest(x: Tensor, done: Sequence[int]) -> Tensor:
        left = [at for at, n in by.items() if n and at not in done]
        if not dims:
            return torch.roll(x, shifts)
        if left:
            return torch.roll(x, [by[at] for at in left], left)
        return x if any(moved[at] for at in done) else x.clone()

    return _moved(call, moved, rest, whole=not dims)


def _wrapped(size: int, by: int) -> Needs:
    """Of a dim rolled `by`: what comes from its end to a range at its begin, and what from in front of the range."""

    def wrapped(r: Range) -> Range:
        low, high = r[0], min(r[1], by)
        return (low - by + size, high - by + size) if low < high else (0, 0)

    def straight(r: Range) -> Range:
        low, high = max(r[0], by), r[1]
        return (low - by, high - by) if low < high else (0, 0)

    return [wrapped, straight]


def _moved(
    call: Call, needs: Mapping[int, Needs], rest: Callable[[Tensor, Sequence[int]], Tensor], *, whole: bool = False
) -> Rule:
    """The rule of an op that moves elements along dims; `rest` does what is left where those that are cut are done."""
    space, shape = Space(), call.operands[0].shape
    x = space.dims(shape, whole=range(len(shape)) if whole else [])
    along = {at: x[at][0] for at in needs if x[at]}

    def local(local: Local) -> Any:
        done = [at for at, f in along.items() if cut(local, [f])]

        def form(value: Tensor) -> Tensor:
            for at in (at for at in done if needs[at]):
                mine = extent(x[at], shape[at])
                value = torch.cat(fetch_all(value, at, x[at], [need(mine) for need in needs[at]], "input"), at)
            return rest(value, done)

        return local.run(form, local.args[0])

    halos = [Halo(f, 0, True, sent(shape[at], shape[at], *needs[at])) for at, f in along.items() if needs[at]]
    return space.rule([x], [x], linear=[{0}], local=local, local_factors=along.values(), halos=halos)


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
