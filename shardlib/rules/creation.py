"""Values made from nothing but a shape: every device makes its own part."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.rules.pointwise import pointwise
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.space import Space, path, result_shape, shape_ints

aten = torch.ops.aten


def _sized(call: Call) -> Rule:
    """`full(size, ...)`, `new_zeros(x, size, ...)`: x gives a dtype and a device, not its values."""
    space = Space()
    out = space.dims(result_shape(call))
    like = [space.dims(m.shape, "x") for m in call.operands]
    unread = {f: "none" for labels in like for d in labels for f in d}
    return space.rule(like, [out], reduce=unread, ints=shape_ints(path(call, len(like), "size"), out))


def _strided(call: Call) -> Rule:
    """`empty_strided(size, stride)`: strides of a part are the part's own."""
    space = Space()
    out = space.dims(result_shape(call))
    like = [space.dims(m.shape, "x") for m in call.operands]
    unread = {f: "none" for labels in like for d in labels for f in d}

    def local(local: Local) -> Any:
        target = aten.new_empty.default if like else aten.empty.memory_format
        return local.op(target, *local.args[: len(like) + 1], **local.kwargs)

    ints = shape_ints(path(call, len(like), "size"), out)
    factors = [f for d in out for f in d]
    return space.rule(like, [out], reduce=unread, ints=ints, local=local, local_factors=factors)


def _arange(call: Call) -> Rule:
    """A part of a range of integers is a range; among floats rounding would differ, so these stay whole."""
    args = list(call.args)
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    exact = all(isinstance(n, int) for n in (start, end, step))
    space = Space()
    out = space.dims(result_shape(call), "i", whole=() if exact else [0])

    def local(local: Local) -> Any:
        first = local.offset("i") * step + start
        last = (local.offset("i") + local.size("i")) * step + start
        return local.op(aten.arange.start_step, first, last, step, **local.kwargs)

    return space.rule([], [out], local=local, local_factors=out[0])


_SIZED = ["zeros", "ones", "full", "empty.memory_format", "new_zeros", "new_ones", "new_full", "new_empty"]
_LIKE = ["zeros_like", "ones_like", "full_like", "empty_like"]

ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(_SIZED, _sized),
    **dict.fromkeys(["empty_strided", "new_empty_strided"], _strided),
    **dict.fromkeys(_LIKE, pointwise()),
    **dict.fromkeys(["arange", "arange.start", "arange.start_step"], _arange),
    "scalar_tensor": "->",
}
