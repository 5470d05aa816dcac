"""Reads the dict and the slots of an object without running code of its class."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


def instance_dict(x: Any) -> Mapping[str, Any]:
    """Returns the `__dict__` of an object, or an empty mapping, without calling a `__getattr__` of its class."""
    try:
        read = threading.local.__getattribute__ if isinstance(x, threading.local) else object.__getattribute__
        space: Mapping[str, Any] = read(x, "__dict__")
    except AttributeError:
        return _NOTHING
    return space


def attribute_items(x: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and values in the dict and the slots of an object."""
    yield from list(instance_dict(x).items())
    for k, slot in _slots(type(x)):  # type: ignore[arg-type]
        try:
            y = slot.__get__(x)
        except AttributeError:  # the slot is empty
            continue
        yield k, y


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
