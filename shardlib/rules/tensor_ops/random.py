"""Random numbers: each element is drawn from its index in the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardlib.primitives.random import aten_draws
from shardlib.rules.iteration_space import Space, result_shape, size_arguments
from shardlib.rules.rule import Call, LocalBuilder, Meta, Rule, RuleFn

aten = torch.ops.aten

_SIZE, _FIRST, _WHOLE = 4, 5, 6  # positions of arguments of `draw`


def _draw(call: Call) -> Rule:
    """Any factor may be sharded: the local form passes the offset of the shard. `like` gives no values."""
    space = Space()
    out = space.dims(result_shape(call))
    operands: list[Any] = [[], *([out] if isinstance(call.args[1], Meta) else [])]
    factors = [f for d in out for f in d]
    return space.rule(
        operands,
        [out],
        ints=size_arguments(call, "size", out),
        emit=_draw_shard,
        local_factors=factors,
        loose=factors,
        flops=math.prod(result_shape(call)),
    )


def _draw_shard(local: LocalBuilder) -> Any:
    """Draws each sharded factor of a dim as a dim of its own, which leaves the index in the whole the same."""
    dims = [_extents(local, d) for d in range(len(local.rule.results[0]))]
    size, first, whole = ([extent[i] for extents in dims for extent in extents] for i in range(3))
    key, _, *rest = local.args
    drawn = local.op(local.call.target, key, None, *rest[: _SIZE - 2], size, first, whole, **local.kwargs)
    if len(size) == len(dims):
        return drawn
    return local.op(aten.reshape.default, drawn, list(local.args[_SIZE]))


def _extents(local: LocalBuilder, d: int) -> list[tuple[Any, Any, int]]:
    """Returns the local size, offset and global size of each sub-factor of one dim."""
    labels, (size, begin, whole) = local.rule.results[0][d], (local.call.args[i][d] for i in (_SIZE, _FIRST, _WHOLE))
    if not labels:
        return [(size, begin, whole)]
    extents = local.extents(labels[0])
    if len(extents) > 1:
        assert (begin, size) == (0, whole), "a program draws whole tensors"
        return extents
    ((own_size, offset, _),) = extents
    return [(own_size, begin + offset, whole)]


def _key(call: Call) -> Rule:
    """All devices have the same key."""
    space = Space()
    return space.rule([[]] * len(call.operands), [space.dims(result_shape(call), whole=[0])])


ROWS: dict[str, RuleFn | str] = {
    "shardlib::draw": _draw,
    "shardlib::call_key": _key,
    "shardlib::numbered_key": _key,
}

DECOMPOSED: dict[str, Callable[..., Any]] = dict(aten_draws.FORMS)
