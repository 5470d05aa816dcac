"""What stays on in what autograd's engine calls: function modes, and what a forward pass changes while it runs.

Torch takes a function mode off while it handles a call, and `loss.backward()` is a call like any other: all that the
engine calls from there (hooks, backward passes, what a checkpoint runs again) would run without the modes under which
the forward pass ran, and a checkpoint would find other tensors the second time. So it would where a module holds other
tensors while its forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from shardlib.core.torch_private import (
    function_modes,
    function_modes_on,
    hears_functions,
    hears_nothing,
    number_of,
    running_node,
)

Args = ParamSpec("Args")
Result = TypeVar("Result")

_on: ContextVar[tuple[TorchFunctionMode, ...]] = ContextVar("shardlib_function_modes", default=())


class Staying(TorchFunctionMode):
    """A function mode that is on wherever it was entered, in the engine's callbacks too."""

    def __enter__(self) -> Any:
        _on.set((*_on.get(), self))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        _on.set(_on.get()[:-1])
        super().__exit__(*raised)  # type: ignore[no-untyped-call]


def put_back(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which calls the engine, with the modes on that the call took off."""

    def engine(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if modes := _on.get():
                there = function_modes()
                for mode in modes:
                    if not any(mode is other for other in there):
                        stack.enter_context(mode)
            return run(*args, **kwargs)

    return engine


def unheard(run: Callable[Args, Result]) -> Callable[Args, Result]:
    """`run`, which reads attributes of many tensors: no function mode is asked about them, and called for each."""

    @functools.wraps(run)
    def inside(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with torch.DisableTorchFunction():
            return run(*args, **kwargs)

    return inside


def heard(run: Callable[Args, Result]) -> Callable[Args, Result]:
    """`run`, asking function modes and tensor classes as far as they are asked now, also inside what is `unheard`."""
    off = torch.DisableTorchFunction if hears_nothing() else torch.DisableTorchFunctionSubclass
    limits = nullcontext if hears_functions() else off

    @functools.wraps(run)
    def inside(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with function_modes_on(), limits():
            return run(*args, **kwargs)

    return inside


Enter = Callable[[], AbstractContextManager[Any]]

_around: ContextVar[tuple[Enter, ...]] = ContextVar("shardlib_around", default=())


@contextmanager
def repeated(enter: Enter) -> Iterator[None]:
    """In the context `enter()`, as is what a checkpoint that begins here runs again."""
    token = _around.set((*_around.get(), enter))
    try:
        with enter():
            yield
    finally:
        _around.reset(token)


def with_contexts(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` in the repeated contexts of now, wherever it is called."""
    contexts = _around.get()

    @functools.wraps(run)
    def again(*args: Any, **kwargs: Any) -> Any:
        with _again(contexts):
            return run(*args, **kwargs)

    return again


def around_contexts(pair: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """`pair`, which gives what is entered for a forward pass and for doing it again; before the second the repeated
    contexts of now are entered, as they were before the first: what they do is no part of the pass."""
    contexts = _around.get()

    @contextmanager
    def inside(own: AbstractContextManager[Any]) -> Iterator[None]:
        with _again(contexts), own:
            yield

    @functools.wraps(pair)
    def both() -> tuple[Any, Any]:
        first, second = pair()
        return first, inside(second)

    return both


_runs_again: ContextVar[int | None] = ContextVar("shardlib_runs_again", default=None)  # in which node's backward


def number_of_running_node() -> int | None:
    """The number of the node that autograd's engine goes back through; None where it does not, or where a checkpoint
    runs something of the forward pass again."""
    node = running_node()
    number = None if node is None else number_of(node)()
    return None if number == _runs_again.get() else number


@contextmanager
def _again(contexts: Sequence[Enter]) -> Iterator[None]:
    node = running_node()
    token = _runs_again.set(None if node is None else number_of(node)())
    try:
        with ExitStack() as stack:
            for enter in contexts:
                if not any(enter is other for other in _around.get()):
                    stack.enter_context(repeated(enter))
            yield
    finally:
        _runs_again.reset(token)
