"""Reads a table from patterns of parameter names to specs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, TypeVar

from shardlib.core.errors import ShardingError

T = TypeVar("T")


def read_table(table: Mapping[str, T], tensors: Iterable[tuple[str, ...]], buffers: Iterable[str] = ()) -> dict[str, T]:
    """Returns a table's value for each matched tensor, by the tensor's first name.

    A pattern is a name in which `*` stands for any text, dots included. It may match any name of a tensor that has
    several (tied weights). Raises `ShardingError` with all patterns that match no parameter, and all tensors whose
    patterns have different values.
    """
    values, wrong = match_table(table, tensors, buffers)
    if wrong:
        refuse_table(wrong)
    return values


def match_table(
    table: Mapping[str, T], tensors: Iterable[tuple[str, ...]], buffers: Iterable[str] = ()
) -> tuple[dict[str, T], list[str]]:
    """Returns the table's value for each tensor, as `read_table` does, and the faults of the table."""
    name_lists, buffer_names = list(tensors), list(buffers)
    names = [name for own in name_lists for name in own]
    wrong = [
        f"{pattern!r} matches no parameter{_describe_near_match(pattern, names, buffer_names)}"
        for pattern in table
        if not any(matches(pattern, name) for name in names)
    ]
    result: dict[str, T] = {}
    for own in name_lists:
        values = {p: value for p, value in table.items() if any(matches(p, name) for name in own)}
        if len({str(value) for value in values.values()}) > 1:
            texts = " and ".join(f"{str(value)!r} by {pattern!r}" for pattern, value in values.items())
            wrong.append(f"{' = '.join(own)} is {texts}")
        elif values:
            result[own[0]] = next(iter(values.values()))
    return result, wrong


def refuse_table(wrong: Sequence[str], *more: ShardingError) -> NoReturn:
    """Raises one error for the faults of a table and `more` errors of its specs."""
    rules = ("every pattern matches some parameter, and a parameter has one spec", *(x.rule for x in more))
    remedies = (
        "mend the patterns: names are those of module.named_parameters(), and `*` stands for any text",
        *(x.remedy for x in more),
    )
    raise ShardingError(
        "the table of specs does not fit the module",
        [*wrong, *(text for x in more for text in x.offenders or [x.what])],
        rule=_join_distinct(rules),
        remedy=_join_distinct(remedies),
    )


def _join_distinct(texts: Iterable[str | None]) -> str:
    return "; ".join(dict.fromkeys(part for text in texts if text for part in text.split("; ")))


def matches(pattern: str, name: str) -> bool:
    """True if a name fits a pattern, in which `*` stands for any text.

    Example:
        >>> matches("h.*.weight", "h.0.up.weight"), matches("b?", "b1")
        (True, False)
    """
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def _describe_near_match(pattern: str, names: list[str], buffers: list[str]) -> str:
    """Describes the buffer that a pattern matches, or the nearest name."""
    if matched := [name for name in buffers if matches(pattern, name)]:
        return f"; {matched[0]!r} is a buffer, and buffers stay whole on every device"
    near = difflib.get_close_matches(pattern.replace("*", ""), names, 1, 0.4)
    return f"; the nearest name is {near[0]!r}" if near else ""
