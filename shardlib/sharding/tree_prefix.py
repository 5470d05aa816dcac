"""Prefix pytrees of specs: expands them to one spec for every leaf of a tree of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.core.tree_paths import children_with_keys
from shardlib.sharding.partition_spec import is_partition_spec
from shardlib.sharding.spec import P, Spec

SpecLike = str | P | Spec | None


def is_spec(x: Any) -> bool:
    """Returns whether `x` is a leaf of a pytree of specs."""
    return x is None or isinstance(x, str | P | Spec) or is_partition_spec(x)


def broadcast_prefix(
    prefix: Any,
    tree: Any,
    argument: str,
    describe: Callable[[Any], str | None] = lambda leaf: None,
    names: Sequence[str] | None = None,
) -> list[SpecLike]:
    """Returns one spec per leaf of `tree`; a spec (or None) in `prefix` holds for all leaves below it.

    `describe` returns a description of a leaf that cannot have a spec, None for others. With `names`, `prefix` and
    `tree` are sequences of trees with these names. Errors call the prefix `argument`.
    """
    out: list[SpecLike] = []
    wrong: list[str] = []
    remedies = [
        "write the spec of one tensor as one string ('batch seq') or as P('data', None), never as a tuple; "
        "None where it is to be inferred, and for what is no tensor (a method's self, too)"
    ]

    def walk(spec: Any, node: Any, path: str) -> None:
        if is_spec(spec):
            leaves = pytree.tree_leaves(node)
            if spec is not None and len(leaves) == 1 and leaves[0] is node and (description := describe(node)):
                wrong.append(f"{path}: spec {str(spec)!r} for {description}")
            out.extend([spec] * len(leaves))
            return
        specs, values = _children(spec), _children(node)
        if values is not None and type(spec) is type(node) and (fields := _fields(node)) is not None:
            specs = [getattr(spec, name) for name in fields]  # flattening leaves out children that are None
        if specs is None or values is None or (isinstance(spec, Mapping) != isinstance(node, Mapping)):
            wrong.append(f"{path}: the specs have {_describe_kind(spec)}, the values {_describe_kind(node)}")
        elif isinstance(spec, Mapping):
            wrong.extend(
                f"{path} has no {key!r}; it has {', '.join(map(repr, node))}" for key in spec if key not in node
            )
            for key, child in _items(node):
                walk(spec.get(key), child, f"{path}[{key!r}]")
        elif len(specs) != len(values):
            wrong.append(f"{path}: the specs have {_describe_kind(spec)}, the values {_describe_kind(node)}")
            remedies.insert(0, f"give each of the {len(values)} values an entry")
        else:
            for i, (s, n) in enumerate(zip(specs, values, strict=True)):
                walk(s, n, f"{path}[{i}]")

    for spec, node, name in [(prefix, tree, "")] if names is None else zip(prefix, tree, names, strict=True):
        walk(spec, node, name)
    if wrong:
        raise ShardingError(
            f"{argument} do not fit the values",
            wrong,
            rule="specs are a prefix of the values' pytree: a spec, or None, at a node stands for all leaves below",
            remedy="; ".join(dict.fromkeys(remedies)),
        )
    return out


def _children(x: Any) -> list[Any] | None:
    """Returns the children of a container in order; None for a leaf."""
    if isinstance(x, Mapping):
        return list(x.values())
    children = children_with_keys(x)
    return None if children is None else [child for _, child in children]


def _items(x: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Returns the items of a mapping in the order of its leaves."""
    children = children_with_keys(x)
    return [*x.items()] if children is None else [(getattr(key, "key", key), child) for key, child in children]


def _fields(x: Any) -> list[str] | None:
    """Returns the fields of a registered dataclass that are children, in order; None for any other node."""
    keys = [key for key, _ in children_with_keys(x) or ()]
    has_fields = dataclasses.is_dataclass(x) and all(isinstance(key, pytree.GetAttrKey) for key in keys)
    return [key.name for key in keys] if has_fields else None


def _describe_kind(x: Any) -> str:
    children = _children(x)
    if isinstance(x, torch.Tensor):
        return "a Tensor"  # also of a FakeTensor
    if children is None:
        return repr(x) if isinstance(x, int | float | str | None) else f"a {type(x).__name__}"
    return f"a {type(x).__name__} of {len(children)}"
