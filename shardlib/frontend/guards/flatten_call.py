"""What a call is made of: its leaves, what decides which program runs it, and what each leaf is called.

`read` goes through the arguments once, in pytree's order, without building a pytree: tensors and numbers become leaves,
and what a trace can see of everything becomes part of the key. A warm call costs this and one look-up. A number's value
is no part of the key: programs take numbers as inputs, and say themselves which of them they looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.core.torch_private import node_type, pytree
from shardlib.core.tree_paths import flatten_with_path
from shardlib.frontend.guards.attributes import has
from shardlib.frontend.guards.mappings import is_container
from shardlib.frontend.guards.object_state import OWN, State
from shardlib.tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class Static:
    """An argument that is kept whole and never looked into."""

    value: Any


@dataclass(frozen=True)
class FlatCall:
    """One call: the leaves of its arguments, the path to each, and the state that comes with it.

    Leaves are numbered on: first those of the arguments, then the tensors of `state`, then its numbers.
    """

    arguments: tuple[Any, ...]
    paths: tuple[Any, ...]
    tree: pytree.TreeSpec
    state: State

    @property
    def leaves(self) -> list[Any]:
        return [*self.arguments, *self.state.leaves]


def flatten_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: Collection[int | str] = (),
    state: State | None = None,
) -> FlatCall:
    """The leaves of a call; an argument whose position or name is in `static` is one leaf, wrapped in `Static`.

    State that is found in an argument is called after it: `state` learns what the arguments are called.
    """
    paths, tree = flatten_with_path(wrapped(args, kwargs, static))
    leaves = tuple(leaf for _, leaf in paths)
    call = FlatCall(leaves, tuple(path for path, _ in paths), tree, State() if state is None else state)
    call.state.roots = list(names_of(fn, call, range(len(leaves))))
    return call


def wrapped(
    args: Sequence[Any], kwargs: Mapping[str, Any], static: Collection[int | str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with those that are static in a box."""
    if not static:
        return tuple(args), dict(kwargs)
    return (
        tuple(Static(a) if i in static else a for i, a in enumerate(args)),
        {k: Static(a) if k in static else a for k, a in kwargs.items()},
    )


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf becomes an input of the graph: a tensor, or whatever has a tensor's shape, dtype and device."""
    if isinstance(leaf, torch.Tensor) or not all(has(leaf, name) for name in ("dtype", "shape", "device")):
        return isinstance(leaf, torch.Tensor)
    return isinstance(leaf.dtype, torch.dtype)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number that may change from call to call; a flag is none."""
    return type(leaf) is int or type(leaf) is float


# --- keys -------------------------------------------------------------------------------------------------------------


def read(items: Iterable[Any], leaves: list[Any], facts: list[Any], state: State) -> None:
    """Append the leaves of all `items` to `leaves`, and what a program depends on to `facts`."""
    for x in items:
        kind = type(x)
        if kind is ShardedTensor:
            leaves.append(x)
            own = x.__dict__
            facts.append(own["_form"])
            if len(own) > OWN or x.requires_grad or x.grad is not None:
                state.argument(x, facts, len(leaves) - 1)
        elif kind is tuple or kind is list:
            facts += (kind, len(x))
            read(x, leaves, facts, state)
        elif kind is dict:
            facts += (kind, tuple(x), tuple(map(type, x)))  # 1 and True are equal
            read(x.values(), leaves, facts, state)
        elif kind is float or kind is int:
            leaves.append(x)
            facts.append(kind)
        elif kind is str or kind is bool or x is None:
            leaves.append(x)
            facts += (kind, x)
        elif kind is Static:
            leaves.append(x)
            facts.append(Static)
            state.fact(x.value, facts)
        elif isinstance(x, torch.Tensor):
            leaves.append(x)
            state.argument(x, facts, len(leaves) - 1)
        elif (node := node_type(x)) in pytree.SUPPORTED_NODES or is_container(x):
            children, context = pytree.SUPPORTED_NODES[node].flatten_fn(x)
            facts += (kind, len(children))
            state.fact(context, facts)
            read(children, leaves, facts, state)
        else:
            leaves.append(x)
            facts.append(kind)
            state.object(x, facts, len(leaves) - 1)


def twins(arguments: Sequence[Any], state: Sequence[torch.Tensor]) -> dict[int, int]:
    """Arguments that are a tensor which the call has in another place, too: each leaf with the leaf of that place.

    Meta tensors, which stand for any of their shape, are not.
    """
    places = {id(x): i for i, x in enumerate(state, len(arguments))}
    found = {}
    for i, x in enumerate(arguments):
        if isinstance(x, torch.Tensor) and (at := places.setdefault(id(x), i)) != i and not x.is_meta:
            found[i] = at
    return found


# --- names ------------------------------------------------------------------------------------------------------------


def names_of(fn: Callable[..., Any], call: FlatCall, leaves: Sequence[int]) -> Iterator[str]:
    """`params['wq']`, `x`, `rest[0]`, `net.head.weight`: leaves, named by the function's own parameters."""
    named, rest = _parameters(fn)
    found = call.state.leaf_names if any(i >= len(call.arguments) for i in leaves) else []
    for i in leaves:
        if i >= len(call.arguments):
            yield found[i - len(call.arguments)]
            continue
        group, first, *tail = call.paths[i]
        yield _head(named, rest, group.idx, first) + pytree.keystr(tuple(tail))


def arguments_of(fn: Callable[..., Any], positional: int, named: Iterable[str]) -> list[str]:
    """What the arguments of a call are called."""
    plain, rest = _parameters(fn)
    return [*plain[:positional], *(f"{rest}[{i}]" for i in range(positional - len(plain))), *named]


def _parameters(fn: Callable[..., Any]) -> tuple[list[str], str]:
    try:
        parameters = list(inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values())
    except (ValueError, TypeError):  # a builtin
        parameters = []
    kinds = inspect.Parameter
    plain = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    return plain, next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), "args")


def _head(named: Sequence[str], rest: str, group: int, first: Any) -> str:
    if group == 1:
        return str(first.key)
    return named[first.idx] if first.idx < len(named) else f"{rest}[{first.idx - len(named)}]"
