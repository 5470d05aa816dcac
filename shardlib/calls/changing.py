"""What changes where a function found it, as its programs know it from call to call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Place = tuple[int, Any]  # id of who holds something (a dict of globals, a cell, an object ...), and its name there
Facts = tuple[Any, ...]
NUMBERS = (int, float)
MANY = 100_000


class Changing:
    """`numbers`, which the function changes or its caller, are inputs; `holders`, the containers and tensors in which
    the function changes something, count by identity.

    So do `logs`, to which it appends without reading them: what is in them does not count.
    """

    def __init__(self) -> None:
        self.numbers: set[Place] = set()
        self.rates: set[Place] = set()  # of them: learning rates, at which optimizers of torch's do not look
        self.holders: set[int] = set()
        self.logs: dict[int, Any] = {}  # which are kept, so that nothing else has their ids
        self._seen: dict[Place, Any] = {}  # numbers, when the function was last traced

    @property
    def anything(self) -> bool:
        return bool(self.numbers or self.holders or self.logs)

    def compare(self, values: Mapping[Place, Any]) -> set[Place]:
        """Places, none of `numbers`, with other numbers than when such a place was last traced; these are noted."""
        was, now = self._seen, {place: x for place, x in values.items() if type(x) in NUMBERS}
        self._seen = (was if len(was) < MANY else {}) | now
        return {p for p, x in now.items() if type(was.get(p)) is type(x) and was[p] != x and p not in self.numbers}

    def add(self, numbers: Iterable[Place], holders: Iterable[int], logs: Mapping[int, Any]) -> None:
        """Note more of it."""
        self.numbers.update(numbers)
        self.holders.update(holders)
        self.logs.update(logs)
