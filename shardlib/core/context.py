"""Context of the running code: inside a trace, or in a run on one device."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from shardlib.core.torch_internals.torch_private import set_frame_evaluation

Args = ParamSpec("Args")
Result = TypeVar("Result")

_MANY = 100_000  # objects; to collect more takes longer than a small program

tracing_flag: ContextVar[bool] = ContextVar("shardlib_tracing", default=False)


class _Counter:
    """Counts events."""

    def __init__(self) -> None:
        self.value = 0

    def again(self) -> None:
        self.value += 1


rule_registrations = _Counter()  # by users; programs compiled before one have other rules
mesh_queries = _Counter()  # of the current mesh; a function that queries it may depend on it
_single: ContextVar[bool] = ContextVar("shardlib_single", default=False)


def is_tracing() -> bool:
    """Returns whether a user's function is being traced: annotations become nodes of its graph."""
    return tracing_flag.get()


def is_single_device() -> bool:
    """Returns whether a function runs on a single device, where annotations do nothing."""
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
    """Pauses garbage collection: compiling makes many objects but few cycles, and each collection visits all objects.

    Afterwards all objects are in the oldest generation; the next full collection finds the garbage.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            # Else it would unfreeze the objects that a user froze.
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class _Compiling:
    """A lock that a tracing thread holds: a trace changes the objects that functions hold, so other threads wait.

    `count` grows with every entry, so that a reader can tell whether a trace came between two reads.
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
        """Waits until no other thread traces."""
        with self.lock:
            pass


compiling = _Compiling()


def skip_dynamo(fn: Callable[Args, Result]) -> Callable[Args, Result]:
    """Hides `fn`, and all that it calls, from `torch.compile`."""

    @functools.wraps(fn)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        before = set_frame_evaluation(None)
        try:
            return fn(*args, **kwargs)
        finally:
            set_frame_evaluation(before)

    return call
