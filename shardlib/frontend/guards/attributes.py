"""Reads what an object holds by itself, its dict and its slots, without running code of its class."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


def own(x: Any) -> Mapping[str, Any]:
    """Returns the dict of an object, or an empty one. A `__getattr__` of its class is not called."""
    try:
        ask = threading.local.__getattribute__ if isinstance(x, threading.local) else object.__getattribute__
        space: Mapping[str, Any] = ask(x, "__dict__")
    except AttributeError:
        return _NOTHING
    return space


def attributes(x: Any) -> Iterator[tuple[str, Any]]:
    """Yields what an object holds in its dict and its slots."""
    yield from list(own(x).items())
    for k, slot in _slots(type(x)):  # type: ignore[arg-type]
        try:
            y = slot.__get__(x)
        except AttributeError:  # nothing is in it
            continue
        yield k, y


def has(x: Any, name: str) -> bool:
    """Returns whether an object, or its class, says that it has this attribute."""
    return inspect.getattr_static(x, name, _NOTHING) is not _NOTHING


def content(cell: types.CellType) -> Any:
    """Returns the value of a closure variable; None where it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.lru_cache(1 << 12)
def _slots(kind: Any) -> tuple[tuple[str, Any], ...]:
    inside = (item for k in kind.__mro__ for item in vars(k).items())
    return tuple((k, x) for k, x in inside if isinstance(x, types.MemberDescriptorType) and k not in _PYTHONS)


# Where Python itself keeps something of an object: the last one changes in the first call of a `partial` with keywords.
_PYTHONS = frozenset({"__dict__", "__dictoffset__", "__weaklistoffset__", "__vectorcalloffset__"})


class Bound:
    """A function and the object that it is bound to, named as Python's own methods name them."""

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__, self.__self__ = function, instance

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__self__ is other.__self__ and self.__func__ == other.__func__

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))
