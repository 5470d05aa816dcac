"""Lists the children of the user's objects: the values that an object holds, in order, each with its key and its name.

A child is `(key, name, value)`. The key is its part of a `Place`, under which `containers.put` replaces the value. The
name has the parts that follow the holder's name: `(".", "weight")` for an attribute, `((0,),)` for an item.

A walk over objects reads children here, and keeps only its policy: the children that it visits, and what is a leaf.

| walk | children that it visits | leaves |
|---|---|---|
| `State`: facts for a key | all, once per object; none of a library's object | plain values, functions |
| `Snapshot`: all places | the same, and it records each | the same |
| `EqualityWalk`: equal modules | of a module those that code read | the same |
| `leaks.holds_trace`: carried results | all, to some levels of objects | values of a trace |
| `nn/argument_copies`: tensors to exchange | those of nodes of pytrees | tensors |

Some traversals stay apart. `State._visit_module` expands the dicts of a module itself, with a short cut for plain
values: it runs for each module in each warm call. `read_arguments` follows pytree's order, which numbers the leaves.
`code_refs` follows code. A `functools.cache` shows its items only to `gc`. `host_scalars` copies schedules, and fills
numbers into them.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from shardlib.frontend.guards.attributes import attribute_items, cell_content, instance_dict
from shardlib.frontend.guards.place_names import key_part
from shardlib.frontend.guards.value_kinds import CONTAINERS

Child = tuple[Any, tuple[Any, ...], Any]
_NONE: Mapping[int, int] = types.MappingProxyType({})


def children(x: Any) -> Iterator[Child]:
    """Yields all children of an object: attributes, then items; of a function its variables, attributes and defaults.

    Example:
        >>> [*children({"a": 1})], [*children([2])]
        ([((<class 'str'>, 'a'), (('a',),), 1)], [(0, ((0,),), 2)])
    """
    if isinstance(x, types.FunctionType):
        defaults = {k: getattr(x, k) for k in ("__defaults__", "__kwdefaults__")}
        yield from name_attributes({**dict(closure_items(x)), **instance_dict(x), **defaults}.items())
    elif not isinstance(x, type | types.ModuleType):
        yield from attributes(x)
        yield from items(x) if isinstance(x, CONTAINERS) else ()


def attributes(x: Any) -> Iterator[Child]:
    """Yields the values in the dict and the slots of an object."""
    return name_attributes(attribute_items(x))


def name_attributes(values: Iterable[tuple[str, Any]]) -> Iterator[Child]:
    """Yields values with their names as attributes."""
    for k, y in values:
        yield k, (".", k), y


def items(x: Any, numbers: Mapping[int, int] = _NONE) -> Iterator[Child]:
    """Yields the items of a container; `numbers` maps ids of tensors that are keys of dicts to their numbers."""
    if isinstance(x, dict | types.MappingProxyType):
        for i, (k, y) in enumerate(list(x.items())):
            yield (type(k), id(k) if isinstance(k, torch.Tensor) else k), ((key_part(k, i, numbers),),), y
    else:
        for i, y in enumerate(x):
            yield i, ((i,),), y


def closure_items(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of a function's closure variables; None while a variable has no value."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=True):
        yield name, cell_content(cell)
