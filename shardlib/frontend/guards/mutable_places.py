"""Names the places that a function, or its caller, changes from call to call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Place = tuple[int, Any]  # id of who holds something (a dict of globals, a cell, an object ...), and its name there
Facts = tuple[Any, ...]
NUMBERS = (int, float)
_NONE: Mapping[int, Any] = MappingProxyType({})
MANY = 100_000
SHORT = 64  # items of a tuple, or of a list, that are places


@dataclass(frozen=True)
class Item:
    """The name of an item of a tuple or list: its index, and the key under which a holder has the tuple or list.

    An item of a tuple changes when another tuple takes its place.
    """

    key: Any
    index: int


def items(place: Place, x: Any) -> Iterator[tuple[Place, Any]]:
    """Yields the numbers in the tuple or list at a place; for a tuple, also those in tuples inside."""
    if type(x) is tuple or type(x) is list:
        for i, y in enumerate(x[:SHORT]):
            at = place[0], Item(place[1], i)
            if type(y) in NUMBERS:
                yield at, y
            elif type(x) is type(y) is tuple:
                yield from items(at, y)


def containing(place: Place) -> Iterator[Place]:
    """Yields the place, and those of the tuples and lists in which it is an item."""
    yield place
    while isinstance(place[1], Item):
        place = place[0], place[1].key
        yield place


class Changing:
    """The `numbers` that the function or its caller changes are inputs of the program.

    `holders` are the containers and tensors in which the function changes something. They count by identity. So do
    `logs`, the lists that grow and that the function does not read: their items do not count. A `.grad` does not count
    until some trace has looked at one (`grads`).
    """

    def __init__(self, *, grads: bool = True) -> None:
        self.grads = grads
        self.numbers: set[Place] = set()
        self.inside: set[Place] = set()  # tuples and lists that have some of them
        self.rates: set[Place] = set()  # numbers that schedulers set; torch's optimizers take them as inputs
        self.holders: set[int] = set()
        self.logs: dict[int, Any] = {}  # which are kept, so that nothing else has their ids
        self._seen: dict[Place, Any] = {}  # numbers, when the function was last traced

    @property
    def anything(self) -> bool:
        return bool(self.numbers or self.holders or self.logs)

    def is_noted(self, container: int) -> bool:
        """Returns whether a container counts by identity instead of by its items."""
        return container in self.holders or container in self.logs

    def compare(self, values: Mapping[Place, Any]) -> set[Place]:
        """Notes all numbers; returns the places, not in `numbers`, whose numbers differ from the last trace."""
        was, now = self._seen, {place: x for place, x in values.items() if type(x) in NUMBERS}
        self._seen = (was if len(was) < MANY else {}) | now
        return {p for p, x in now.items() if type(was.get(p)) is type(x) and was[p] != x and p not in self.numbers}

    def add(
        self,
        numbers: Iterable[Place],
        holders: Iterable[int] = (),
        logs: Mapping[int, Any] = _NONE,
        no_logs: Iterable[int] = (),
    ) -> None:
        """Notes more changes; the lists `no_logs` are read now."""
        for i in no_logs:
            del self.logs[i]
        for place in numbers:
            own, *around = containing(place)
            self.numbers.add(own)
            self.inside.update(around)
        self.holders.update(holders)
        self.logs.update(logs)
