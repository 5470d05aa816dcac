"""Other threads that a traced function starts, or gives work to: nobody would see what they do to its tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import pytree
from shardlib.frontend.lifted_inputs import Lifted
from shardlib.tensor.sharded_tensor import typeof

_of: ContextVar[Lifted | None] = ContextVar("shardlib_thread_of", default=None)  # the trace that gave this work


def elsewhere(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which another thread is to run: while a function is traced here, it is refused the function's tensors."""
    lifted = Lifted.current()
    if lifted is None:
        return fn

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _of.set(lifted)
        try:
            with _Elsewhere(lifted):
                return fn(*args, **kwargs)
        finally:
            _of.reset(token)

    return run


class _Elsewhere(TorchFunctionMode):
    def __init__(self, lifted: Lifted) -> None:
        super().__init__()
        self.lifted = lifted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.lifted.is_over:
            tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            if found := [x for x in tensors if self.lifted.is_own(x)]:
                with torch.DisableTorchFunction():
                    _refuse(self.lifted, [f"it reads {typeof(x)}" for x in found])
        return func(*args, **(kwargs or {}))


def refuse_nested() -> None:
    """Refuse to compile in a thread for which a function that is being traced may wait."""
    lifted = _of.get()
    if lifted is not None and not lifted.is_over:
        _refuse(lifted, ["it calls a jitted function, or an op on ShardedTensors, for the first time"])


def _refuse(lifted: Lifted, found: list[str]) -> None:
    lifted.refusal = ShardingError(
        "a function that is traced has another thread work on tensors",
        found,
        rule="a traced function is the code of one thread: its ops are seen in the order in which it runs them",
        remedy="call the work itself: inside jit, what is independent runs at the same time anyway",
    )
    raise lifted.refusal
