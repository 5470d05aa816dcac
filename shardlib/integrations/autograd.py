"""Autograd's engine and activation checkpoints, which call Python code back, in a function that is being traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.autograd.grad_mode import set_multithreading_enabled

from shardlib.core.context import is_tracing
from shardlib.core.mode_restore import reenter_modes
from shardlib.core.torch_private import CHECKPOINT_COMPILES, ENGINE
from shardlib.sharding.mesh.mesh import current_mesh
from shardlib.tensor.sharded_tensor import ShardedTensor, refuse_intermediate_result


def _engine(_: Any) -> None:
    """What the engine calls runs under the function modes that were on where it was called, and on this thread.

    For tensors on GPUs it has threads of its own, where nobody knows that a function is traced, and on which mesh. It
    is not asked for gradients that a program does not have.
    """
    engine = ENGINE.value
    run = reenter_modes(engine)

    @functools.wraps(engine)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for x in args[4] if len(args) > 4 and not is_tracing() else ():
            if type(x) is ShardedTensor:
                refuse_intermediate_result(x, "the gradient")
        if is_tracing() or current_mesh() is not None:
            with set_multithreading_enabled(False):
                return run(*args, **kwargs)
        return run(*args, **kwargs)

    ENGINE.value = checked


def _checkpoint(_: Any) -> None:
    """Checkpoints keep what their policy says, and run the rest again; for a compiler they would keep all of it."""
    compiling = CHECKPOINT_COMPILES.value

    @functools.wraps(compiling)
    def elsewhere(*args: Any) -> Any:
        return not is_tracing() and compiling(*args)

    CHECKPOINT_COMPILES.value = elsewhere


TAUGHT: dict[str, Callable[[Any], None]] = {"torch.autograd": _engine, "torch.utils.checkpoint": _checkpoint}
