"""Names the places that a function, or its caller, changes from call to call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Place = tuple[int, Any]  # the id of a container (a dict of globals, a cell, an object ...), and a name or key in it
Facts = tuple[Any, ...]
NUMBERS = (int, float)
_NONE: Mapping[int, Any] = MappingProxyType({})
MANY = 100_000  # numbers that are remembered from trace to trace
SHORT = 64  # the first items of a tuple or list, which are places


@dataclass(frozen=True)
class Item:
    """Names an item of a tuple or list: by its index, and by the key under which a container has the tuple or list.

    An item of a tuple changes when another tuple replaces the tuple.
    """

    key: Any
    index: int


def number_items(place: Place, x: Any) -> Iterator[tuple[Place, Any]]:
    """Yields the numbers in the tuple or list at a place; in a tuple, also those of nested tuples."""
    if type(x) is tuple or type(x) is list:
        for i, y in enumerate(x[:SHORT]):
            at = place[0], Item(place[1], i)
            if type(y) in NUMBERS:
                yield at, y
            elif type(x) is type(y) is tuple:
                yield from number_items(at, y)


def enclosing_places(place: Place) -> Iterator[Place]:
    """Yields the place, then the places of the tuples and lists that contain it."""
    yield place
    while isinstance(place[1], Item):
        place = place[0], place[1].key
        yield place


class MutablePlaces:
    """The places that a function or its caller changes; the key of a call leaves their values out.

    `numbers` are places of numbers, which are inputs of the program. `containers` are the ids of the containers and
    tensors in which the function changes something. They count by identity. So do `logs`, the lists that
    grow and that the function does not read: their items do not count. A `.grad` counts only after a trace has read one
    (`grads`).
    """

    def __init__(self, *, grads: bool = True) -> None:
        self.grads = grads
        self.numbers: set[Place] = set()
        self.inside: set[Place] = set()  # tuples and lists that contain such numbers
        self.rates: set[Place] = set()  # numbers that schedulers set, which torch's optimizers take as inputs
        self.containers: set[int] = set()
        self.logs: dict[int, Any] = {}  # by id; kept alive, so that no other object gets the id
        self._seen: dict[Place, Any] = {}  # numbers at the last trace

    @property
    def anything(self) -> bool:
        return bool(self.numbers or self.containers or self.logs)

    def is_noted(self, container: int) -> bool:
        """Returns whether a container counts by identity, not by its items."""
        return container in self.containers or container in self.logs

    def compare(self, values: Mapping[Place, Any]) -> set[Place]:
        """Stores all numbers; returns the places outside `numbers` whose numbers differ from the last trace."""
        was, now = self._seen, {place: x for place, x in values.items() if type(x) in NUMBERS}
        self._seen = (was if len(was) < MANY else {}) | now
        return {p for p, x in now.items() if type(was.get(p)) is type(x) and was[p] != x and p not in self.numbers}

    def add(
        self,
        numbers: Iterable[Place],
        containers: Iterable[int] = (),
        logs: Mapping[int, Any] = _NONE,
        no_logs: Iterable[int] = (),
    ) -> None:
        """Adds changed places; removes the lists `no_logs`, which the code reads now, from the logs."""
        for i in no_logs:
            del self.logs[i]
        for place in numbers:
            own, *around = enclosing_places(place)
            self.numbers.add(own)
            self.inside.update(around)
        self.containers.update(containers)
        self.logs.update(logs)
