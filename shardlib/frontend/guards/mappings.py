"""Mappings of other classes than dict that hold tensors: containers, as dicts are, from the first time one is seen.

Torch's pytree keeps their classes from then on. A stand-in has the items, and those attributes of the object that can
be part of a key: what a library keeps beside (a tokenizer's own record of a batch) is not in it.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import pytree
from shardlib.frontend.guards import attributes
from shardlib.frontend.guards.users_code import is_users


@dataclass(frozen=True)
class _Frame:
    """A mapping without its values: its keys, and what the object has beside its items."""

    keys: tuple[Any, ...]
    types: tuple[type, ...]  # 1 and True are equal
    own: dict[str, Any]


def is_container(x: Any) -> bool:
    """Whether `x` is a mapping that holds tensors; its class is then one of torch's pytree nodes."""
    kind = type(x)
    if not isinstance(x, Mapping) or kind in pytree.SUPPORTED_NODES or not any(map(_is_inner, x.values())):
        return False
    pytree.register_pytree_node(
        kind,
        _flatten,
        lambda values, frame: _made(kind, dict(zip(frame.keys, values, strict=True)), frame.own),
        flatten_with_keys_fn=lambda x: ([(pytree.MappingKey(k), y) for k, y in x.items()], _frame(x)),
    )
    return True


def opened(tree: Any) -> Any:
    """The tree itself, whose mappings are all known."""
    while any(map(is_container, pytree.tree_leaves(tree))):
        pass
    return tree


def _is_inner(x: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        or any(isinstance(y, torch.Tensor) for y in pytree.tree_leaves(x))
        or (isinstance(x, Mapping) and any(map(_is_inner, x.values())))
    )


def _flatten(x: Any) -> tuple[list[Any], _Frame]:
    return [*x.values()], _frame(x)


def _frame(x: Any) -> _Frame:
    keys = tuple(x)
    own = {
        k: y for k, y in attributes.own(x).items() if not (isinstance(y, Mapping) and tuple(y) == keys) and _counts(y)
    }
    return _Frame(keys, tuple(map(type, keys)), own)


def _counts(x: Any) -> bool:
    """Whether a key can have it: plain values, containers of them, and the user's own objects."""
    if isinstance(x, list | tuple | set | frozenset):
        return all(map(_counts, x))
    if isinstance(x, Mapping):
        return all(map(_counts, x.values()))
    return isinstance(x, int | float | str | None) or (not isinstance(x, torch.Tensor) and is_users(type(x)))


def _made(kind: Any, items: dict[Any, Any], own: dict[str, Any]) -> Any:
    if issubclass(kind, dict):
        made = kind.__new__(kind)
        base = next(k for k in kind.__mro__ if k in (OrderedDict, defaultdict, dict))
        for k, y in items.items():
            base.__setitem__(made, k, y)
        if own:
            vars(made).update(own)
        return made
    if issubclass(kind, UserDict):
        made = kind.__new__(kind)
        vars(made).update(own, data=items)
        return made
    try:
        return kind(items)
    except TypeError as error:
        raise ShardingError(
            f"a {kind.__name__} with tensors cannot be made from its items",
            [str(error)],
            rule=f"a mapping that is an argument or a result is made anew, as {kind.__name__}(items)",
            remedy="pass a dict, or register the class with torch.utils._pytree.register_pytree_node",
        ) from error
