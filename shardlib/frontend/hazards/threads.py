"""Refuses tensors of a trace in other threads, to which the function gives work: the trace would miss their ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.frontend.lifted_inputs import LiftedInputs
from shardlib.tensor.sharded_tensor import typeof

_trace_of_work: ContextVar[LiftedInputs | None] = ContextVar("shardlib_thread_of", default=None)


def guard_thread_work(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps work for another thread: while a function is traced here, the work may not read the trace's tensors."""
    lifted = LiftedInputs.current()
    if lifted is None:
        return fn

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _trace_of_work.set(lifted)
        try:
            with _RefuseOwnTensors(lifted):
                return fn(*args, **kwargs)
        finally:
            _trace_of_work.reset(token)

    return run


class _RefuseOwnTensors(TorchFunctionMode):
    def __init__(self, lifted: LiftedInputs) -> None:
        super().__init__()
        self.lifted = lifted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.lifted.is_over:
            tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            if own := [x for x in tensors if self.lifted.is_own(x)]:
                with torch.DisableTorchFunction():
                    _refuse(self.lifted, [f"it reads {typeof(x)}" for x in own])
        return func(*args, **(kwargs or {}))


def refuse_nested() -> None:
    """Refuses to compile in a thread for which a traced function may wait."""
    lifted = _trace_of_work.get()
    if lifted is not None and not lifted.is_over:
        _refuse(lifted, ["it calls a jitted function, or an op on ShardedTensors, for the first time"])


def _refuse(lifted: LiftedInputs, actions: list[str]) -> None:
    lifted.refusal = ShardingError(
        "a function that is traced has another thread work on tensors",
        actions,
        rule="a traced function is the code of one thread: its ops are seen in the order in which it runs them",
        remedy="call the work itself: inside jit, what is independent runs at the same time anyway",
    )
    raise lifted.refusal
