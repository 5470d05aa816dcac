"""Puts other tensors, for a while, in the places where a function finds some; a tuple is replaced by another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardlib.frontend.guards.mutable_places import Item, Place
from shardlib.frontend.side_effects.containers import FIXED, is_by_tensor, put, refill
from shardlib.frontend.side_effects.snapshot import Snapshot


class Substitution:
    """`places` maps each place to its stand-in; `tuples` maps the id of a tuple to its stand-in and itself.

    With `keys`, keys of dicts and items of sets may be replaced, too, by `put_keys`.
    """

    def __init__(self, before: Snapshot, *, keys: bool = False) -> None:
        self.before, self.keys = before, keys
        self.places: dict[Place, Any] = {}
        self.tuples: dict[int, tuple[Any, Any]] = {}

    def put(self, x: Any, instead: Any) -> bool:
        """Puts a stand-in wherever an object is held; returns whether all holders can hold another one."""
        places = self.before.places_of(x)
        if not places or not all(map(self._can_hold, places)):
            return False
        for place in places:
            self._stand(place, instead)
        return True

    def put_keys(self, instead: Mapping[int, Any]) -> None:
        """Replaces keys of dicts (an optimizer's parameters) and items of sets, by id; called after `put`."""
        for number in self.before.copies:
            owner = self.before.owners[number]
            if isinstance(owner, dict | set) and not instead.keys().isdisjoint(map(id, owner)):
                keys = [instead.get(id(key), key) for key in owner]
                refill(owner, dict(zip(keys, owner.values(), strict=True)) if isinstance(owner, dict) else set(keys))

    def again(self) -> None:
        """Puts all stand-ins in their places once more."""
        for place, x in self.places.items():
            put(*self._holder(place), x)

    def end(self, now: Mapping[Place, Any]) -> None:
        """Gives the places what they held, where a stand-in is in them `now`."""
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
        """Returns the holder of a place, and the key."""
        owner, key = place
        if isinstance(key, Item):
            return self.before.values[owner, key.key], key.index
        return self.before.owners.get(owner), key

    def _stand(self, place: Place, x: Any) -> None:
        """Puts a stand-in at a place; in a tuple, by another tuple."""
        owner, key = self._holder(place)
        if isinstance(owner, set):
            return
        if type(owner) is not tuple:
            put(owner, key, x)
            self.places[place] = x
            return
        held, _ = self.tuples.get(id(owner), (owner, owner))
        replaced = (*held[:key], x, *held[key + 1 :])
        self.tuples[id(owner)] = replaced, owner
        for around in self.before.places_of(owner):
            self._stand(around, replaced)
