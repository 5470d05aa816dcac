"""What changes where a function found it, as its programs know it from call to call."""

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
    """The name of an item of a tuple, or of a list: which one, and what their holder has these under.

    Whoever changes an item of a tuple puts another tuple in its place.
    """

    key: Any
    index: int


def items(place: Place, x: Any) -> Iterator[tuple[Place, Any]]:
    """The numbers in a tuple, or in a list, that is at a place; of a tuple, those in tuples in it, too."""
    if type(x) is tuple or type(x) is list:
        for i, y in enumerate(x[:SHORT]):
            at = place[0], Item(place[1], i)
            if type(y) in NUMBERS:
                yield at, y
            elif type(x) is type(y) is tuple:
                yield from items(at, y)


def containing(place: Place) -> Iterator[Place]:
    """The place, and those of the tuples and lists in which it is an item."""
    yield place
    while isinstance(place[1], Item):
        place = place[0], place[1].key
        yield place


class Changing:
    """`numbers`, which the function changes or its caller, are inputs; `holders`, the containers and tensors in which
    the function changes something, count by identity.

    So do `logs`, to which it, or its caller, appends without its reading them: what is in them does not count. Nor does
    a `.grad` as it is found, until some trace has looked at one (`grads`).
    """

    def __init__(self, *, grads: bool = True) -> None:
        self.grads = grads
        self.numbers: set[Place] = set()
        self.inside: set[Place] = set()  # tuples and lists that have some of them
        self.rates: set[Place] = set()  # of them: what schedulers set, which optimizers of torch's take as they are
        self.holders: set[int] = set()
        self.logs: dict[int, Any] = {}  # which are kept, so that nothing else has their ids
        self._seen: dict[Place, Any] = {}  # numbers, when the function was last traced

    @property
    def anything(self) -> bool:
        return bool(self.numbers or self.holders or self.logs)

    def is_noted(self, container: int) -> bool:
        """Whether a container counts in another way than by what is in it."""
        return container in self.holders or container in self.logs

    def compare(self, values: Mapping[Place, Any]) -> set[Place]:
        """Places, none of `numbers`, with other numbers than when such a place was last traced; these are noted."""
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
        """Note more of it; what is read now, is no log."""
        for i in no_logs:
            del self.logs[i]
        for place in numbers:
            own, *around = containing(place)
            self.numbers.add(own)
            self.inside.update(around)
        self.holders.update(holders)
        self.logs.update(logs)
