"""Finds the values that depend on others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def find_dependents(steps: Iterable[tuple[Iterable[T], Iterable[T]]], sources: Iterable[T]) -> set[T]:
    """Returns the values that steps compute from any of `sources`, and `sources`.

    Each step, in the order of the program, is a pair: the values that it reads, and those that it makes.

    Example:
        >>> sorted(find_dependents([("a", "bc"), ("x", "y"), ("cy", "z")], "a"))
        ['a', 'b', 'c', 'z']
    """
    result = {*sources}
    for reads, makes in steps:
        if not result.isdisjoint(reads):
            result.update(makes)
    return result
