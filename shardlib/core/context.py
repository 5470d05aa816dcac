"""What the code that runs now is part of: a trace, or a run on one device."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from shardlib.core.torch_private import set_frame_evaluation

Args = ParamSpec("Args")
Result = TypeVar("Result")

_MANY = 100_000  # objects: a collection of so many takes longer than a small program

tracing_flag: ContextVar[bool] = ContextVar("shardlib_tracing", default=False)


class _Count:
    """How often something happened."""

    def __init__(self) -> None:
        self.value = 0

    def again(self) -> None:
        self.value += 1


rules_said = _Count()  # by users: what was made before knows other rules
meshes_asked = _Count()  # for the current mesh: who asks may do something else on another one
_single: ContextVar[bool] = ContextVar("shardlib_single", default=False)


def is_tracing() -> bool:
    """Whether a user's function is being traced: annotations become nodes of its graph."""
    return tracing_flag.get()


def is_single_device() -> bool:
    """Whether a function runs as the plain program it is: annotations do nothing."""
    return _single.get()


@contextmanager
def tracing() -> Iterator[None]:
    token = tracing_flag.set(True)
    try:
        yield
    finally:
        tracing_flag.reset(token)


@contextmanager
def single_device() -> Iterator[None]:
    token = _single.set(True)
    try:
        yield
    finally:
        _single.reset(token)


@contextmanager
def paused_gc() -> Iterator[None]:
    """No garbage collection meanwhile: compiling makes many objects, few cycles, and each pass looks at all.

    Afterwards all of them count as old, as if they had been looked at: the next full collection finds what is garbage.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():  # what a user froze stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class _Compiling:
    """Entered by a thread that traces: what functions hold is meanwhile as the trace has it, so others wait to read it.

    `count` grows with every entry: who read before and after it read two worlds.
    """

    def __init__(self) -> None:
        self.lock, self.thread, self.count = threading.RLock(), 0, 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            outside, self.thread = self.thread, threading.get_ident()
            self.count += 1
            try:
                yield
            finally:
                self.thread = outside

    def wait(self) -> None:
        """Wait until no other thread is in it."""
        with self.lock:
            pass


compiling = _Compiling()


def unseen(fn: Callable[Args, Result]) -> Callable[Args, Result]:
    """`fn`, and all that it calls, as `torch.compile` lets them alone: what compiles is not compiled itself."""

    @functools.wraps(fn)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        before = set_frame_evaluation(None)
        try:
            return fn(*args, **kwargs)
        finally:
            set_frame_evaluation(before)

    return call
