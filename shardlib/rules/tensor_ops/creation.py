"""Values that depend on a shape alone: each device computes its own shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.rules.iteration_space import Space, result_shape, size_arguments
from shardlib.rules.local_forms.helpers import sharded_factors
from shardlib.rules.out_variants import by_torch
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn
from shardlib.rules.tensor_ops.pointwise import pointwise

aten = torch.ops.aten


def _sized(call: Call) -> Rule:
    """`full(size, ...)`, `new_zeros(x, size, ...)`: the op reads no values of x, but its dtype and device.

    A shard has strides of its own, in the order of the whole (`empty_permuted`).
    """
    space = Space()
    out = space.dims(result_shape(call))
    like = [space.dims(m.shape, "x") for m in call.operands]
    unread = {f: "none" for labels in like for d in labels for f in d}

    def local(local: LocalBuilder) -> Any:
        target = aten.new_empty.default if like else aten.empty.memory_format
        return local.op(target, *local.args[: len(like) + 1], **local.kwargs)

    strided = "strided" in schema_of(call.target).name
    ints, factors = size_arguments(call, "size", out), [f for d in out for f in d if strided]
    return space.rule(like, [out], reduce=unread, ints=ints, emit=local, local_factors=factors)


def _arange(call: Call) -> Rule:
    """A shard of a range of integers is a range. For floats the rounding would differ."""
    args = list(call.args)
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if not all(isinstance(n, int) for n in (start, end, step)):
        return _computed_whole(call)
    space = Space()
    out = space.dims(result_shape(call), "i")

    def local(local: LocalBuilder) -> Any:
        first = local.offset("i") * step + start
        last = (local.offset("i") + local.size("i")) * step + start
        return local.op(aten.arange.start_step, first, last, step, **local.kwargs)

    return space.rule([], [out], emit=local, local_factors=out[0])


def _computed_whole(call: Call) -> Rule:
    """Each device computes all values and keeps its own, so that they equal those of one device bit by bit."""
    space = Space()
    operands = [space.dims(m.shape, "x", whole=range(len(m.shape))) for m in call.operands]
    out = space.dims(result_shape(call), "i")

    def local(local: LocalBuilder) -> Any:
        value = local.op(local.call.target, *local.args, **local.kwargs)
        for i, factor in enumerate(out):
            for f in sharded_factors(local, factor):
                start = local.offset(f)
                value = local.op(aten.slice.Tensor, value, i, start, start + local.size(f))
        return value

    return space.rule(operands, [out], emit=local, local_factors=[f for d in out for f in d])


def _zeros(size: Sequence[int], **kwargs: Any) -> torch.Tensor:
    """Zeros with memory: torch creates views of its own zero tensors where no trace records them.

    Without dims, torch keeps its own: the tangent of a Python number is one, and torch would read the value of another.
    """
    return torch.zeros(size, **kwargs) if size else NotImplemented


_torch_eye = by_torch("eye.m")["eye.m"]


def _eye(n: int, m: int | None = None, **options: Any) -> torch.Tensor:
    """Torch's own form uses the smallest integer dtype, but CPUs have no kernel for a range of uint16."""
    m = n if m is None else m
    small = 1 if 1 << 8 <= max(n, m) < 1 << 16 else None
    ones: torch.Tensor = _torch_eye(small or n, small or m, **options)
    if small is None:
        return ones
    rows, columns = (torch.arange(size, device=ones.device) for size in (n, m))
    return (rows[:, None] == columns).to(ones.dtype)


_SIZED = ["zeros", "ones", "full", "empty.memory_format", "new_zeros", "new_ones", "new_full", "new_empty"]
_SIZED += ["empty_strided", "new_empty_strided", "empty_permuted"]
_LIKE = ["zeros_like", "ones_like", "full_like", "empty_like"]
_MIXED = (".Tensor_Tensor", ".Tensor_Scalar", ".Scalar_Tensor")
_WINDOWS = {
    "bartlett": [],
    "blackman": [],
    "hann": [],
    "hamming": [".periodic_alpha", ".periodic_alpha_beta"],
    "kaiser": [".beta"],
}
_EXACT = [
    *(f"{space}{overload}" for space in ("linspace", "logspace") for overload in ("", *_MIXED)),
    *("range", "range.step", "tril_indices", "triu_indices", "fft_fftfreq", "fft_rfftfreq"),
    *(f"{kind}_window{overload}" for kind, more in _WINDOWS.items() for overload in ("", ".periodic", *more)),
]

ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(_SIZED, _sized),
    **dict.fromkeys(_LIKE, pointwise()),
    **dict.fromkeys(["arange", "arange.start", "arange.start_step"], _arange),
    **dict.fromkeys(_EXACT, _computed_whole),
    "scalar_tensor": "->",
}

DECOMPOSED: dict[str, Any] = {"_efficientzerotensor": _zeros, "eye": _eye, "eye.m": _eye}
