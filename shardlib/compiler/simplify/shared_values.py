"""Fake values of new nodes: calls of one op on operands of the same form share one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardlib.core.call_scalar import hinted


def value_of(gm: fx.GraphModule, target: Any, args: Any, kwargs: Any) -> Any:
    """Returns the fake value of a call; calls of one op on operands of the same form in one graph share it."""
    forms = fx.map_arg((args, kwargs), _form)
    key = target, key_of(hinted(forms))
    values: dict[Any, Any] = gm.meta.setdefault(_VALUES, {})
    if key not in values:
        args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        values[key] = target(*hinted(args), **kwargs)
    return values[key]


def forget_values(gm: fx.GraphModule) -> None:
    """Drop the values that calls share; nodes keep theirs."""
    gm.meta.pop(_VALUES, None)


_VALUES = "values of calls"


def _form(node: fx.Node) -> Any:
    x = node.meta["val"]
    if not isinstance(x, torch.Tensor):
        return node  # several tensors, or none
    return tuple(x.shape), x.stride(), x.dtype, x.device, x.storage_offset(), x.is_conj(), x.is_neg()


_SAME = frozenset({int, bool, str, type(None), torch.dtype, torch.device})


def key_of(value: Any) -> Any:
    """Hashable, and apart wherever 1, 1.0, True or 0.0, -0.0 mean different programs."""
    kind = type(value)
    if kind is fx.Node:
        return value
    if kind in _SAME:
        return kind, value
    if isinstance(value, list | tuple):
        return tuple([(int, x) if type(x) is int else key_of(x) for x in value])
    if isinstance(value, dict):
        return tuple([(k, key_of(v)) for k, v in sorted(value.items())])
    return kind, repr(value)
