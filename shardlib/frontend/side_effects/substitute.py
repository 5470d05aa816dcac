"""Other tensors in the places where a function finds some, for a while; in a tuple, this is another tuple."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardlib.frontend.side_effects.containers import FIXED, is_by_tensor, put, refill
from shardlib.frontend.side_effects.mutable_places import Item, Place
from shardlib.frontend.side_effects.snapshot import Snapshot


class Substitution:
    """`places`, with what stands there; what stands for `tuples`, and these, by their ids.

    `before` is what was found before. With `keys`, those of dicts and items of sets may be others, by `put_keys`.
    """

    def __init__(self, before: Snapshot, *, keys: bool = False) -> None:
        self.before, self.keys = before, keys
        self.places: dict[Place, Any] = {}
        self.tuples: dict[int, tuple[Any, Any]] = {}

    def put(self, x: Any, instead: Any) -> bool:
        """Let something stand wherever another thing is held; whether it can."""
        places = self.before.places_of(x)
        if not places or not all(map(self._can_hold, places)):
            return False
        for place in places:
            self._stand(place, instead)
        return True

    def put_keys(self, instead: Mapping[int, Any]) -> None:
        """The same of the keys of dicts (an optimizer's parameters) and of sets, by ids; when all else stands."""
        for number in self.before.copies:
            owner = self.before.owners[number]
            if isinstance(owner, dict | set) and not instead.keys().isdisjoint(map(id, owner)):
                keys = [instead.get(id(key), key) for key in owner]
                refill(owner, dict(zip(keys, owner.values(), strict=True)) if isinstance(owner, dict) else set(keys))

    def again(self) -> None:
        """Put what stands somewhere there once more."""
        for place, x in self.places.items():
            put(*self._holder(place), x)

    def end(self, now: Mapping[Place, Any]) -> None:
        """Give back what was there, where that stands `now`."""
        for place, x in self.places.items():
            if now.get(place) is x:
                put(*self._holder(place), self.before.values[place])
        self.places, self.tuples = {}, {}

    def _can_hold(self, place: Place) -> bool:
        owner, key = self._holder(place)
        if type(owner) is tuple:  # another one can stand where it does
            around = self.before.places_of(owner)
            return bool(around) and all(map(self._can_hold, around))
        if self.keys and isinstance(owner, set):
            return True
        return owner is not None and not isinstance(owner, FIXED) and (self.keys or not is_by_tensor(key))

    def _holder(self, place: Place) -> tuple[Any, Any]:
        """Who holds what is at a place, and under which key."""
        owner, key = place
        if isinstance(key, Item):
            return self.before.values[owner, key.key], key.index
        return self.before.owners.get(owner), key

    def _stand(self, place: Place, x: Any) -> None:
        """Let something else stand at a place; in a tuple, this is another tuple."""
        owner, key = self._holder(place)
        if isinstance(owner, set):
            return
        if type(owner) is not tuple:
            put(owner, key, x)
            self.places[place] = x
            return
        held, _ = self.tuples.get(id(owner), (owner, owner))
        made = (*held[:key], x, *held[key + 1 :])
        self.tuples[id(owner)] = made, owner
        for around in self.before.places_of(owner):
            self._stand(around, made)
