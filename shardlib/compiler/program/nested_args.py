"""Walks and rebuilds the nested tuples, lists and dicts that are the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

PLAIN = frozenset({int, bool, float, str, type(None)})
MANY = 16


def is_plain(x: tuple[Any, ...] | list[Any]) -> bool:
    """True if a sequence holds only plain numbers or texts; a quick path serves long lists of equal sizes."""
    if len(x) > MANY and type(x[0]) is int and x.count(x[0]) == len(x):
        return True
    return PLAIN.issuperset(map(type, x))


def leaves(x: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """Yields all instances of `kind`, which is no plain number or text, in nested tuples, lists and dicts."""
    if isinstance(x, kind):
        yield x
    elif isinstance(x, dict):
        for y in x.values():
            yield from leaves(y, kind)
    elif isinstance(x, tuple | list) and not is_plain(x):
        for y in x:
            if isinstance(y, kind):
                yield y
            elif isinstance(y, tuple | list | dict):
                yield from leaves(y, kind)


def list_leaves(args: tuple[Any, ...], kinds: tuple[type, ...]) -> list[Any]:
    """Lists the `leaves` of arguments; fast where most are leaves themselves, or plain."""
    every = []
    for x in args:
        if (kind := type(x)) in kinds:
            every.append(x)
        elif kind not in PLAIN:
            every += leaves(x, kinds)
    return every


def rebuild(x: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to the leaves of nested tuples, lists and dicts; lists of plain numbers stay as they were."""
    if isinstance(x, tuple | list):
        return x if is_plain(x) else type(x)(rebuild(y, change) for y in x)
    if isinstance(x, dict):
        return {k: rebuild(v, change) for k, v in x.items()}
    return change(x)
