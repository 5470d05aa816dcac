"""Tries calls that fake tensors refuse on small real tensors: the kernels may support them."""

from __future__ import annotations

import types
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.core.torch_internals.torch_private import OpOverload, pytree, without_modes

_WRITTEN_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, OpOverload)
_WRITTEN_IN_PYTHON = ("torch.functional", "torch.nn.functional")
_SMALL = 1 << 20  # elements


@dataclass(frozen=True)
class RealOutcome:
    """The outcome of a call on real tensors of ones: it `runs`, or raises `error`; neither if it was not tried."""

    runs: bool = False
    error: Exception | None = None


def try_on_real_tensors(func: Any, args: Any, kwargs: Any) -> RealOutcome:
    """Calls an op or a function of torch on small real tensors of the operands' shapes and dtypes."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    is_torchs = isinstance(func, _WRITTEN_IN_C) or getattr(func, "__module__", "") in _WRITTEN_IN_PYTHON
    if not is_torchs or sum(x.numel() for x in tensors) > _SMALL:
        return RealOutcome()
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
        except (RuntimeError, TypeError, LookupError, ValueError, ArithmeticError) as error:
            return RealOutcome(error=error)
    return RealOutcome(runs=True)
