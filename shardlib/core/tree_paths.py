"""Paths of a pytree's leaves, also through nodes that are registered with torch's pytree without keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardlib.core.torch_internals.torch_private import node_type, pytree


def flatten_with_path(tree: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], pytree.TreeSpec]:
    """Returns the leaves of a pytree, each with its path, and its structure.

    `torch.utils._pytree.tree_flatten_with_path` raises ValueError for a node without keys. Here such a node gets keys:
    those of a mapping's items, else the positions of its children.
    """
    return [(path, x) for path, x, is_leaf in walk_tree(tree) if is_leaf], pytree.tree_structure(tree)


def children_with_keys(x: Any) -> list[tuple[Any, Any]] | None:
    """Returns the children of a pytree node, each with its key, in the order of the leaves; None for a leaf."""
    node = pytree.SUPPORTED_NODES.get(node_type(x))
    if node is None:
        return None
    if node.flatten_with_keys_fn is not None:
        return [*node.flatten_with_keys_fn(x)[0]]
    children = [*node.flatten_fn(x)[0]]
    keys: dict[int, list[Any]] = {}
    for key, child in x.items() if isinstance(x, Mapping) else ():
        keys.setdefault(id(child), []).append(key)
    return [
        (pytree.MappingKey(own.pop(0)) if (own := keys.get(id(child))) else pytree.SequenceKey(i), child)
        for i, child in enumerate(children)
    ]


def walk_tree(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    """Yields each node of a pytree, after its children: its path, the node, and True for a leaf."""
    children = children_with_keys(x)
    for key, child in children or ():
        yield from walk_tree(child, (*path, key))
    yield path, x, children is None
