"""Iterators that a traced function goes on with: every call would get the same items."""

from __future__ import annotations

import gc
import operator
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from shardlib.core.errors import ShardingError
from shardlib.frontend.guards.attributes import instance_dict


class Iterators:
    """Knows how far the iterators are that a function holds."""

    def __init__(self, held: Iterable[Any]) -> None:
        self.held = [x for x in held if _is_iterator(x)]
        self.before = [_far(x) for x in self.held]

    def refuse_steps(self, name: str) -> None:
        """Raise the error if items were taken since."""
        wrong = [x for x, before in zip(self.held, self.before, strict=True) if _far(x) != before]
        if wrong:
            raise ShardingError(
                f"{name} takes items from an iterator that is not its own",
                [f"a {type(x).__name__}" for x in wrong],
                rule="Python runs once, while a function is traced: every call would use the same items",
                remedy="take them outside, and pass the item: step(x, next(it)); or hold a list, and iterate over it",
            )


def _is_iterator(x: Any) -> bool:
    return not isinstance(x, type) and hasattr(type(x), "__next__")


def _far(x: Any) -> list[Any]:
    """How far an iterator is: what tells it, also of the iterators inside; other things count by who they are."""
    known: list[Any] = []
    seen: set[int] = set()
    todo = [x]
    while todo and len(seen) < _MANY:
        x = todo.pop()
        if type(x) in _PLAIN:
            known.append((type(x), str(x)))
        elif type(x) is tuple:
            todo += x
        elif not _is_iterator(x):
            known.append(_Who(x))
        elif id(x) not in seen:
            seen.add(id(x))
            known.append(type(x))
            todo += _inside(x)
    return known


def _inside(x: Any) -> Iterator[Any]:
    if isinstance(x, types.GeneratorType):
        yield -1 if x.gi_frame is None else x.gi_frame.f_lasti
        yield from gc.get_referents(x)
    elif type(x).__module__ not in ("builtins", "itertools"):  # what it counts, and what it goes through
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


class _Who:
    """An object by who it is; it lives as long as this does."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return type(other) is _Who and other.x is self.x

    __hash__ = None  # type: ignore[assignment]


_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
_MANY = 1000  # iterators inside iterators
