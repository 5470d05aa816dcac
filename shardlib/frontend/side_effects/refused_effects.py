"""Refuses changes that no call of a program can repeat, and names each place, the user's line and a remedy.

The function is traced once, on shapes. When it has returned and all that a call repeats is undone, every object and
container that the function reaches holds what it held before; what differs then is refused, and put back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from shardlib.core.errors import SideEffectError
from shardlib.frontend.guards.mutable_places import Item, Place
from shardlib.frontend.guards.state_walk import LENGTH, LONG
from shardlib.frontend.guards.value_kinds import hash_buffer, is_cache, numpy_kind
from shardlib.frontend.side_effects.containers import APPENDED, GONE, is_by_tensor, is_refilled, is_reordered
from shardlib.frontend.side_effects.snapshot import Snapshot


class Effect(NamedTuple):
    """A change at a place, which has this name in parts, and what to write instead."""

    place: tuple[Any, ...]
    change: str
    remedy: str


def unsupported_effects(
    before: Snapshot, after: Snapshot, refused: Mapping[Place, Any], logs: Mapping[int, Any]
) -> list[Effect]:
    """Returns the differences between two snapshots, but for those in `logs`, which only grow.

    `refused` are new values that no call can make again, by the places that the function binds them to.
    """
    refused = {place: value for place, value in refused.items() if not _is_torch_cache(before, place)}
    effects = [_effect_of_value(_name_parts(before, after, place), place, value) for place, value in refused.items()]
    skipped = {*logs, *(owner for owner, _ in refused), *map(id, refused.values())}
    for number, items in before.copies.items():
        if number not in skipped and _differs(before.owners[number], items):
            skipped.add(number)
            effects.append(_effect_on_container(before, number))
    for place in after.changed(before):
        owner, key = place
        value = after.values.get(place, GONE)
        is_inside_new = owner in after.owners and owner not in before.owners
        is_part = key == LENGTH or isinstance(key, Item) or is_inside_new
        is_cached = is_cache(value) or _is_torch_cache(before, place)  # `leaks` empties caches
        if not (is_part or is_cached or skipped & {owner, id(value)}):
            effects.append(_effect_of_value(_name_parts(before, after, place), place, value))
    return effects


def refuse_effects(
    name: str, effects: Sequence[Effect], text: Callable[[tuple[Any, ...]], str], line: Callable[[Any], str]
) -> None:
    """Raises `SideEffectError` for changes that no call can repeat.

    `text` is a place in words; `line` says where the function reads it.
    """
    if effects:
        raise SideEffectError(
            f"{name} has side effects that its calls cannot repeat",
            list(dict.fromkeys(f"{text(x.place)}{line(x.place)}: {x.change}" for x in effects)),
            rule="each call binds tensors, numbers, texts, and tuples, lists and dicts of these, to attributes, list "
            "items, dict values and variables; appends to lists; adds keys to dicts; sets .grad; steps optimizers, "
            "schedulers and scalers",
            remedy="; ".join(dict.fromkeys(x.remedy for x in effects)),
        )


def _is_torch_cache(before: Snapshot, place: Place) -> bool:
    """Returns whether torch computes an attribute again where it is stale: references to the weights of an RNN."""
    owner, key = place
    return key == "_flat_weight_refs" and isinstance(before.owners.get(owner), nn.RNNBase)


def _name_parts(before: Snapshot, after: Snapshot, place: Place) -> tuple[Any, ...]:
    """Returns the name of a place, in parts; without one, its container's name."""
    names = (x.called.get(at) for at in (place, (place[0], LENGTH)) for x in (after, before))
    return next(filter(None, names), (str(place[1]),))


def _differs(owner: Any, items: Any) -> bool:
    """Returns whether a container, or an array, holds other items than before, or the same in another order."""
    if isinstance(owner, list | dict | set | deque):
        return bool(items or owner) and is_refilled(owner, items)
    now, was = (x if numpy_kind(x) else memoryview(x) for x in (owner, items))
    return hash_buffer(now) != hash_buffer(was)


def _effect_on_container(before: Snapshot, container: int) -> Effect:
    owner, items = before.owners[container], before.copies[container]
    holder = next(iter(before.places_of(owner)), (container, LENGTH))
    name = before.called.get(holder) or before.called.get((container, LENGTH), ("a container",))
    kind = type(owner).__name__
    if isinstance(owner, set):
        return Effect(name, f"the items of a {kind} change", "hold the items as keys of a dict, seen[key] = True")
    if isinstance(owner, deque):
        return Effect(name, f"the items of a {kind} change", "hold a list and an index, ring[self.i] = x")
    if not isinstance(owner, list | dict):
        return Effect(name, f"the elements of a {kind} change", _TENSOR)
    if max(len(owner), len(items)) > LONG:
        return Effect(name, f"items of a {kind} of more than {LONG} change", _TENSOR)
    if isinstance(owner, dict) and (is_reordered(owner, items) or len(owner) < len(items)):
        is_deleted = any(k not in owner for k in items)
        change = f"a key of a {kind} is deleted" if is_deleted else f"the keys of a {kind} change their order"
        return Effect(name, change, "bind a new dict, self.d = {k: v for k, v in self.d.items() if ...}")
    if len(owner) < len(items):
        return Effect(name, f"items of a {kind} are removed", "bind a new list, self.items = [...]")
    return Effect(name, f"an item of a {kind} is another object", _VALUES)


def _effect_of_value(name: tuple[Any, ...], place: Place, value: Any) -> Effect:
    """Returns the effect of binding a value that no call can make again."""
    kind = type(value).__name__
    if is_by_tensor(place[1]):
        return Effect(name, "a tensor is the key of a new item", "use a name or a number as the key")
    if place[1] is APPENDED:
        return Effect(name, "other objects are appended", _VALUES)
    if isinstance(value, tuple | list | dict):
        return Effect(name, f"a {kind} of other objects is bound", _VALUES)
    if isinstance(value, set | frozenset | deque):
        return Effect(name, f"another {kind} is bound", "bind a list or a dict")
    remedy = "make the object before the first call, and set its attributes; or return it"
    return Effect(name, f"another object, a {kind}, is bound" if value is not GONE else "it is deleted", remedy)


_TENSOR = "hold a tensor, and write to it in place"
_VALUES = "hold tensors, numbers and texts in it"
