"""Gradients that nobody differentiates again, taken as plain autograd takes them.

`torch.func.grad` records its own backward pass, in case someone differentiates that too. Recording is slow, and makes
torch prefer differentiable formulas to fused ones: silu's backward becomes seven ops instead of one. While a function
is traced, the pass is recorded only where a transform outside, or plain autograd, can see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardlib.core.torch_private import FUNC_GRAD, is_forward_mode, is_wrapped, unwrapped


@contextmanager
def first_order() -> Iterator[None]:
    """While on, torch.func's gradients record their backward pass only if it can be differentiated from outside."""
    original = FUNC_GRAD.value

    def autograd_grad(outputs: Sequence[Any], *args: Any, create_graph: bool = True, **kwargs: Any) -> Any:
        again = any(map(_tracked_outside, outputs)) or is_forward_mode()
        return original(outputs, *args, create_graph=create_graph and again, **kwargs)

    with FUNC_GRAD.holding(autograd_grad):
        yield


def _tracked_outside(x: torch.Tensor) -> bool:
    """Whether another gradient than the innermost one follows x."""
    while is_wrapped(x):
        x = unwrapped(x)
        if x.requires_grad:
            return True
    return False
