"""Runs a jitted function inside transforms of `torch.func`: `sl.grad(sl.jit(f))`.

The transform sees one op, whose gradients, tangents and batches are programs. Tensors of modules that a transform, or
autograd, follows are arguments of these programs. A function with side effects runs op by op, as the transform calls
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.errors import EffectError
from shardlib.core.torch_internals.torch_private import TransformType, innermost, is_wrapped, pytree, transforms
from shardlib.frontend.guards.flatten_call import wrap_static
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.jit.call.function import Function
from shardlib.jit.call.pure_call import PureCall
from shardlib.jit.differentiable_jit import Differentiable


def is_transformed(leaves: Sequence[Any]) -> bool:
    """True if a transform follows one of the leaves."""
    return any(isinstance(x, Tensor) and is_wrapped(x) for x in leaves)


class Transformed:
    """The calls of one jitted function inside transforms; `jit` makes programs of functions that only return."""

    def __init__(self, jit: Callable[..., Any]) -> None:
        self.jit = jit
        self._calls: BoundedCache[Any, Differentiable | None] = BoundedCache(16)

    def __call__(
        self, function: Function, state: StateWalk, modes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the result of a call; `state` are the objects that it finds beside its arguments."""
        if any(level.key() == TransformType.Functionalize for level in transforms() or ()):
            return function.fn(*args, **kwargs)  # functionalization has no rule for a program
        leaves = pytree.tree_leaves(wrap_static(args, kwargs, function.static))
        own = set(map(id, leaves))
        followed = [x for x in state.tensors if _is_followed(x) and id(x) not in own]
        call = PureCall.read(function, state, followed, modes, args, kwargs)
        key = call.key
        if not all(call.places) or (key in self._calls and self._calls[key] is None):
            return function.fn(*args, **kwargs)
        if key not in self._calls:
            self._calls[key] = Differentiable(call.as_function(function.fn), self.jit)
        differentiable = self._calls[key]
        assert differentiable is not None, "a call that is not transformed has returned"
        with call.with_held([innermost(x).detach() for x in followed]):
            try:
                return differentiable([leaves[i] for i in call.inputs], followed)
            except EffectError:
                self._calls[key] = None
        return function.fn(*args, **kwargs)


def _is_followed(x: Tensor) -> bool:
    return is_wrapped(x) or (x.requires_grad and torch.is_grad_enabled())
