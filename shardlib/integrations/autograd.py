"""Autograd's engine and activation checkpoints, which call Python code back while a function is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.autograd.grad_mode import set_multithreading_enabled

from shardlib.core.context import is_tracing
from shardlib.core.mode_restore import reenter_modes, with_contexts, wrap_checkpoint_contexts
from shardlib.core.torch_internals.torch_private import CHECKPOINT, CHECKPOINT_COMPILES, ENGINE, REENTRANT_CHECKPOINT
from shardlib.integrations.on_import import replaces, when_imported
from shardlib.sharding.mesh.mesh import current_mesh
from shardlib.tensor.sharded_tensor import ShardedTensor, refuse_intermediate_result


@when_imported("torch.autograd")
def _patch_engine(_: Any) -> None:
    """Runs the engine's callbacks under the caller's function modes, and on its thread.

    For tensors on GPUs the engine has threads of its own, which know neither the trace nor the mesh. It also refuses
    gradients that a program does not return.
    """

    @replaces(ENGINE)
    def run_backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = reenter_modes(original)
        for x in args[4] if len(args) > 4 and not is_tracing() else ():
            if type(x) is ShardedTensor:
                refuse_intermediate_result(x, "the gradient")
        if is_tracing() or current_mesh() is not None:
            with set_multithreading_enabled(False):
                return run(*args, **kwargs)
        return run(*args, **kwargs)


@when_imported("torch.utils.checkpoint")
def _patch_checkpoint(_: Any) -> None:
    """Lets checkpoints follow their policy in a trace, and recompute under the modes of the first run.

    For a compiler they would keep all values.
    """
    from torch.utils.checkpoint import noop_context_fn

    @replaces(CHECKPOINT_COMPILES)
    def is_compiling(original: Callable[..., Any], *args: Any) -> Any:
        return not is_tracing() and original(*args)

    @replaces(CHECKPOINT)
    def begin(
        original: Callable[..., Any], fn: Callable[..., Any], keep: bool, contexts: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if contexts is noop_context_fn:
            return original(with_contexts(fn), keep, contexts, *args, **kwargs)
        return original(fn, keep, wrap_checkpoint_contexts(contexts), *args, **kwargs)

    forward = REENTRANT_CHECKPOINT.value

    @functools.wraps(forward)
    def run(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, with_contexts(run_function), *args)

    REENTRANT_CHECKPOINT.value = staticmethod(run)
