"""Tracks the modes of torch that count collectives, and hides messages between ranks from them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shardlib.core.torch_internals.torch_private import dispatch_modes, pop_dispatch_mode, push_dispatch_mode

active_modes: tuple[Any, ...] = ()  # modes entered in any thread; a tuple, so that readers see a consistent value
_lock = threading.Lock()
# Modes that torch disabled while they handle a call.
handling: ContextVar[tuple[Any, ...]] = ContextVar("shardlib_counting", default=())


def add_counter(mode: Any) -> None:
    """Registers a mode when it is entered."""
    global active_modes
    with _lock:
        active_modes = (*active_modes, mode)


def remove_counter(mode: Any) -> None:
    """Removes the last registration of a mode."""
    global active_modes
    with _lock:
        last = max((i for i, other in enumerate(active_modes) if other is mode), default=len(active_modes))
        active_modes = active_modes[:last] + active_modes[last + 1 :]


def counters_here() -> list[Any]:
    """Returns the modes that count in this thread, each once."""
    return list({id(m): m for m in (*handling.get(), *dispatch_modes()) if _counts(m)}.values())


@contextmanager
def without_counting() -> Iterator[None]:
    """Hides ops inside the context from counting modes."""
    if not active_modes:
        yield
        return
    stack = dispatch_modes()
    rest = [mode for mode in stack if not _counts(mode)]
    _exchange(stack, rest)
    try:
        yield
    finally:
        _exchange(rest, stack)


def _exchange(old: Sequence[Any], new: Sequence[Any]) -> None:
    for _ in old:
        pop_dispatch_mode()
    for mode in new:
        push_dispatch_mode(mode)


def _counts(mode: Any) -> bool:
    return any(mode is other for other in active_modes)
