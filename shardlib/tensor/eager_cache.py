"""Caches the runners of eager calls by key.

A key holds the op, the default dtype, the form of every tensor, and every other argument by type and value. If a number
only enters the arithmetic (`x * 0.1`), the key holds its type alone, so that a changing learning rate needs no new
program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.core.aten.functional_forms import FILLS, functional_form
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.torch_internals.strided_only import is_dtensor, refuse_unstrided
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of
from shardlib.tensor.tensor_meta import Form

Runner = Callable[[Any, Any], Any]  # runs a call from its args and kwargs

PROGRAMS: BoundedCache[Any, Runner] = BoundedCache(1 << 14)
OPS_KEYED_BY_NUMBER_TYPE: set[int] = set()  # their ids; ops live as long as the process
_classified: set[Any] = set()
_LISTS = ("aten::_foreach_", "aten::_fused_")  # optimizers call these with other step sizes in each step


def build_key(op: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    number = id(op)
    key: list[Any] = [number, torch.get_default_dtype()]
    append_to_key(key, args, number in OPS_KEYED_BY_NUMBER_TYPE)
    if kwargs:
        key.append(tuple(kwargs))
        append_to_key(key, kwargs.values(), number in OPS_KEYED_BY_NUMBER_TYPE)
    return tuple(key)


def append_to_key(key: list[Any], values: Any, loose: bool) -> None:
    """Appends the parts of a key for arguments; `loose` numbers count by type."""
    add = key.append
    for x in values:
        kind = type(x)
        if kind is int:
            add(int if loose else x)
        elif x is None:
            add(None)
        elif kind is float or kind is complex:
            # 1, 1.0 and True are different arguments; so are 0.0 and -0.0.
            add(kind)
            if not loose:
                add(x if x and x == x else repr(x))
        elif kind is list or kind is tuple:
            add((list, len(x)))
            append_to_key(key, x, loose)
        elif isinstance(x, torch.Tensor):
            form = x.__dict__.get("_form")
            add(form if type(form) is Form else plain_tensor_key(x))
        else:
            add(kind)
            add(x)


def classify_op(op: Any) -> bool:
    """Classifies a new op by whether its numbers only enter its arithmetic; True if keys of its calls change."""
    if op in _classified or not isinstance(op, OpOverload):
        return False
    _classified.add(op)
    arguments = schema_of(op).arguments
    functional = functional_form(op) if schema_of(op).is_mutable else None
    forms = [op] if functional is None else [op, functional]
    pointwise = any(torch.Tag.pointwise in form.tags or has_trait(form, "pointwise") for form in forms)
    pointwise = pointwise or op in FILLS or schema_of(op).name.startswith(_LISTS)
    sizes = any(str(a.type) in ("int", "SymInt", "List[int]", "Optional[int]") for a in arguments)
    if pointwise and not sizes:
        OPS_KEYED_BY_NUMBER_TYPE.add(id(op))
    return id(op) in OPS_KEYED_BY_NUMBER_TYPE


def plain_tensor_key(x: torch.Tensor) -> Any:
    if x.is_nested or x.layout is not torch.strided or is_dtensor(x):
        refuse_unstrided("an op on a ShardedTensor", [("its operand", x)])
    return x.shape, x.stride(), x.dtype, x.device
