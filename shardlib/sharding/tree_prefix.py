"""Specs as prefix pytrees: one spec for every leaf of a tree of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import node_type, pytree
from shardlib.sharding.spec import P, Spec

SpecLike = str | P | Spec | None


def is_spec(x: Any) -> bool:
    """Whether `x` is a leaf of a pytree of specs."""
    return x is None or isinstance(x, str | P | Spec)


def broadcast_prefix(
    prefix: Any,
    tree: Any,
    what: str,
    describe: Callable[[Any], str | None] = lambda leaf: None,
    names: Sequence[str] | None = None,
) -> list[SpecLike]:
    """One spec per leaf of `tree`; a spec (or None) in `prefix` stands for everything below it.

    `describe` says what a leaf is that can have no spec of its own, and None of any other. With `names`, both are
    sequences of as many trees, which are called that.

    Example:
        >>> broadcast_prefix(("a", {"x": "b c"}), (1, {"x": 2, "y": 3}), "in_specs")
        ['a', 'b c', None]
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
            if spec is not None and len(leaves) == 1 and leaves[0] is node and (said := describe(node)):
                wrong.append(f"{path}: spec {str(spec)!r} for {said}")
            out.extend([spec] * len(leaves))
            return
        specs, values = _children(spec), _children(node)
        if specs is not None and values is not None and dataclasses.is_dataclass(node) and type(spec) is type(node):
            specs = [getattr(spec, name) for name in _fields(node)]  # flattening leaves out what is None
        if specs is None or values is None or (isinstance(spec, Mapping) != isinstance(node, Mapping)):
            wrong.append(f"{path}: the specs have {_kind(spec)}, the values {_kind(node)}")
        elif isinstance(spec, Mapping):
            wrong.extend(
                f"{path} has no {key!r}; it has {', '.join(map(repr, node))}" for key in spec if key not in node
            )
            for key, child in node.items():
                walk(spec.get(key), child, f"{path}[{key!r}]")
        elif len(specs) != len(values):
            wrong.append(f"{path}: the specs have {_kind(spec)}, the values {_kind(node)}")
            remedies.insert(0, f"give each of the {len(values)} values an entry")
        else:
            for i, (s, n) in enumerate(zip(specs, values, strict=True)):
                walk(s, n, f"{path}[{i}]")

    for spec, node, name in [(prefix, tree, "")] if names is None else zip(prefix, tree, names, strict=True):
        walk(spec, node, name)
    if wrong:
        raise ShardingError(
            f"{what} do not fit the values",
            wrong,
            rule="specs are a prefix of the values' pytree: a spec, or None, at a node stands for all leaves below",
            remedy="; ".join(dict.fromkeys(remedies)),
        )
    return out


def _children(x: Any) -> list[Any] | None:
    """What a container holds, in order; None for a leaf."""
    if isinstance(x, Mapping):
        return list(x.values())
    node = node_type(x)
    return list(pytree.SUPPORTED_NODES[node].flatten_fn(x)[0]) if node in pytree.SUPPORTED_NODES else None


def _fields(x: Any) -> list[str]:
    """The fields of a registered dataclass that are children, in order."""
    flatten: Any = pytree.SUPPORTED_NODES[type(x)].flatten_with_keys_fn
    return [str(key.name) for key, _ in flatten(x)[0]]


def _kind(x: Any) -> str:
    children = _children(x)
    if isinstance(x, torch.Tensor):
        return "a Tensor"  # also of one that stands in for a tensor while tracing
    if children is None:
        return repr(x) if isinstance(x, int | float | str | None) else f"a {type(x).__name__}"
    return f"a {type(x).__name__} of {len(children)}"
