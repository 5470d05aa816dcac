"""Adds calls to a traced graph, each with the metadata and the fake value that every node has."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardlib.core.call_scalar import replace_by_hints

Node = Any  # an fx.Node; its arguments have the types that its op takes
_VALUES = "values of calls"
_INHERITED = ("line", "backward", "gradient of", "modules")
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device})


class Emit:
    """Adds calls in front of `node`, with its source line."""

    def __init__(self, gm: fx.GraphModule, node: Node) -> None:
        self.gm, self.node = gm, node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.gm.graph.inserting_before(self.node):
            return add_call(self.gm, self.node, target, *args, **kwargs)


def add_call(gm: fx.GraphModule, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Adds a call with the source line of `like`, at the graph's insertion point."""
    node = gm.graph.call_function(target, args, kwargs)
    node.meta.update({k: like.meta[k] for k in _INHERITED if k in like.meta})
    node.meta["val"] = compute_value(gm, target, args, kwargs)
    return node


def compute_value(gm: fx.GraphModule, target: Any, args: Any, kwargs: Any) -> Any:
    """Returns the fake value of a call; calls of one op on operands of the same form in one graph share it."""
    forms = fx.map_arg((args, kwargs), _form)
    key = target, make_key(replace_by_hints(forms))
    values: dict[Any, Any] = gm.meta.setdefault(_VALUES, {})
    if key not in values:
        args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        values[key] = target(*replace_by_hints(args), **kwargs)
    return values[key]


def drop_shared_values(gm: fx.GraphModule) -> None:
    """Drops the values that calls share; nodes keep theirs."""
    gm.meta.pop(_VALUES, None)


def make_key(value: Any) -> Any:
    """Returns a hashable form of arguments; 1, 1.0 and True differ in it, and 0.0 and -0.0."""
    kind = type(value)
    if kind is fx.Node:
        return value
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, list | tuple):
        return tuple([(int, x) if type(x) is int else make_key(x) for x in value])
    if isinstance(value, dict):
        return tuple([(k, make_key(v)) for k, v in sorted(value.items())])
    return kind, repr(value)


def _form(node: fx.Node) -> Any:
    x = node.meta["val"]
    if not isinstance(x, torch.Tensor):
        return node  # several tensors, or none
    return tuple(x.shape), x.stride(), x.dtype, x.device, x.storage_offset(), x.is_conj(), x.is_neg()
