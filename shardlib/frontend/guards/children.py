"""Lists the children of the user's objects: the values that an object holds, in order, each with its key and its name.

A child is `(key, name, value)`. The key is its part of a `Place`, under which `containers.put` replaces the value. The
name has the parts that follow the holder's name: `(".", "weight")` for an attribute, `((0,),)` for an item. Attributes
are read without running code of the object's class.

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

import functools
import inspect
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from shardlib.frontend.guards.place_names import key_part
from shardlib.frontend.guards.value_kinds import CONTAINERS

Child = tuple[Any, tuple[Any, ...], Any]
_NOTHING: Mapping[Any, Any] = types.MappingProxyType({})


def children(x: Any) -> list[Child]:
    """Returns all children of an object: attributes, then items; of a function its variables, attributes and defaults.

    Example:
        >>> children({"a": 1}), children([2])
        ([((<class 'str'>, 'a'), (('a',),), 1)], [(0, ((0,),), 2)])
    """
    if isinstance(x, types.FunctionType):
        defaults = {k: getattr(x, k) for k in ("__defaults__", "__kwdefaults__")}
        return name_attributes({**dict(closure_items(x)), **instance_dict(x), **defaults}.items())
    if isinstance(x, type | types.ModuleType):
        return []
    return attributes(x) + (items(x) if isinstance(x, CONTAINERS) else [])


def attributes(x: Any) -> list[Child]:
    """Returns the values in the dict and the slots of an object."""
    return name_attributes(attribute_items(x))


def name_attributes(values: Iterable[tuple[str, Any]]) -> list[Child]:
    """Returns values with their names as attributes."""
    return [(k, (".", k), y) for k, y in values]


def items(x: Any, numbers: Mapping[int, int] = _NOTHING) -> list[Child]:
    """Returns the items of a container; `numbers` maps ids of tensors that are keys of dicts to their numbers."""
    if isinstance(x, dict | types.MappingProxyType):
        return [
            ((type(k), id(k) if isinstance(k, torch.Tensor) else k), ((key_part(k, i, numbers),),), y)
            for i, (k, y) in enumerate(list(x.items()))  # another thread may change it
        ]
    return [(i, ((i,),), y) for i, y in enumerate(x)]


def closure_items(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of a function's closure variables; None while a variable has no value."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=True):
        yield name, cell_content(cell)


def instance_dict(x: Any) -> Mapping[str, Any]:
    """Returns the `__dict__` of an object, or an empty mapping, without calling a `__getattr__` of its class."""
    try:
        read = threading.local.__getattribute__ if isinstance(x, threading.local) else object.__getattribute__
        space: Mapping[str, Any] = read(x, "__dict__")
    except AttributeError:
        return _NOTHING
    return space


def attribute_items(x: Any) -> list[tuple[str, Any]]:
    """Returns the names and values in the dict and the slots of an object."""
    values = list(instance_dict(x).items())
    for k, slot in _slots(type(x)):  # type: ignore[arg-type]
        with suppress(AttributeError):  # the slot is empty
            values.append((k, slot.__get__(x)))
    return values


def has_attribute(x: Any, name: str) -> bool:
    """Returns whether an object or its class defines this attribute, without computing it."""
    return inspect.getattr_static(x, name, _NOTHING) is not _NOTHING


def cell_content(cell: types.CellType) -> Any:
    """Returns the value of a closure variable; None while it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.lru_cache(1 << 12)
def _slots(kind: Any) -> tuple[tuple[str, Any], ...]:
    inside = (item for k in kind.__mro__ for item in vars(k).items())
    return tuple((k, x) for k, x in inside if isinstance(x, types.MemberDescriptorType) and k not in _INTERNAL)


# Slots that Python itself uses. The last one changes in the first call of a `partial` with keywords.
_INTERNAL = frozenset({"__dict__", "__dictoffset__", "__weaklistoffset__", "__vectorcalloffset__"})


class BoundMethod:
    """A function bound to an object, with the attribute names of Python's own methods."""

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__, self.__self__ = function, instance

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__self__ is other.__self__ and self.__func__ == other.__func__

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))
