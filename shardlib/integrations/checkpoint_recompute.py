"""`torch.utils.checkpoint`: what it runs again finds what it found the first time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardlib.core.mode_restore import with_contexts, wrap_checkpoint_contexts
from shardlib.core.torch_private import CHECKPOINT, REENTRANT_CHECKPOINT


def _checkpoint(_: Any) -> None:
    from torch.utils.checkpoint import noop_context_fn

    begin, forward = CHECKPOINT.value, REENTRANT_CHECKPOINT.value

    @functools.wraps(begin)
    def begun(fn: Callable[..., Any], keep: bool, contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if contexts is noop_context_fn:
            return begin(with_contexts(fn), keep, contexts, *args, **kwargs)
        return begin(fn, keep, wrap_checkpoint_contexts(contexts), *args, **kwargs)

    @functools.wraps(forward)
    def ran(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, with_contexts(run_function), *args)

    CHECKPOINT.value, REENTRANT_CHECKPOINT.value = begun, staticmethod(ran)


TAUGHT: dict[str, Callable[[Any], None]] = {"torch.utils.checkpoint": _checkpoint}
