"""Random numbers: every element is drawn from its place in the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.primitives.random import aten_draws
from shardlib.rules.iteration_space import Space, numel, result_shape, shape_ints
from shardlib.rules.rule import Call, Local, Meta, Rule, RuleFn

aten = torch.ops.aten

_SIZE, _FIRST, _WHOLE = 4, 5, 6  # where arguments of `draw` stand


def _draw(call: Call) -> Rule:
    """Any dim may be cut, in any of its factors: a part is told where it begins. Of `like` no value is read."""
    space = Space()
    out = space.dims(result_shape(call))
    operands: list[Any] = [[], *([out] if isinstance(call.args[1], Meta) else [])]
    factors = [f for d in out for f in d]
    return space.rule(
        operands,
        [out],
        ints=shape_ints((_SIZE,), out),
        local=_part,
        local_factors=factors,
        loose=factors,
        flops=numel(result_shape(call)),
    )


def _part(local: Local) -> Any:
    """A dim is drawn as the factors that are cut, each a dim of its own: the index in the whole is the same."""
    dims = [_pieces(local, d) for d in range(len(local.rule.results[0]))]
    size, first, whole = ([piece[i] for pieces in dims for piece in pieces] for i in range(3))
    key, _, *rest = local.args
    drawn = local.op(local.call.target, key, None, *rest[: _SIZE - 2], size, first, whole, **local.kwargs)
    if len(size) == len(dims):
        return drawn
    return local.op(aten.reshape.default, drawn, list(local.args[_SIZE]))


def _pieces(local: Local, d: int) -> list[tuple[Any, Any, int]]:
    """The pieces of one dim: local size, offset, size in the whole."""
    labels, (size, begin, whole) = local.rule.results[0][d], (local.call.args[i][d] for i in (_SIZE, _FIRST, _WHOLE))
    if not labels:
        return [(size, begin, whole)]
    pieces = local.pieces(labels[0])
    if len(pieces) > 1:
        assert (begin, size) == (0, whole), "a program draws whole tensors"
        return pieces
    ((mine, here, _),) = pieces
    return [(mine, begin + here, whole)]


def _key(call: Call) -> Rule:
    """A key is the same everywhere."""
    space = Space()
    return space.rule([[]] * len(call.operands), [space.dims(result_shape(call), whole=[0])])


ROWS: dict[str, RuleFn | str] = {
    "shardlib::draw": _draw,
    "shardlib::call_key": _key,
    "shardlib::numbered_key": _key,
}

DECOMPOSED: dict[str, Callable[..., Any]] = dict(aten_draws.FORMS)
