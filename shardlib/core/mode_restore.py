"""Restores function modes, and contexts of a forward pass, inside calls of autograd's engine.

Torch disables a function mode while the mode handles a call, and `loss.backward()` is such a call. So hooks, backward
passes and recomputation of checkpoints would run without the modes of the forward pass, and recomputation could see
other tensors. The same holds for a context in which a module temporarily holds other tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from shardlib.core.torch_internals.torch_private import (
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


class PersistentFunctionMode(TorchFunctionMode):
    """A function mode that is also active in callbacks of autograd's engine."""

    def __enter__(self) -> Any:
        _on.set((*_on.get(), self))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        _on.set(_on.get()[:-1])
        super().__exit__(*raised)  # type: ignore[no-untyped-call]


def reenter_modes(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `run`, which calls the engine, to enter the modes again that torch disabled for the call."""

    def engine(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if modes := _on.get():
                active = function_modes()
                for mode in modes:
                    if not any(mode is other for other in active):
                        stack.enter_context(mode)
            return run(*args, **kwargs)

    return engine


def without_function_modes(run: Callable[Args, Result]) -> Callable[Args, Result]:
    """Wraps `run`, which reads attributes of many tensors, to bypass function modes."""

    @functools.wraps(run)
    def inside(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with torch.DisableTorchFunction():
            return run(*args, **kwargs)

    return inside


def with_function_modes(run: Callable[Args, Result]) -> Callable[Args, Result]:
    """Wraps `run` to use the present function modes and tensor classes, even inside `without_function_modes`."""
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
def repeat_in_checkpoints(enter: Enter) -> Iterator[None]:
    """Enters the context `enter()`, now and in every recomputation of a checkpoint that starts inside."""
    token = _around.set((*_around.get(), enter))
    try:
        with enter():
            yield
    finally:
        _around.reset(token)


def with_contexts(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `run` to enter the repeated contexts of this moment."""
    contexts = _around.get()

    @functools.wraps(run)
    def again(*args: Any, **kwargs: Any) -> Any:
        with _enter_repeated(contexts):
            return run(*args, **kwargs)

    return again


def wrap_checkpoint_contexts(pair: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """Wraps `pair`, which returns contexts for a checkpoint's forward pass and its recomputation.

    The second one enters the repeated contexts of this moment first, which were active before the forward pass too.
    """
    contexts = _around.get()

    @contextmanager
    def inside(own: AbstractContextManager[Any]) -> Iterator[None]:
        with _enter_repeated(contexts), own:
            yield

    @functools.wraps(pair)
    def both() -> tuple[Any, Any]:
        first, second = pair()
        return first, inside(second)

    return both


# The number of the node whose backward recomputes a forward pass.
_runs_again: ContextVar[int | None] = ContextVar("shardlib_runs_again", default=None)


def backward_node_number() -> int | None:
    """Returns the number of the node whose backward runs; None outside a backward pass and in a recomputation."""
    node = running_node()
    number = None if node is None else number_of(node)()
    return None if number == _runs_again.get() else number


@contextmanager
def _enter_repeated(contexts: Sequence[Enter]) -> Iterator[None]:
    node = running_node()
    token = _runs_again.set(None if node is None else number_of(node)())
    try:
        with ExitStack() as stack:
            for enter in contexts:
                if not any(enter is other for other in _around.get()):
                    stack.enter_context(repeat_in_checkpoints(enter))
            yield
    finally:
        _runs_again.reset(token)
