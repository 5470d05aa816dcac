"""torch.func's transforms under the names that JAX users know; all compose with `jit`, inside and around.

While a function is traced, gradients are taken by torch's autograd itself, where no other transform is around: then
everything that plain torch differentiates works, as activation checkpointing and autograd Functions of the old style.
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
from shardlib.core.forward_mode import is_forward_mode
from shardlib.core.torch_private import FakeTensor, pytree, transform_level

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
        found, value = _gradient(fn, argnums, has_aux, args, kwargs)
        return (found, value[1]) if has_aux else found

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
        found, value = _gradient(fn, argnums, has_aux, args, kwargs)
        return value, found

    return both


def _gradient(
    fn: Callable[..., Any], argnums: Argnums, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """`(gradients, what fn returned)`."""
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not _plainly(args, kwargs) or not all(-len(args) <= i < len(args) for i in positions):
        found, value = grad_and_value(fn, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
        return found, value
    wanted = [args[i] for i in positions]
    leaves, tree = pytree.tree_flatten(wanted)
    followed = torch.is_grad_enabled()
    with torch.enable_grad():
        with torch.DisableTorchFunction() if all(type(x) is FakeTensor for x in leaves) else nullcontext():
            roots = [_root(x) for x in leaves]  # no mode need see each
        filled = list(args)
        for i, x in zip(positions, pytree.tree_unflatten(roots, tree), strict=True):
            filled[i] = x
        out = fn(*filled, **kwargs)
        loss = out[0] if has_aux else out
        if not isinstance(loss, Tensor) or loss.dim():
            said = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise RuntimeError(f"grad takes a function that returns a scalar tensor; {name_of(fn)} returns {said}")
        found = [None] * len(roots)
        with torch.DisableTorchFunction():  # no mode need see these questions
            requires_grad = loss.requires_grad
            followed = followed and any(_goes_on(x, roots) for x in pytree.tree_leaves(out) if isinstance(x, Tensor))
        if requires_grad:
            found = list(torch.autograd.grad(loss, roots, allow_unused=True, create_graph=followed))
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(roots, found, strict=True)]
    rebuilt = pytree.tree_unflatten(gradients, tree)
    value = out if followed else pytree.tree_map_only(Tensor, lambda x: x.detach(), out)
    return (rebuilt[0] if isinstance(argnums, int) else tuple(rebuilt)), value


def _goes_on(x: Tensor, roots: list[Tensor]) -> bool:
    """Whether a history leads to anything but the roots: what `fn` closes over may have gradients, too."""
    known, seen, todo = {id(root) for root in roots}, set(), [x.grad_fn]
    if x.requires_grad and x.is_leaf:
        return id(x) not in known
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", roots[0])) not in known:
            return True
        todo += [behind for behind, _ in node.next_functions]
    return False


def _plainly(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether autograd alone differentiates here: no transform, no tangents, no history of the arguments."""
    if not is_tracing() or torch.is_inference_mode_enabled() or transform_level() is not None or is_forward_mode():
        return False
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def _root(x: Any) -> Tensor:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        said = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise RuntimeError(f"grad takes gradients of floating-point tensors; among its arguments is {said}")
    return x.detach().requires_grad_()


def name_of(fn: Callable[..., Any]) -> str:
    """What a function is called, or what it is."""
    return getattr(fn, "__name__", type(fn).__name__)
