"""Who holds something (a cell, a container, a class, a module, an object): given other values, or what it had."""

from __future__ import annotations

import inspect
import itertools
import types
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shardlib.calls.inside import own
from shardlib.calls.kinds import of_numpy
from shardlib.internals import MODULE_DICTS

if TYPE_CHECKING:
    from shardlib.calls.changing import Place
    from shardlib.calls.snapshot import Snapshot

GONE = object()  # what a holder has that has nothing
ALL = object()  # the key of all items of a container
_CONTAINERS = (list, deque, dict, set)


def put_back(owner: Any, place: Place, before: Snapshot) -> None:
    """Give a holder what it had at one of its places."""
    old = before.copies[place[0]] if place[1] is ALL else before.values.get(place, GONE)
    put(owner, place[1], old)


def _drop(owner: Any, key: Any) -> None:
    """Take what a holder has."""
    if isinstance(owner, types.CellType):
        del owner.cell_contents
    elif isinstance(owner, type | types.ModuleType) or _is_slot(owner, key):
        delattr(owner, key)
    elif (space := _space(owner, key)) is not None:
        space.pop(key[1] if isinstance(key, tuple) else key, None)


def put(owner: Any, key: Any, value: Any, among: str = "") -> None:
    """Give a holder (a cell, a list, a dict, a class, a module, an object) another value, or, if `GONE`, none.

    `among` is the dict of a `torch.nn.Module` where it is to be; with `ALL`, a container gets all its items.
    """
    if key is ALL:
        _refill(owner, value)
    elif value is GONE:
        _drop(owner, key)
    elif among:
        own(owner)[among][key] = value
    elif isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, type | types.ModuleType) or _is_slot(owner, key):
        setattr(owner, key, value)
    elif isinstance(owner, list | deque) and isinstance(key, int):
        owner[key] = value
    elif (space := _space(owner, key)) is not None:
        space[key[1] if isinstance(key, tuple) else key] = value


def _is_slot(owner: Any, key: Any) -> bool:
    return isinstance(key, str) and isinstance(
        inspect.getattr_static(type(owner), key, None), types.MemberDescriptorType
    )


def _space(owner: Any, key: Any) -> dict[Any, Any] | None:
    """The dict in which a holder has a name."""
    if isinstance(key, tuple) and isinstance(owner, dict):
        return owner  # an item; what is called by a text is an attribute
    inside = own(owner)
    spaces = [*(inside.get(name) for name in MODULE_DICTS), inside]
    dicts: list[dict[Any, Any]] = [space for space in spaces if isinstance(space, dict)]
    return next((space for space in dicts if key in space), dicts[-1] if dicts else None)


def among(owner: Any, key: Any) -> str:
    """In which dict of a `torch.nn.Module` a name is: its parameters, its buffers; elsewhere in none."""
    if not isinstance(owner, torch.nn.Module):
        return ""
    return next((name for name in MODULE_DICTS if key in own(owner).get(name, ())), "")


def refill(x: Any, old: Any) -> None:
    """Give a container, or an array, the items that it had."""
    if not isinstance(x, _CONTAINERS):
        x[... if of_numpy(x) else slice(None)] = old
    elif is_refilled(x, old):
        _refill(x, old)


def is_refilled(x: Any, old: Any) -> bool:
    """Whether a container has other items than it had, or in another order."""
    return len(x) != len(old) or any(a is not b for a, b in zip(_items(x), _items(old), strict=True))


def _items(x: Any) -> Iterator[Any]:
    return itertools.chain(x, x.values()) if isinstance(x, dict) else iter(x)


def _refill(x: Any, old: Any) -> None:
    x.clear()
    x.update(old) if isinstance(x, dict | set) else x.extend(old)
