"""torch.func's transforms under the names that JAX users know; all compose with `jit`, inside and around.

Inside a trace without other transforms, torch's autograd computes the gradients. So everything that plain torch
differentiates works, including activation checkpointing and old-style autograd Functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from shardlib.core.context import is_tracing
from shardlib.core.torch_internals.autograd_graph import history_nodes
from shardlib.core.torch_internals.forward_mode import is_forward_mode
from shardlib.core.torch_internals.torch_private import FakeTensor, pytree, transform_level

__all__ = ["grad", "value_and_grad", "vmap"]

Argnums = int | tuple[int, ...]


def grad(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """As `torch.func.grad`: a function that returns the gradients of `fn`, which returns a scalar.

    Gradients have the structure of the arguments at `argnums`. With `has_aux`, `fn` returns `(value, aux)` and the
    result is `(gradients, aux)`.

    Example:
        >>> grad(lambda x: (x * x).sum())(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """

    @functools.wraps(fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        gradients, value = _gradient(fn, argnums, has_aux, args, kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def value_and_grad(fn: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """`torch.func.grad_and_value` with its results in JAX's order: `(value, gradients)`.

    With `has_aux`, `fn` returns `(value, aux)` and the result is `((value, aux), gradients)`.

    Example:
        >>> value_and_grad(lambda x: (x * x).sum())(torch.tensor([1.0, 2.0]))
        (tensor(5.), tensor([2., 4.]))
    """

    @functools.wraps(fn)
    def both(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        gradients, value = _gradient(fn, argnums, has_aux, args, kwargs)
        return value, gradients

    return both


def _gradient(
    fn: Callable[..., Any], argnums: Argnums, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Returns `(gradients, result of fn)`."""
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not _uses_autograd(args, kwargs) or not all(-len(args) <= i < len(args) for i in positions):
        gradients, value = grad_and_value(fn, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
        return gradients, value
    leaves, tree = pytree.tree_flatten([args[i] for i in positions])
    keeps_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        with torch.DisableTorchFunction() if all(type(x) is FakeTensor for x in leaves) else nullcontext():
            roots = [_as_root(x) for x in leaves]  # modes slow this down
        filled = list(args)
        for i, x in zip(positions, pytree.tree_unflatten(roots, tree), strict=True):
            filled[i] = x
        out = fn(*filled, **kwargs)
        loss = out[0] if has_aux else out
        if not isinstance(loss, Tensor) or loss.dim():
            kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise RuntimeError(f"grad takes a function that returns a scalar tensor; {name_of(fn)} returns {kind}")
        grads: list[Tensor | None] = [None] * len(roots)
        with torch.DisableTorchFunction():  # modes slow this down
            requires_grad = loss.requires_grad
            keeps_graph = keeps_graph and any(
                _has_other_history(x, roots) for x in pytree.tree_leaves(out) if isinstance(x, Tensor)
            )
        if requires_grad:
            grads = list(torch.autograd.grad(loss, roots, allow_unused=True, create_graph=keeps_graph))
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(roots, grads, strict=True)]
    rebuilt = pytree.tree_unflatten(gradients, tree)
    value = out if keeps_graph else pytree.tree_map_only(Tensor, lambda x: x.detach(), out)
    return (rebuilt[0] if isinstance(argnums, int) else tuple(rebuilt)), value


def _has_other_history(x: Tensor, roots: list[Tensor]) -> bool:
    """Returns whether the history of `x` leads to other tensors than the roots, such as those that `fn` closes over."""
    root_ids = {id(root) for root in roots}
    if x.requires_grad and x.is_leaf:
        return id(x) not in root_ids
    return any(id(getattr(node, "variable", roots[0])) not in root_ids for node in history_nodes([x]))


def _uses_autograd(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether autograd alone can differentiate: in a trace without transforms, tangents or history."""
    if not is_tracing() or torch.is_inference_mode_enabled() or transform_level() is not None or is_forward_mode():
        return False
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def _as_root(x: Any) -> Tensor:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise RuntimeError(f"grad takes gradients of floating-point tensors; among its arguments is {kind}")
    return x.detach().requires_grad_()


def name_of(fn: Callable[..., Any]) -> str:
    """Returns the name of a function, or of its class."""
    return getattr(fn, "__name__", type(fn).__name__)
