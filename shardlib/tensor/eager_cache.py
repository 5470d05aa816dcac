"""The eager ops that are ready to run, and how a call finds its own: one key, one look-up.

A key names the op, the default dtype, the form of every tensor, and every other argument by type and value. Where a
number only enters the arithmetic (`x * 0.1`), its type alone counts, so that a learning rate that changes makes no new
program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.core.aten.functional_forms import FILLS, functional_form
from shardlib.core.aten.op_traits import has
from shardlib.core.bounded_cache import Bounded
from shardlib.core.strided_only import is_dtensor, refuse_others
from shardlib.core.torch_private import OpOverload, schema_of
from shardlib.tensor.tensor_meta import Form

Run = Callable[[Any, Any], Any]  # of a call's args and kwargs

PROGRAMS: Bounded[Any, Run] = Bounded(1 << 14)
LOOSE: set[int] = set()  # ids of ops whose numbers count by type; ops live as long as the process
_known: set[Any] = set()
_LISTS = ("aten::_foreach_", "aten::_fused_")  # what optimizers call, with other step sizes in each step


def key_of(op: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What decides which program runs a call."""
    number = id(op)
    key: list[Any] = [number, torch.get_default_dtype()]
    read(key, args, number in LOOSE)
    if kwargs:
        key.append(tuple(kwargs))
        read(key, kwargs.values(), number in LOOSE)
    return tuple(key)


def read(key: list[Any], values: Any, loose: bool) -> None:
    """Append what counts of some arguments."""
    add = key.append
    for x in values:
        kind = type(x)
        if kind is int:
            add(int if loose else x)
        elif x is None:
            add(None)
        elif kind is float or kind is complex:
            # 1, 1.0 and True are different arguments, and so are 0.0 and -0.0.
            add(kind)
            if not loose:
                add(x if x and x == x else repr(x))
        elif kind is list or kind is tuple:
            add((list, len(x)))
            read(key, x, loose)
        elif isinstance(x, torch.Tensor):
            form = x.__dict__.get("_form")
            add(form if type(form) is Form else plain(x))
        else:
            add(kind)
            add(x)


def learn(op: Any) -> bool:
    """Note of an op that is new whether its numbers only enter its arithmetic; True if keys of its calls change."""
    if op in _known or not isinstance(op, OpOverload):
        return False
    _known.add(op)
    arguments = schema_of(op).arguments
    functional = functional_form(op) if schema_of(op).is_mutable else None
    forms = [op] if functional is None else [op, functional]
    pointwise = any(torch.Tag.pointwise in form.tags or has(form, "by element") for form in forms)
    pointwise = pointwise or op in FILLS or schema_of(op).name.startswith(_LISTS)
    sizes = any(str(a.type) in ("int", "SymInt", "List[int]", "Optional[int]") for a in arguments)
    if pointwise and not sizes:
        LOOSE.add(id(op))
    return id(op) in LOOSE


def plain(x: torch.Tensor) -> Any:
    """A plain tensor, as part of a key."""
    if x.is_nested or x.layout is not torch.strided or is_dtensor(x):
        refuse_others("an op on a ShardedTensor", [("its operand", x)])
    return x.shape, x.stride(), x.dtype, x.device
