"""Whole dims turned round, and rows sent from device to device: every device fetches what comes to lie in its
piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.primitives.collectives import piece, ppermute
from shardlib.rules.iteration_space import Space, axis
from shardlib.rules.local_forms.halo import extent, fetch
from shardlib.rules.local_forms.helpers import cut, gathered, shares, torch_code
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule


def _flip(local: Local, x: Tensor, dims: Sequence[int]) -> Tensor:
    """A piece is the piece at the other end, turned round: where all are alike, that is one exchange."""
    for at in {axis(d, x.dim()) for d in dims if x.dim()}:
        for f in cut(local, local.rule.operands[0][at]):
            sizes, size = shares(f), local.rule.sizes[f]
            if len({*sizes}) == 1:
                x = ppermute(x, f, [(i, len(sizes) - 1 - i) for i in range(len(sizes))])
            else:
                start, stop = extent((f,), size)
                (x,) = fetch(x, at, (f,), [(size - stop, size - start)], name="input")
    return torch.flip(x, tuple(dims))


flip = pattern("[dims] -> [dims] | dims:local {0}", form=_flip, flops=0)


def send_rows(call: Call) -> Rule:
    """`send_rows(x, sources, rows)`: devices with a row each send it; those that hold several have to see them all."""
    space, (n, *_) = Space(), call.operands[0].shape
    x, pairs = space.dims(call.operands[0].shape, "n"), list(zip(*call.args[1:], strict=True))

    def form(_: Local, value: Tensor, *args: Any) -> Tensor:
        (factor,) = x[0]
        if shares(factor) == [1] * n:
            out: Tensor = ppermute(value, factor, pairs)
            return out
        offset, size, whole = piece(factor)
        found: Tensor = call.target(gathered(value, factor, 0, whole), *args)
        return found.narrow(0, offset, size)

    sent = {*x[0]} if pairs else ()  # with nothing to send there are zeros everywhere
    return space.rule([x], [x], linear=[{0}], local=torch_code(form), local_factors=sent)
