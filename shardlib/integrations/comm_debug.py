"""`CommDebugMode`, which counts collectives as torch dispatches them: programs report theirs to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlib.core.context import is_tracing
from shardlib.core.torch_internals.private_names import Slot
from shardlib.core.torch_internals.torch_private import TRACKER_HOOKS
from shardlib.distributed import comm_counting
from shardlib.integrations.on_import import replaces, when_imported

_MODE = "torch.distributed.tensor.debug.CommDebugMode"


def _skip_in_traces(slot: Slot) -> None:
    """Patches a hook on modules that tracks the current call, and leaves hooks on tensors: a trace is no call."""

    @replaces(slot)
    def hook(original: Callable[..., None], *args: Any) -> None:
        if not is_tracing():
            original(*args)


@when_imported("torch.distributed.tensor.debug")
def _patch(_: Any) -> None:
    @replaces(f"{_MODE}.__enter__")
    def enter(original: Callable[..., Any], self: Any) -> Any:
        out = original(self)
        comm_counting.add_counter(self)
        return out

    @replaces(f"{_MODE}.__exit__")
    def leave(original: Callable[..., Any], self: Any, *raised: Any) -> Any:
        comm_counting.remove_counter(self)
        return original(self, *raised)

    @replaces(f"{_MODE}.__torch_dispatch__")
    def dispatch(original: Callable[..., Any], self: Any, *call: Any) -> Any:
        token = comm_counting.handling.set((*comm_counting.handling.get(), self))
        try:
            return original(self, *call)
        finally:
            comm_counting.handling.reset(token)

    for slot in TRACKER_HOOKS:
        _skip_in_traces(slot)
