"""Gives a holder (a cell, a container, a class, a module, an object) another value, or the one that it had."""

from __future__ import annotations

import inspect
import itertools
import types
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shardlib.core.torch_internals.torch_private import MODULE_DICTS
from shardlib.frontend.guards.children import instance_dict
from shardlib.frontend.guards.mutable_places import Item
from shardlib.frontend.guards.value_kinds import numpy_kind

if TYPE_CHECKING:
    from shardlib.frontend.guards.mutable_places import Place
    from shardlib.frontend.side_effects.snapshot import Snapshot

GONE = object()  # stands for no value
ALL = object()  # the key of all items of a container
APPENDED = object()  # the key of the items behind those that a list had
_CONTAINERS = (list, deque, dict, set)
FIXED = (tuple, frozenset, set, types.MappingProxyType, types.FunctionType)  # cannot be given other items


def put_back(owner: Any, place: Place, before: Snapshot) -> None:
    """Gives a holder what it had at one of its places."""
    if place[1] in (ALL, APPENDED):
        _refill(owner, before.copies[place[0]])
    else:
        put(owner, place[1], before.values.get(place, GONE))


def _drop(owner: Any, key: Any) -> None:
    """Takes a value away from a holder."""
    if isinstance(owner, types.CellType):
        del owner.cell_contents
    elif isinstance(owner, type | types.ModuleType) or _is_slot(owner, key):
        delattr(owner, key)
    elif (space := _space(owner, key)) is not None and (item := _item(space, key)) is not GONE:
        space.pop(item, None)


def put(owner: Any, key: Any, value: Any, among: str = "") -> None:
    """Gives a holder another value, or, if that is `GONE`, none.

    `among` is the dict of a `torch.nn.Module` that is to hold it. With the key `ALL`, a list gets all its items, with
    `APPENDED` more of them.
    """
    if key is ALL:
        _refill(owner, value)
    elif key is APPENDED:
        list.extend(owner, value)
    elif value is GONE:
        _drop(owner, key)
    elif among:
        instance_dict(owner)[among][key] = value
    elif isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, type):
        type.__setattr__(owner, key, value)
    elif _is_slot(owner, key):  # not by the user's own setters, here and below: they have seen the value
        inspect.getattr_static(type(owner), key).__set__(owner, value)
    elif isinstance(owner, types.ModuleType):
        setattr(owner, key, value)
    elif isinstance(owner, list) and isinstance(key, int):
        list.__setitem__(owner, key, value)
    elif isinstance(owner, deque) and isinstance(key, int):
        owner[key] = value
    elif (space := _space(owner, key)) is not None and (item := _item(space, key)) is not GONE:
        if item in space:
            dict.__setitem__(space, item, value)
        else:
            space[item] = value


def can_put(owner: Any, key: Any) -> bool:
    """Returns whether a holder has this key, and shows another value under it once it is put there."""
    while isinstance(key, Item):
        key = key.key
    if isinstance(owner, FIXED):
        return False
    if isinstance(owner, types.CellType | type | types.ModuleType) or _is_slot(owner, key):
        return True
    if isinstance(owner, list | deque) and isinstance(key, int):
        return True
    space = _space(owner, key)
    return space is not None and (key[1] if isinstance(key, tuple) else key) in space


def is_by_tensor(key: Any) -> bool:
    """Returns whether a key stands for a tensor in a dict, such as a parameter in the state of an optimizer."""
    return isinstance(key, tuple) and isinstance(key[0], type) and issubclass(key[0], torch.Tensor)


def tensor_of(owner: dict[Any, Any], key: Any) -> Any:
    """Returns the tensor that is this key of a dict."""
    return next((x for x in owner if id(x) == key[1]), GONE)


def _item(space: dict[Any, Any], key: Any) -> Any:
    """Returns the key of a dict that a place names."""
    if is_by_tensor(key) and not isinstance(key[1], torch.Tensor):
        return tensor_of(space, key)
    return key[1] if isinstance(key, tuple) else key


def _is_slot(owner: Any, key: Any) -> bool:
    """Returns whether an attribute is one of `__slots__`; members of types in C may be read-only."""
    slot = inspect.getattr_static(type(owner), key, None) if isinstance(key, str) else None
    return isinstance(slot, types.MemberDescriptorType) and "__slots__" in vars(slot.__objclass__)


def _space(owner: Any, key: Any) -> dict[Any, Any] | None:
    """Returns the dict in which a holder has a name."""
    if isinstance(key, tuple) and isinstance(owner, dict):
        return owner  # an item; what is called by a text is an attribute
    inside = instance_dict(owner)
    spaces = [*(inside.get(name) for name in MODULE_DICTS), inside]
    dicts: list[dict[Any, Any]] = [space for space in spaces if isinstance(space, dict)]
    return next((space for space in dicts if key in space), dicts[-1] if dicts else None)


def among(owner: Any, key: Any) -> str:
    """Returns the name of the dict of a `torch.nn.Module` that has this key, such as `_buffers`; else ""."""
    if not isinstance(owner, torch.nn.Module):
        return ""
    return next((name for name in MODULE_DICTS if key in instance_dict(owner).get(name, ())), "")


def refill(x: Any, old: Any) -> None:
    """Gives a container, or an array, the items that it had."""
    if not isinstance(x, _CONTAINERS):
        x[... if numpy_kind(x) else slice(None)] = old
    elif is_refilled(x, old):
        _refill(x, old)


def is_refilled(x: Any, old: Any) -> bool:
    """Returns whether a container has other items than it had, or has them in another order."""
    if isinstance(x, set):
        return {id(y) for y in x} != {id(y) for y in old}
    return len(x) != len(old) or any(a is not b for a, b in zip(_items(x), _items(old), strict=True))


def is_reordered(x: Any, old: Any) -> bool:
    """Returns whether the keys of a dict are in another order than if new ones had been added."""
    return [*x][: len(old)] != [*old] if not any(isinstance(k, torch.Tensor) for k in x) else False


def _items(x: Any) -> Iterator[Any]:
    return itertools.chain(x, x.values()) if isinstance(x, dict) else iter(x)


def _refill(x: Any, old: Any) -> None:
    x.clear()
    x.update(old) if isinstance(x, dict | set) else x.extend(old)
