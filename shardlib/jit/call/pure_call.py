"""A call of a jitted function as a pure function of its arguments, and of the tensors that modules hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.compiler.annotations import leaf_specs
from shardlib.core.torch_internals.module_tensors import module_tensors, replacing
from shardlib.core.torch_internals.torch_private import innermost, pytree
from shardlib.frontend.guards.flatten_call import Static, flatten_call, wrap_static
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.guards.torch_modes import autocast_dtypes
from shardlib.jit.call.function import Function
from shardlib.jit.shard import shard
from shardlib.sharding.tree_prefix import broadcast_prefix
from shardlib.tensor.sharded_tensor import ShardedTensor

Autocasts = tuple[tuple[str, Any], ...]  # devices, each with its dtype
Place = tuple[dict[str, Any], str]  # a dict of a module's, and a name in it


@dataclass(frozen=True, eq=False)
class PureCall:
    """A function of its arguments but the static ones, and of the tensors that modules hold in `places`.

    It is part of the keys of programs, so it holds nothing that calls change, and not the object of a method, which
    frees its programs.
    """

    name: str
    tree: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    inputs: tuple[int, ...]
    places: tuple[tuple[Place, ...], ...]
    specs: tuple[Any, ...]
    out_specs: Any
    autocasts: Autocasts

    @staticmethod
    def read(
        function: Function, state: StateWalk, held: Sequence[Tensor], modes: Any, args: tuple[Any, ...], kwargs: Any
    ) -> PureCall:
        """Reads a call under `modes` that finds the tensors `held` in the modules of `state`."""
        leaves, tree = pytree.tree_flatten(wrap_static(args, kwargs, function.static))
        inputs = tuple(i for i, x in enumerate(leaves) if not isinstance(x, Static))
        constants = tuple((i, x) for i, x in enumerate(leaves) if isinstance(x, Static))
        places = tuple(_places(x, state) for x in held)
        specs = _specs(function, args, kwargs)
        autocasts = autocast_dtypes(modes)
        return PureCall(function.name, tree, constants, inputs, places, specs, function.out_specs, autocasts)

    @property
    def key(self) -> tuple[Any, ...]:
        """The facts that make two calls of one function equal."""
        held = tuple(tuple((id(inside), name) for inside, name in each) for each in self.places)
        return self.tree, tuple((i, _by_value(x)) for i, x in self.constants), self.specs, self.autocasts, held

    def as_function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn` as a function of the inputs and of the tensors that modules hold.

        `fn` is a variable of the closure: the key of a program covers everything that its function leads to.
        """

        def run(inputs: list[Any], held: list[Tensor]) -> Any:
            return self._run(fn, inputs, held)

        run.__name__ = self.name
        return run

    def arguments(self, inputs: Sequence[Any], *, placed: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call with these inputs; `placed`: constrained to their specs."""
        by_leaf = dict(self.constants) | dict(zip(self.inputs, inputs, strict=True))
        leaves = [by_leaf[i] for i in range(len(by_leaf))]
        leaves = _constrained(leaves, self.specs) if placed else leaves
        args, kwargs = pytree.tree_unflatten([x.value if isinstance(x, Static) else x for x in leaves], self.tree)
        return args, kwargs

    def with_held(self, tensors: Sequence[Any]) -> AbstractContextManager[None]:
        """While on, modules hold other tensors, one for each of the call's."""
        pairs = zip(self.places, tensors, strict=True)
        return replacing((*place, x) for places, x in pairs for place in places)

    def _run(self, fn: Callable[..., Any], inputs: Sequence[Any], held: Sequence[Tensor]) -> Any:
        args, kwargs = self.arguments(inputs, placed=True)
        with self.with_held(held), autocast(self.autocasts):
            out = fn(*args, **kwargs)
        if self.out_specs is None:
            return out
        results, shape = pytree.tree_flatten(out)
        specs = broadcast_prefix(self.out_specs, out, f"{self.name}: out_specs")
        return pytree.tree_unflatten(_constrained(results, specs), shape)


@contextmanager
def autocast(dtypes: Iterable[tuple[str, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for device, dtype in dtypes:
            stack.enter_context(torch.autocast(device, dtype))
        yield


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


def _places(x: Tensor, state: StateWalk) -> tuple[Place, ...]:
    """Returns the places in which modules hold a tensor."""
    return tuple((held, name) for held, name, y in module_tensors((*state.kept, state.own)) if y is x)


def _by_value(x: Any) -> Any:
    try:
        hash(x)
    except TypeError:
        return id(x)
    return type(x), x
