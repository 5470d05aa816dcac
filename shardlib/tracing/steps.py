"""Optimizers that count their steps in a tensor: inside a trace they compute with it, outside they read its value."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shardlib.internals import OPTIMIZERS, UPDATES
from shardlib.state import is_tracing


@contextmanager
def counting() -> Iterator[None]:
    """While on, optimizers are `capturable` wherever a function is traced: torch's word for just that."""
    with ExitStack() as stack:
        for module, name, update in _updates():
            stack.callback(setattr, module, name, update)
            setattr(module, name, _capturable(update))
        yield


def _capturable(update: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(update)

    @functools.wraps(update)
    def updated(*args: Any, **kwargs: Any) -> None:
        if not is_tracing():
            update(*args, **kwargs)
            return
        call = signature.bind(*args, **kwargs).arguments
        steps = call["state_steps"]
        exact = [x.double() for x in steps]  # read as Python's numbers, 0.999**n keeps all its digits
        update(**call | {"capturable": True, "state_steps": exact})
        for x, now in zip(steps, exact, strict=True):
            x.copy_(now)

    return updated


@functools.cache
def _updates() -> list[tuple[Any, str, Callable[..., Any]]]:
    """What updates parameters, with the module of torch's that has it."""
    modules = [importlib.import_module(f"torch.optim.{name}") for name in OPTIMIZERS]
    functions = [(m, name, x) for m in modules for name, x in vars(m).items() if name.startswith(UPDATES)]
    return [(m, name, x) for m, name, x in functions if "capturable" in inspect.signature(x).parameters]
