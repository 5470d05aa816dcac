"""What stands in the nested tuples, lists and dicts that are the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_PLAIN = frozenset({int, bool, float, str, type(None)})


def leaves(x: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """All instances of `kind`, which is no plain number or text, in nested tuples, lists and dicts."""
    if isinstance(x, kind):
        yield x
    elif isinstance(x, dict):
        for y in x.values():
            yield from leaves(y, kind)
    elif isinstance(x, tuple | list) and not _PLAIN.issuperset(map(type, x)):  # sizes, one for each of 512 members
        for y in x:
            if isinstance(y, kind):
                yield y
            elif isinstance(y, tuple | list | dict):
                yield from leaves(y, kind)


def rebuild(x: Any, change: Callable[[Any], Any]) -> Any:
    """`x` with `change` applied to what stands in nested tuples, lists and dicts, lists of plain numbers excepted."""
    if isinstance(x, tuple | list):
        return x if _PLAIN.issuperset(map(type, x)) else type(x)(rebuild(y, change) for y in x)
    if isinstance(x, dict):
        return {k: rebuild(v, change) for k, v in x.items()}
    return change(x)
