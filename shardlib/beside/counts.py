"""`CommDebugMode`, which counts collectives as torch dispatches them: programs tell it theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardlib.run.counts import entered, handling


def _comm_mode(module: Any) -> None:
    cls = module.CommDebugMode
    enter, leave, dispatch = cls.__enter__, cls.__exit__, cls.__torch_dispatch__

    @functools.wraps(enter)
    def entering(self: Any) -> Any:
        out = enter(self)
        entered.append(self)
        return out

    @functools.wraps(leave)
    def leaving(self: Any, *raised: Any) -> Any:
        entered[:] = [mode for mode in entered if mode is not self]
        return leave(self, *raised)

    @functools.wraps(dispatch)
    def dispatching(self: Any, *call: Any) -> Any:
        token = handling.set((*handling.get(), self))
        try:
            return dispatch(self, *call)
        finally:
            handling.reset(token)

    cls.__enter__, cls.__exit__, cls.__torch_dispatch__ = entering, leaving, dispatching


TAUGHT: dict[str, Callable[[Any], None]] = {"torch.distributed.tensor.debug._comm_mode": _comm_mode}
