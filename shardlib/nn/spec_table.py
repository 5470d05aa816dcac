"""Which parameter lives where: a table from patterns of names to specs, read against the names of a module."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, TypeVar

from shardlib.core.errors import ShardingError

T = TypeVar("T")


def read(table: Mapping[str, T], tensors: Iterable[tuple[str, ...]], buffers: Iterable[str] = ()) -> dict[str, T]:
    """What a table says of each tensor, by its first name; who is not in it is not in the result.

    A pattern is a name in which `*` stands for any text, dots included. A tensor that has several names (tied weights)
    may be found by any of them. Raises `ShardingError` with all patterns that match nothing, or `buffers` alone, and
    all tensors of which two patterns say different things.

    Example:
        >>> read({"*.up.weight": "ff@tensor embed"}, [("layers.0.up.weight",), ("layers.0.norm.weight",)])
        {'layers.0.up.weight': 'ff@tensor embed'}
    """
    found, wrong = looked_up(table, tensors, buffers)
    if wrong:
        refuse(wrong)
    return found


def looked_up(
    table: Mapping[str, T], tensors: Iterable[tuple[str, ...]], buffers: Iterable[str] = ()
) -> tuple[dict[str, T], list[str]]:
    """`read`, and what it refuses."""
    every, others = list(tensors), list(buffers)
    names = [name for names in every for name in names]
    wrong = [
        f"{pattern!r} matches no parameter{_instead(pattern, names, others)}"
        for pattern in table
        if not any(matches(pattern, name) for name in names)
    ]
    found: dict[str, T] = {}
    for own in every:
        said = {p: value for p, value in table.items() if any(matches(p, name) for name in own)}
        if len({str(value) for value in said.values()}) > 1:
            texts = " and ".join(f"{str(value)!r} by {pattern!r}" for pattern, value in said.items())
            wrong.append(f"{' = '.join(own)} is {texts}")
        elif said:
            found[own[0]] = next(iter(said.values()))
    return found, wrong


def refuse(wrong: Sequence[str], *more: ShardingError) -> NoReturn:
    """Raise one error for what is wrong with a table, and `more` that is, by itself."""
    rules = ("every pattern matches some parameter, and a parameter has one spec", *(x.rule for x in more))
    remedies = (
        "mend the patterns: names are those of module.named_parameters(), and `*` stands for any text",
        *(x.remedy for x in more),
    )
    raise ShardingError(
        "the table of specs does not fit the module",
        [*wrong, *(text for x in more for text in x.offenders or [x.what])],
        rule=_joined(rules),
        remedy=_joined(remedies),
    )


def _joined(texts: Iterable[str | None]) -> str:
    """What each says, once."""
    return "; ".join(dict.fromkeys(part for text in texts if text for part in text.split("; ")))


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern, in which `*` stands for any text, and everything else for itself.

    Example:
        >>> matches("h.*.weight", "h.0.up.weight"), matches("b?", "b1")
        (True, False)
    """
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def numberless(name: str, count: int = 0) -> str:
    """The name with `*` for its numbers, or the first `count` of them.

    Example:
        >>> numberless("h.0.mlp.2.w1"), numberless("h.0.mlp.2.w1", 1)
        ('h.*.mlp.*.w1', 'h.*.mlp.2.w1')
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=count)


def _instead(pattern: str, names: list[str], buffers: list[str]) -> str:
    """What a pattern matches, or nearly matches, instead."""
    if found := [name for name in buffers if matches(pattern, name)]:
        return f"; {found[0]!r} is a buffer, and buffers stay whole on every device"
    near = difflib.get_close_matches(pattern.replace("*", ""), names, 1, 0.4)
    return f"; the nearest name is {near[0]!r}" if near else ""
