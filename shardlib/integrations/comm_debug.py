"""`CommDebugMode`, which counts collectives as torch dispatches them: programs tell it theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardlib.core.context import is_tracing
from shardlib.core.torch_private import TRACKER_HOOKS
from shardlib.distributed import comm_counting


def _comm_mode(module: Any) -> None:
    cls = module.CommDebugMode
    enter, leave, dispatch = cls.__enter__, cls.__exit__, cls.__torch_dispatch__

    @functools.wraps(enter)
    def entering(self: Any) -> Any:
        out = enter(self)
        comm_counting.add_counter(self)
        return out

    @functools.wraps(leave)
    def leaving(self: Any, *raised: Any) -> Any:
        comm_counting.remove_counter(self)
        return leave(self, *raised)

    @functools.wraps(dispatch)
    def dispatching(self: Any, *call: Any) -> Any:
        token = comm_counting.handling.set((*comm_counting.handling.get(), self))
        try:
            return dispatch(self, *call)
        finally:
            comm_counting.handling.reset(token)

    cls.__enter__, cls.__exit__, cls.__torch_dispatch__ = entering, leaving, dispatching
    for slot in TRACKER_HOOKS:
        slot.value = _of_calls(slot.value)


def _of_calls(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook on modules that follows where a call is, and leaves hooks of its own on tensors: a trace is no call."""

    @functools.wraps(hook)
    def called(*args: Any) -> None:
        if not is_tracing():
            hook(*args)

    return called


TAUGHT: dict[str, Callable[[Any], None]] = {"torch.distributed.tensor.debug": _comm_mode}
