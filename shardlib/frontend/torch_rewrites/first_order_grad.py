"""Takes gradients without recording their backward pass, unless code can differentiate them again.

`torch.func.grad` records its own backward pass, in case someone differentiates that too. Recording is slow, and makes
torch prefer differentiable formulas to fused ones: silu's backward becomes seven ops instead of one. While a function
is traced, the pass is recorded only where a transform outside, or plain autograd, can see it: through the
outputs, or through the cotangents that `torch.func.vjp` is called with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardlib.core.torch_internals.forward_mode import is_forward_mode
from shardlib.core.torch_internals.torch_private import FUNC_GRAD, is_wrapped, unwrapped


@contextmanager
def record_only_if_visible() -> Iterator[None]:
    """Makes torch.func's gradients record their backward pass only if it can be differentiated from outside."""
    original = FUNC_GRAD.value

    def autograd_grad(
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        grad_outputs: Sequence[Any] | None = None,
        *args: Any,
        create_graph: bool = True,
        **kwargs: Any,
    ) -> Any:
        records = create_graph and (
            any(_is_tracked(x) for x in grad_outputs or ())
            or any(is_wrapped(x) and _is_tracked(unwrapped(x)) for x in outputs)
            or is_forward_mode()
        )
        return original(outputs, inputs, grad_outputs, *args, create_graph=records, **kwargs)

    with FUNC_GRAD.holding(autograd_grad):
        yield


def _is_tracked(x: torch.Tensor) -> bool:
    """Returns whether a gradient of a surrounding transform, or of plain autograd, follows a tensor."""
    while not x.requires_grad and is_wrapped(x):
        x = unwrapped(x)
    return x.requires_grad
