"""Whole dims turned round, and rows sent from device to device: every device fetches what comes to lie in its
piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.manual.collectives import piece, ppermute
from shardlib.rules.halo import Range, extent, fetch
from shardlib.rules.rule import Call, Local, Rule
from shardlib.rules.shards import gathered, held
from shardlib.rules.space import Space, arg, axis


def flip(call: Call) -> Rule:
    """A piece is the piece at the other end, turned round: where all are alike, that is one exchange."""
    space, shape = Space(), call.operands[0].shape
    turned = [axis(d, len(shape)) for d in arg(call, 1, "dims") if shape]
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

    return space.rule([x], [x], linear=[{0}], local=local, local_factors=along.values())


def _mirrored(size: int) -> Callable[[Range], Range]:
    return lambda r: (size - r[1], size - r[0])


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

    cut = {*x[0]} if pairs else ()  # with nothing to send there are zeros everywhere
    return space.rule([x], [x], linear=[{0}], local=local, local_factors=cut)
