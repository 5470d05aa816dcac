"""Tracers of torch that record a call: torch.fx (`make_fx`, `symbolic_trace`), `torch.jit.trace`, `torch.export`.

They do not see the ops of a program, so its result would be a constant of their graph, and other inputs would return
the result of the first ones. Such calls are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import (
    FX_IS_TRACING,
    FakeTensor,
    FakeTensorMode,
    dispatch_modes,
    innermost,
    is_jit_tracing,
)

PLAIN = (
    "give it the plain function or module instead, not jitted, parallelized or placed; a plain module takes the values "
    "of a parallelized one by plain.load_state_dict(get_model_state_dict(module, "
    "options=StateDictOptions(full_state_dict=True)))"
)


def may_be_recorded() -> bool:
    """True if a tracer of torch runs in some thread; cheap enough for every call."""
    return bool(FX_IS_TRACING.value) or is_jit_tracing()


def refuse_recorders(call: str, leaves: Iterable[Any] = ()) -> None:
    """Raises `ShardingError` if a tracer of torch records the call, or if one of its leaves has no values."""
    if recorder := _find_recorder(leaves):
        raise recorded_error(call, recorder)


def refuse_recorded(call: str, x: torch.Tensor) -> None:
    """Raises `ShardingError` if `x`, which the call reads, is a value of a graph that torch.fx records."""
    mode = get_proxy_mode() if FX_IS_TRACING.value else None
    if mode is not None and has_proxy_slot(x, mode.tracer):
        raise recorded_error(call, _FX)


def recorded_error(call: str, recorder: str) -> ShardingError:
    """Returns the error for a call that this tracer records."""
    return ShardingError(
        f"{call} is recorded by {recorder}",
        rule="a call of shardlib runs a program of its own, whose ops no other tracer sees: its result would "
        "be a constant of the recorded graph",
        remedy=PLAIN,
    )


_FX = "torch.fx (make_fx; torch.func.linearize records, too)"


def _find_recorder(leaves: Iterable[Any]) -> str:
    if is_jit_tracing():
        return "torch.jit.trace"
    if FX_IS_TRACING.value and get_proxy_mode() is not None:  # the flag is global, the mode belongs to this thread
        return _FX
    leaves = tuple(leaves)
    if any(isinstance(x, fx.Proxy) for x in leaves):
        return "torch.fx.symbolic_trace"
    fakes = any(isinstance(innermost(x), FakeTensor) for x in leaves if type(x) is not torch.Tensor)
    if fakes or any(isinstance(mode, FakeTensorMode) for mode in dispatch_modes()):
        return "a FakeTensorMode (torch.export has one), whose tensors have no values"
    return ""
