"""What an object holds by itself, found without running code of its class: its dict and its slots."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


def own(x: Any) -> Mapping[str, Any]:
    """The dict of an object; without one, nothing. A `__getattr__` of its class is not asked."""
    try:
        ask = threading.local.__getattribute__ if isinstance(x, threading.local) else object.__getattribute__
        found: Mapping[str, Any] = ask(x, "__dict__")
    except AttributeError:
        return _NOTHING
    return found


def attributes(x: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, in its dict and its slots."""
    yield from list(own(x).items())
    for k, slot in _slots(type(x)):  # type: ignore[arg-type]
        try:
            y = slot.__get__(x)
        except AttributeError:  # nothing is in it
            continue
        yield k, y


def has(x: Any, name: str) -> bool:
    """Whether an object, or its class, says that it has this attribute."""
    return inspect.getattr_static(x, name, _NOTHING) is not _NOTHING


def content(cell: types.CellType) -> Any:
    """What a variable of a function around has; None where it has nothing yet."""
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
