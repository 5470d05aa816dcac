"""Where torch's fake tensors refuse what its kernels take."""

from __future__ import annotations

import types
from contextlib import ExitStack
from typing import Any

import torch

from shardlib.core.torch_private import OpOverload, pytree, without_modes

_WRITTEN_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, OpOverload)
_SMALL = 1 << 20  # elements


def kernels_take(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call that fake tensors refuse runs on real ones, of ones; False where that is not to be tried."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if not isinstance(func, _WRITTEN_IN_C) or sum(x.numel() for x in tensors) > _SMALL:
        return False
    with ExitStack() as stack:
        for mode in (
            torch.DisableTorchFunction(),
            without_modes(),
            torch.no_grad(),
            torch.random.fork_rng(),
        ):
            stack.enter_context(mode)
        real = [torch.ones(x.shape, dtype=x.dtype, device="cpu") if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(real, tree)
        try:
            func(*args, **kwargs)
        except (RuntimeError, TypeError, LookupError, ValueError, ArithmeticError):
            return False
    return True
