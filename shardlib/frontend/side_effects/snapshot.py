"""Records every place that a function reaches, to compare it before and after a trace and to put it back."""

from __future__ import annotations

import array
import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardlib.core.torch_internals.torch_private import FakeTensor
from shardlib.frontend.guards.mutable_places import NUMBERS, Facts, MutablePlaces, Place, number_items
from shardlib.frontend.guards.number_inputs import is_traced_number
from shardlib.frontend.guards.state_walk import LENGTH, StateWalk
from shardlib.frontend.guards.value_kinds import (
    CONTAINERS,
    PLAIN,
    QUICK,
    Description,
    can_library_read,
    describe_value,
    is_cache,
    is_user_object,
    numpy_kind,
)
from shardlib.frontend.side_effects.leaks import Leak

LARGE = 1 << 26  # bytes of an array; larger ones are not copied, so what a function that raises wrote there stays


class Snapshot(StateWalk):
    """A `StateWalk` that keeps all places.

    By place: `found` are facts about its value, `values` the value itself, `called` its name in parts. By id: `owners`
    are the holders, `copies` the items of those that are containers. `described` tells the values to a reader, by name:
    a plain value, or words. `leaks` are values of a trace; `leaked` says that a number of one is among them.
    """

    def __init__(self, own: Any = None, changing: MutablePlaces | None = None) -> None:
        super().__init__(own, changing)
        self.quick, self.notes = False, True
        self.found: dict[Place, Facts] = {}
        self.values: dict[Place, Any] = {}
        self.called: dict[Place, tuple[Any, ...]] = {}
        self.owners: dict[int, Any] = {}
        self.copies: dict[int, Any] = {}
        self.described: list[tuple[tuple[Any, ...], Any, Description | None]] = []
        self.leaks: list[Leak] = []
        self.leaked = False
        self._log = False  # whether one is being read
        self.caches: list[tuple[Any, int]] = []  # each with the number of results that it had to compute

    def text(self, place: Place) -> str:
        """Returns the name of a place."""
        return self.name(self.called[place])

    def changed(self, before: Snapshot) -> dict[Place, Facts]:
        """Returns the places that are new or hold another value than before, with the facts about it."""
        if self is before:
            return {}
        return {place: now for place, now in self.found.items() if before.found.get(place) != now}

    def is_like(self, before: Snapshot) -> bool:
        """Returns whether every place holds what it held, in the same order; a container may have other items."""
        if self.leaked or self.leaks or self.caches != before.caches or self.found != before.found:
            return False
        pairs = zip(self.values.items(), before.values.items(), strict=False)
        return len(self.values) == len(before.values) and all(
            place == at and (x is y or type(x) in QUICK) for (place, x), (at, y) in pairs
        )

    def places_of(self, x: Any) -> list[Place]:
        """Returns the places that hold an object."""
        return self._held_at.get(id(x), [])

    @functools.cached_property
    def _held_at(self) -> dict[int, list[Place]]:
        """Maps the id of each object to its places."""
        places: dict[int, list[Place]] = defaultdict(list)
        for place, x in self.values.items():
            places[id(x)].append(place)
        return places

    def is_log(self, container: int) -> bool:
        """Returns whether the code only appends to the names of this list, and reads none of them."""
        if not self.logs or not (names := self._names_of(container)):
            return False
        return self.logs.issuperset(names) and not self._is_of_library(container)

    def grown(self, changed: Iterable[Place]) -> dict[int, Any]:
        """Returns the lists whose lengths the caller has `changed` and that the code does not read."""
        containers = {place[0] for place in changed if place[1] is LENGTH}
        return {i: self.owners[i] for i in containers if self._names_of(i) and not self._is_read(i)}

    def read_logs(self) -> set[int]:
        """Returns the logs that the code, which may be other code than before, reads now."""
        return set(filter(self._is_read, self.changing.logs))

    def _is_read(self, container: int) -> bool:
        return not self.read_names.isdisjoint([*self._names_of(container), "*"]) or self._is_of_library(container)

    def _is_of_library(self, container: int) -> bool:
        """Returns whether code of a library may read a list, or a container or an object that holds it."""
        todo, seen = [container], {container}
        for inner in todo:
            for holder, key in self._held_at.get(inner, []):
                x = self.owners.get(holder)
                kind: Any = type(x)
                if not isinstance(x, CONTAINERS) and can_library_read(kind, key):
                    return True
                if isinstance(x, CONTAINERS) and holder not in seen:
                    seen.add(holder)
                    todo.append(holder)
        return False

    def _names_of(self, container: int) -> list[str]:
        """Returns the names of a list, wherever it is held."""
        if type(self.owners.get(container)) is not list:
            return []
        held = [self.called[place] for place in self._held_at.get(container, [])]
        return [next((x for x in reversed(at) if isinstance(x, str)), "").rpartition(".")[2] for at in held]

    def _visit_user_attributes(self, x: torch.Tensor, facts: list[Any]) -> None:
        self.owners[id(x)] = x
        super()._visit_user_attributes(x, facts)

    def visit_argument_object(self, x: Any, facts: list[Any], leaf: int) -> None:
        self.described.append(((leaf,), None, describe_value(x)))
        super().visit_argument_object(x, facts, leaf)

    def visit_variable(self, name: str, x: Any, facts: list[Any], container: Any = None, key: Any = None) -> None:
        self.owners[id(container)] = container
        super().visit_variable(name, x, facts, container, key)

    def _visit_attribute(self, owner: int, name: Any, x: Any, facts: list[Any], depth: int) -> None:
        start, place, at = len(facts), (owner, name), self._path
        if (kind := type(x)) in QUICK and not (kind in NUMBERS and place in self.changing.numbers):  # most are
            entry = name, kind, x if kind is not float else x.hex()
            facts += entry
            if not self._log:
                self.found[place] = entry
            self.values[place], self.called[place] = x, at
            if name is not LENGTH:
                self.described.append((at, x, None))
            return
        if kind in _EMPTY and not x and not self._log and not self.changing.is_noted(id(x)):  # modules have many
            inner = (number := id(x)), LENGTH
            facts += (name, kind, *_NONE_IN_IT)
            self.found[place], self.found[inner] = (kind, number), _NONE_IN_IT
            self.values[place], self.values[inner] = x, 0
            self.called[place] = self.called[inner] = at
            self.owners[number], (self.copies[number], words) = x, _EMPTY[kind]
            self.described.append((at, None, words))
            return
        super()._visit_attribute(owner, name, x, facts, depth)
        deep = kind not in PLAIN and (isinstance(x, _DEEP) or is_user_object(x))
        if not self._log:
            self.found[place] = (type(x), *_identity_of(x)) if deep or kind is MethodType else tuple(facts[start:])
        self.values[place], self.called[place] = x, at
        if kind is tuple or kind is list:
            self.values.update(number_items(place, x))
        if name is not LENGTH:
            self.described.append((at, None, describe_value(x)))
        if isinstance(x, FakeTensor):
            self.leaks.append(Leak(self.owners.get(owner), place, self.name(at), x))
        elif is_cache(x):
            self.caches.append((x, x.cache_info().misses))

    def _visit_value(self, x: Any, facts: list[Any], depth: int) -> None:
        if is_traced_number(x):
            self.leaked = True
        super()._visit_value(x, facts, depth)

    def _visit_container(self, x: Any, facts: list[Any], depth: int, place: Place | None = None) -> None:
        self.owners[id(x)] = x
        if isinstance(x, _CHANGING):
            self.copies[id(x)] = x.copy() if type(x) is dict or type(x) is list else copy.copy(x)
        outside, self._log = self._log, self._log or id(x) in self.changing.logs
        super()._visit_container(x, facts, depth, place)
        self._log = outside

    def _visit_object(self, x: Any, facts: list[Any], depth: int) -> None:
        is_buffer = isinstance(x, bytearray | array.array) or (numpy_kind(x) == "ndarray" and x.flags.writeable)
        if is_buffer and getattr(x, "nbytes", 0) <= LARGE:
            self.copies[id(x)] = copy.copy(x)
        super()._visit_object(x, facts, depth)

    def _was_visited(self, x: Any, facts: list[Any]) -> bool:
        self.owners[id(x)] = x
        return super()._was_visited(x, facts)


def _identity_of(x: Any) -> tuple[int, ...]:
    """Returns the identity of an object; that of a method, which is made anew for each read, is its two parts."""
    return (id(x.__func__), id(x.__self__)) if type(x) is MethodType else (id(x),)


_CHANGING = (list, dict, set, deque)
_DEEP = (nn.Module, *CONTAINERS)
EMPTY = OrderedDict, dict, list  # kinds of containers that are often empty
# An empty copy of each kind, and words for it.
_EMPTY: dict[Any, tuple[Any, Description]] = {kind: (kind(), describe_value(kind())) for kind in (*EMPTY, set)}
_NONE_IN_IT = (LENGTH, int, 0)
