"""Runs a jitted function inside transforms of `torch.func`: `sl.grad(sl.jit(f))`.

The transform sees one op, whose gradients, tangents and batches are programs. Tensors of modules that a transform, or
autograd, follows are arguments of these programs. A function with side effects runs op by op, as the transform calls
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.compiler.annotations import leaf_specs
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.errors import EffectError
from shardlib.core.torch_internals.module_tensors import holding, module_tensors
from shardlib.core.torch_internals.torch_private import (
    TransformType,
    innermost,
    is_wrapped,
    pytree,
    transforms,
)
from shardlib.frontend.guards.flatten_call import Static, flatten_call, is_number, wrap_static
from shardlib.frontend.guards.object_state import State
from shardlib.jit.call.double_backward import autocast
from shardlib.jit.call.function import Function
from shardlib.jit.differentiable_jit import Differentiable
from shardlib.jit.shard import shard
from shardlib.sharding.tree_prefix import broadcast_prefix
from shardlib.tensor.sharded_tensor import ShardedTensor

Autocasts = tuple[tuple[str, Any], ...]  # devices, each with its dtype
Place = tuple[dict[str, Any], str]  # a dict of a module's, and a name in it


def is_transformed(leaves: Sequence[Any]) -> bool:
    """True if a transform follows one of the leaves."""
    return any(isinstance(x, Tensor) and is_wrapped(x) for x in leaves)


class Transformed:
    """The calls of one jitted function inside transforms; `jit` makes programs of functions that only return."""

    def __init__(self, jit: Callable[..., Any]) -> None:
        self.jit = jit
        self._calls: BoundedCache[Any, Differentiable | None] = BoundedCache(16)

    def __call__(
        self, function: Function, state: State, autocasts: Autocasts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the result of a call; `state` are the objects that it finds beside its arguments."""
        if any(level.key() == TransformType.Functionalize for level in transforms() or ()):
            return function.fn(*args, **kwargs)  # functionalization has no rule for a program
        leaves, tree = pytree.tree_flatten(wrap_static(args, kwargs, function.static))
        inputs = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) or is_number(x)}
        own = set(map(id, inputs.values()))
        followed = [x for x in state.tensors if _is_followed(x) and id(x) not in own]
        places = [_places(x, state) for x in followed]
        constants = tuple((i, x) for i, x in enumerate(leaves) if i not in inputs)
        specs = _specs(function, args, kwargs)
        held = tuple(tuple((id(inside), name) for inside, name in each) for each in places)
        key = tree, tuple((i, _by_value(x)) for i, x in constants), specs, autocasts, held
        if not all(places) or (key in self._calls and self._calls[key] is None):
            return function.fn(*args, **kwargs)
        if key not in self._calls:
            call = _Call(
                function.name,
                function.fn,
                tree,
                constants,
                tuple(inputs),
                tuple(map(tuple, places)),
                specs,
                function.out_specs,
                autocasts,
            )
            self._calls[key] = Differentiable(call.as_function(), self.jit)
        differentiable = self._calls[key]
        assert differentiable is not None, "a call that is not transformed has returned"
        with _holding(places, [innermost(x).detach() for x in followed]):
            try:
                return differentiable(list(inputs.values()), followed)
            except EffectError:
                self._calls[key] = None
        return function.fn(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Call:
    """A function of the tensors and numbers among its arguments, and of the tensors that modules hold in `places`.

    It is part of the keys of programs, so it holds nothing that calls change.
    """

    name: str
    fn: Callable[..., Any]
    tree: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    inputs: tuple[int, ...]
    places: tuple[tuple[Place, ...], ...]
    specs: tuple[Any, ...]
    out_specs: Any
    autocasts: Autocasts

    def as_function(self) -> Callable[..., Any]:
        def run(inputs: list[Any], held: list[Tensor]) -> Any:
            return self.run(inputs, held)

        run.__name__ = self.name
        run.__wrapped__ = self.fn  # type: ignore[attr-defined]  # the key covers everything that the function leads to
        return run

    def run(self, inputs: Sequence[Any], held: Sequence[Tensor]) -> Any:
        leaves = dict(self.constants) | dict(zip(self.inputs, inputs, strict=True))
        placed = _constrained([leaves[i] for i in range(len(leaves))], self.specs)
        args, kwargs = pytree.tree_unflatten([x.value if isinstance(x, Static) else x for x in placed], self.tree)
        with _holding(self.places, held), autocast(self.autocasts):
            out = self.fn(*args, **kwargs)
        if self.out_specs is None:
            return out
        results, shape = pytree.tree_flatten(out)
        specs = broadcast_prefix(self.out_specs, out, f"{self.name}: out_specs")
        return pytree.tree_unflatten(_constrained(results, specs), shape)


def _constrained(values: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
    return [x if spec is None else shard(x, spec) for x, spec in zip(values, specs, strict=True)]


def _specs(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the spec of each leaf, None if the leaf is placed already."""
    args, kwargs = pytree.tree_map_only(Tensor, _placed_or_as_seen, (args, kwargs))
    call = flatten_call(function.fn, args, kwargs, function.static)
    pairs = zip(call.arguments, leaf_specs(function.fn, call, function.in_specs), strict=True)
    return tuple(None if isinstance(x, ShardedTensor) else spec for x, spec in pairs)


def _placed_or_as_seen(x: Tensor) -> Tensor:
    value = innermost(x)
    return value if isinstance(value, ShardedTensor) else x


def _is_followed(x: Tensor) -> bool:
    return is_wrapped(x) or (x.requires_grad and torch.is_grad_enabled())


def _places(x: Tensor, state: State) -> list[Place]:
    """Returns the places in which modules hold a tensor."""
    return [(held, name) for held, name, y in module_tensors((*state.kept, state.own)) if y is x]


def _holding(places: Sequence[Sequence[Place]], tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Puts each tensor into its places of modules."""
    return holding((*place, x) for each, x in zip(places, tensors, strict=True) for place in each)


def _by_value(x: Any) -> Any:
    try:
        hash(x)
    except TypeError:
        return id(x)
    return type(x), x
