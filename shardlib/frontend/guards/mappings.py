"""Registers mappings of other classes than dict as pytree containers, once one that holds tensors is seen.

A rebuilt mapping has the items, and those attributes of the object that can be part of a key. It lacks other
attributes, such as a tokenizer's own record of a batch.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.frontend.guards.children import instance_dict
from shardlib.frontend.guards.value_kinds import is_user_code


@dataclass(frozen=True)
class _Frame:
    """A mapping without its values: its keys, and the other attributes of the object."""

    keys: tuple[Any, ...]
    types: tuple[type, ...]  # 1 and True are equal
    own: dict[str, Any]


def register_tensor_mapping(x: Any) -> bool:
    """Returns whether `x` is a mapping that holds tensors; if so, registers its class with torch's pytree."""
    kind = type(x)
    if not isinstance(x, Mapping) or kind in pytree.SUPPORTED_NODES or not any(map(_holds_tensors, x.values())):
        return False
    pytree.register_pytree_node(
        kind,
        _flatten,
        lambda values, frame: _rebuild(kind, dict(zip(frame.keys, values, strict=True)), frame.own),
        flatten_with_keys_fn=lambda x: ([(pytree.MappingKey(k), y) for k, y in x.items()], _frame(x)),
    )
    return True


def register_mappings(tree: Any) -> Any:
    """Registers the classes of all mappings with tensors in a tree; returns the tree."""
    while any(map(register_tensor_mapping, pytree.tree_leaves(tree))):
        pass
    return tree


def _holds_tensors(x: Any) -> bool:
    leaves = pytree.tree_leaves(x)
    return any(isinstance(y, torch.Tensor) for y in leaves) or (
        isinstance(x, Mapping) and any(map(_holds_tensors, x.values()))
    )


def _flatten(x: Any) -> tuple[list[Any], _Frame]:
    return [*x.values()], _frame(x)


def _frame(x: Any) -> _Frame:
    keys = tuple(x)
    own = {
        k: y
        for k, y in instance_dict(x).items()
        if not (isinstance(y, Mapping) and tuple(y) == keys) and _fits_in_key(y)
    }
    return _Frame(keys, tuple(map(type, keys)), own)


def _fits_in_key(x: Any) -> bool:
    """Returns whether a key can hold `x`: a plain value, a container of such, or an object of the user's."""
    if isinstance(x, list | tuple | set | frozenset):
        return all(map(_fits_in_key, x))
    if isinstance(x, Mapping):
        return all(map(_fits_in_key, x.values()))
    return isinstance(x, int | float | str | None) or (not isinstance(x, torch.Tensor) and is_user_code(type(x)))


def _rebuild(kind: Any, items: dict[Any, Any], own: dict[str, Any]) -> Any:
    if issubclass(kind, dict):
        mapping = kind.__new__(kind)
        base = next(k for k in kind.__mro__ if k in (OrderedDict, defaultdict, dict))
        for k, y in items.items():
            base.__setitem__(mapping, k, y)
        if own:
            vars(mapping).update(own)
        return mapping
    if issubclass(kind, UserDict):
        mapping = kind.__new__(kind)
        vars(mapping).update(own, data=items)
        return mapping
    try:
        return kind(items)
    except TypeError as error:
        raise ShardingError(
            f"a {kind.__name__} with tensors cannot be made from its items",
            [str(error)],
            rule=f"a mapping that is an argument or a result is made anew, as {kind.__name__}(items)",
            remedy="pass a dict, or register the class with torch.utils._pytree.register_pytree_node",
        ) from error
