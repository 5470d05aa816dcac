"""What a function itself changes where it was found, as its programs remember it from call to call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardlib.bounded import Bounded

Place = tuple[int, Any]  # id of who holds something (a dict of globals, a cell, an object ...), and its name there
Facts = tuple[Any, ...]


class Changing:
    """What a function itself changes where it was found.

    `numbers`, which are inputs, and `containers` of plain values, which count by identity: every call changes them.
    `left` is anything else, as the last trace left it.
    """

    def __init__(self) -> None:
        self.left: Bounded[Place, Facts] = Bounded(1 << 14)
        self.numbers: set[Place] = set()
        self.containers: set[int] = set()
        self.anything = False

    def add(self, left: Mapping[Place, Facts], numbers: Iterable[Place], containers: Iterable[int]) -> None:
        """Note more of it."""
        for place, facts in left.items():
            self.left[place] = facts
        self.numbers.update(numbers)
        self.containers.update(containers)
        self.anything = bool(self.left or self.numbers or self.containers)
