"""Flattens a call: its leaves, the facts of its key, and a name for each leaf.

`read_arguments` walks the arguments once, in pytree's order, without building a pytree. Tensors and numbers become
leaves, and every fact that a trace can see becomes part of the key. A warm call costs this walk and one look-up. The
value of a number is not in the key: programs take numbers as inputs, and guard those that their traces read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardlib.core.torch_internals.torch_private import node_type, pytree
from shardlib.core.tree_paths import flatten_with_path
from shardlib.frontend.guards.children import has_attribute
from shardlib.frontend.guards.mappings import register_tensor_mapping
from shardlib.frontend.guards.state_walk import OWN_ATTRIBUTES, StateWalk
from shardlib.tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class Static:
    """Marks a static argument: it is one leaf, and counts by value."""

    value: Any


@dataclass(frozen=True)
class FlatCall:
    """One call: the leaves of its arguments, the path to each, and the state that it reaches.

    Leaves are numbered in this order: those of the arguments, the tensors of `state`, its numbers.
    """

    arguments: tuple[Any, ...]
    paths: tuple[Any, ...]
    tree: pytree.TreeSpec
    state: StateWalk

    @property
    def leaves(self) -> list[Any]:
        return [*self.arguments, *self.state.leaves]


def flatten_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: Collection[int | str] = (),
    state: StateWalk | None = None,
) -> FlatCall:
    """Flattens the arguments of a call; those whose position or name is in `static` are wrapped in `Static`.

    Names of state in an argument start with the argument's name, so `state.roots` gets these names.
    """
    paths, tree = flatten_with_path(wrap_static(args, kwargs, static))
    leaves = tuple(leaf for _, leaf in paths)
    call = FlatCall(leaves, tuple(path for path, _ in paths), tree, StateWalk() if state is None else state)
    call.state.roots = list(leaf_names(fn, call, range(len(leaves))))
    return call


def wrap_static(
    args: Sequence[Any], kwargs: Mapping[str, Any], static: Collection[int | str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wraps the static arguments in `Static`."""
    if not static:
        return tuple(args), dict(kwargs)
    return (
        tuple(Static(a) if i in static else a for i, a in enumerate(args)),
        {k: Static(a) if k in static else a for k, a in kwargs.items()},
    )


def is_tensor(leaf: Any) -> bool:
    """Returns whether a leaf becomes an input of the graph: it is a tensor, or has a shape, a dtype and a device."""
    if isinstance(leaf, torch.Tensor) or not all(has_attribute(leaf, name) for name in ("dtype", "shape", "device")):
        return isinstance(leaf, torch.Tensor)
    return isinstance(leaf.dtype, torch.dtype)


def is_number(leaf: Any) -> bool:
    """Returns whether a leaf is a number that may change from call to call; a bool is not."""
    return type(leaf) is int or type(leaf) is float


# --- keys -------------------------------------------------------------------------------------------------------------


def read_arguments(items: Iterable[Any], leaves: list[Any], facts: list[Any], state: StateWalk) -> None:
    """Appends the leaves of all `items` to `leaves`, and the facts that a program depends on to `facts`."""
    for x in items:
        kind = type(x)
        if kind is ShardedTensor:
            leaves.append(x)
            own = x.__dict__
            facts.append(own["_form"])
            if len(own) > OWN_ATTRIBUTES or x.requires_grad or x.grad is not None:
                state.visit_argument_tensor(x, facts, len(leaves) - 1)
        elif kind is tuple or kind is list:
            facts += (kind, len(x))
            read_arguments(x, leaves, facts, state)
        elif kind is dict:
            facts += (kind, tuple(x), tuple(map(type, x)))  # 1 and True are equal
            read_arguments(x.values(), leaves, facts, state)
        elif kind is float or kind is int:
            leaves.append(x)
            facts.append(kind)
        elif kind is str or kind is bool or x is None:
            leaves.append(x)
            facts += (kind, x)
        elif kind is Static:
            leaves.append(x)
            facts.append(Static)
            state.add_fact(x.value, facts)
        elif isinstance(x, torch.Tensor):
            leaves.append(x)
            state.visit_argument_tensor(x, facts, len(leaves) - 1)
        elif (node := node_type(x)) in pytree.SUPPORTED_NODES or register_tensor_mapping(x):
            children, context = pytree.SUPPORTED_NODES[node].flatten_fn(x)
            facts += (kind, len(children))
            state.add_fact(context, facts)
            read_arguments(children, leaves, facts, state)
        else:
            leaves.append(x)
            facts.append(kind)
            state.visit_argument_object(x, facts, len(leaves) - 1)


def find_aliases(arguments: Sequence[Any], state: Sequence[torch.Tensor]) -> dict[int, int]:
    """Maps each argument that is the same tensor as another leaf to that leaf.

    Meta tensors stand for any tensor of their shape, so they are left out.
    """
    places = {id(x): i for i, x in enumerate(state, len(arguments))}
    aliases = {}
    for i, x in enumerate(arguments):
        if isinstance(x, torch.Tensor) and (at := places.setdefault(id(x), i)) != i and not x.is_meta:
            aliases[i] = at
    return aliases


# --- names ------------------------------------------------------------------------------------------------------------


def leaf_names(fn: Callable[..., Any], call: FlatCall, leaves: Sequence[int]) -> Iterator[str]:
    """Yields the name of each leaf by the function's parameters: `params['wq']`, `x`, `rest[0]`, `net.head.weight`."""
    names = signature_names(fn) or NO_NAMES
    state_names = call.state.leaf_names if any(i >= len(call.arguments) for i in leaves) else []
    for i in leaves:
        if i >= len(call.arguments):
            yield state_names[i - len(call.arguments)]
            continue
        group, first, *tail = call.paths[i]
        yield (str(first.key) if group.idx == 1 else names.at(first.idx)) + pytree.keystr(tuple(tail))


def argument_names(fn: Callable[..., Any], positional: int, named: Iterable[str]) -> list[str]:
    """Returns the names of a call's arguments; an argument behind the last parameter is `args[0]`."""
    names = signature_names(fn) or NO_NAMES
    return [*(names.at(i) for i in range(positional)), *named]


class SignatureNames(NamedTuple):
    """The names of a function's parameters.

    `plain` take a position. `all` are these and the keyword-only ones; `optional` are those with a default. `rest` is
    the `*args`, `keywords` the `**kwargs`.
    """

    plain: list[str]
    all: list[str]
    optional: list[str]
    rest: str | None
    keywords: str | None

    def at(self, position: int) -> str:
        """Returns the name of a positional argument; an argument behind the last parameter is `args[0]`."""
        count = len(self.plain)
        return self.plain[position] if position < count else f"{self.rest or 'args'}[{position - count}]"


NO_NAMES = SignatureNames([], [], [], None, None)


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a function, or of a module's `forward`; None for a builtin without one."""
    try:
        return inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (ValueError, TypeError):
        return None


def signature_names(fn: Callable[..., Any]) -> SignatureNames | None:
    """Returns the names of a function's parameters; None for a builtin without a signature."""
    if (signature := signature_of(fn)) is None:
        return None
    parameters = signature.parameters.values()
    variadic = {p.kind: p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    named = [p for p in parameters if p.kind not in variadic]
    return SignatureNames(
        [p.name for p in named if p.kind is not p.KEYWORD_ONLY],
        [p.name for p in named],
        [p.name for p in named if p.default is not p.empty],
        variadic.get(inspect.Parameter.VAR_POSITIONAL),
        variadic.get(inspect.Parameter.VAR_KEYWORD),
    )
