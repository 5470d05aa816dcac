"""Refuses functions that advance iterators of their surroundings: every call would get the same items."""

from __future__ import annotations

import gc
import io
import operator
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from shardlib.core.errors import ShardingError
from shardlib.frontend.guards.children import instance_dict


class IteratorPositions:
    """The positions of the iterators that a function holds."""

    def __init__(self, held: Iterable[Any]) -> None:
        self.held = [x for x in held if _is_iterator(x)]
        self.before = [_position(x) for x in self.held]

    def refuse_steps(self, name: str) -> None:
        """Raises an error if items were taken since."""
        pairs = zip(self.held, self.before, strict=True)
        wrong = [f"a {type(x).__name__}" for x, before in pairs if _position(x) != before]
        wrong += [f"a {type(x).__name__}, whose position cannot be read" for x in self.held if _hides_position(x)]
        if wrong:
            raise ShardingError(
                f"{name} takes items from an iterator that is not its own",
                wrong,
                rule="Python runs once, while a function is traced: every call would use the same items",
                remedy="take them outside, and pass the item: step(x, next(it)); or hold a list, and iterate over it",
            )


def _is_iterator(x: Any) -> bool:
    return not isinstance(x, type) and hasattr(type(x), "__next__")


def _hides_position(x: Any) -> bool:
    """Returns whether an iterator, which is no file, shows nothing that changes when it advances."""
    kind = type(x)
    if kind is _CALLABLE_ITERATOR:
        return True
    has_attributes = hasattr(x, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__)
    return not (has_attributes or kind.__module__ in ("builtins", "itertools") or isinstance(x, io.IOBase))


def _position(x: Any) -> list[Any]:
    """Returns facts that change when an iterator, or one inside, advances; other objects count by identity."""
    facts: list[Any] = []
    seen: set[int] = set()
    todo = [x]
    while todo and len(seen) < _MANY:
        x = todo.pop()
        if type(x) in _PLAIN:
            facts.append((type(x), str(x)))
        elif type(x) is tuple:
            todo += x
        elif not _is_iterator(x):
            facts.append(_Identity(x))
        elif id(x) not in seen:
            seen.add(id(x))
            facts.append(type(x))
            todo += _inside(x)
    return facts


def _inside(x: Any) -> Iterator[Any]:
    if isinstance(x, types.GeneratorType):
        yield -1 if x.gi_frame is None else x.gi_frame.f_lasti
        yield from gc.get_referents(x)
    elif type(x).__module__ not in ("builtins", "itertools"):  # its counters, and the iterators that it reads
        yield from (y for y in instance_dict(x).values() if type(y) in _PLAIN or _is_iterator(y))
    elif (left := operator.length_hint(x, -1)) >= 0:
        yield left
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                yield from x.__reduce__()
            except TypeError:  # it cannot be copied
                yield from gc.get_referents(x)


class _Identity:
    """Compares an object by identity, and keeps it alive."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return type(other) is _Identity and other.x is self.x

    __hash__ = None  # type: ignore[assignment]


_CALLABLE_ITERATOR = type(iter(int, 1))  # of `iter(function, sentinel)`, and of `re.finditer`
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
_MANY = 1000  # iterators inside iterators
