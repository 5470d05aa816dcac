"""What a function itself changes where it was found, as its programs know it from call to call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Place = tuple[int, Any]  # id of who holds something (a dict of globals, a cell, an object ...), and its name there
Facts = tuple[Any, ...]


class Changing:
    """`numbers` are inputs; `holders`, the containers and tensors in which it changes something, count by identity.

    So do `logs`, to which it appends without reading them: what is in them does not count.
    """

    def __init__(self) -> None:
        self.numbers: set[Place] = set()
        self.holders: set[int] = set()
        self.logs: dict[int, Any] = {}  # which are kept, so that nothing else has their ids

    @property
    def anything(self) -> bool:
        return bool(self.numbers or self.holders or self.logs)

    def add(self, numbers: Iterable[Place], holders: Iterable[int], logs: Mapping[int, Any]) -> None:
        """Note more of it."""
        self.numbers.update(numbers)
        self.holders.update(holders)
        self.logs.update(logs)
