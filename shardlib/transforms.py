"""torch.func's transforms under the names that JAX users know; all compose with `jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.func import grad, grad_and_value, vmap

__all__ = ["grad", "value_and_grad", "vmap"]


def value_and_grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`torch.func.grad_and_value` with its results in JAX's order: `(value, gradients)`.

    With `has_aux`, `fn` returns `(value, aux)` and the result is `((value, aux), gradients)`.

    Example:
        >>> import torch
        >>> value_and_grad(lambda x: (x * x).sum())(torch.tensor([1.0, 2.0]))
        (tensor(5.), tensor([2., 4.]))
    """
    inner = grad_and_value(fn, argnums=argnums, has_aux=has_aux)

    def both(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        gradients, value = inner(*args, **kwargs)
        return value, gradients

    return both
