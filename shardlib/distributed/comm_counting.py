"""Modes of torch that count collectives, and what they do not count: what ranks say to each other beside the plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shardlib.core.torch_private import dispatch_modes, pop_dispatch_mode, push_dispatch_mode

entered: tuple[Any, ...] = ()  # modes that somebody has entered, in any thread; frozen, so that readers see it whole
_lock = threading.Lock()
handling: ContextVar[tuple[Any, ...]] = ContextVar("shardlib_counting", default=())  # those that torch took off


def enter(mode: Any) -> None:
    """A mode counts from now on."""
    global entered
    with _lock:
        entered = (*entered, mode)


def leave(mode: Any) -> None:
    """It counts no longer, but where it was entered before."""
    global entered
    with _lock:
        last = max((i for i, other in enumerate(entered) if other is mode), default=len(entered))
        entered = entered[:last] + entered[last + 1 :]


def counting() -> list[Any]:
    """The modes that count here, each once."""
    return list({id(m): m for m in (*handling.get(), *dispatch_modes()) if _counts(m)}.values())


@contextmanager
def uncounted() -> Iterator[None]:
    """What torch dispatches inside is not counted."""
    if not entered:
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
    return any(mode is other for other in entered)
