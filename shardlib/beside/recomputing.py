"""`torch.utils.checkpoint`: what it runs again finds what it found the first time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardlib.internals import CHECKPOINT, REENTRANT_CHECKPOINT
from shardlib.staying import with_contexts


def _checkpoint(_: Any) -> None:
    begin, forward = CHECKPOINT.value, REENTRANT_CHECKPOINT.value

    @functools.wraps(begin)
    def begun(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return begin(with_contexts(fn), *args, **kwargs)

    @functools.wraps(forward)
    def ran(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, with_contexts(run_function), *args)

    CHECKPOINT.value, REENTRANT_CHECKPOINT.value = begun, staticmethod(ran)


TAUGHT: dict[str, Callable[[Any], None]] = {"torch.utils.checkpoint": _checkpoint}
