"""Names places: `net.head.weight`, `self.scales[0]`, `opt.state[net.head.weight]['step']`.

A place is a tuple of parts: a text, or `(key,)` for an item. Names are the same in all processes, so that ranks may
compare what they call their variables: a key that is no plain value does not lend its address.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardlib.frontend.guards.value_kinds import PLAIN

_NO_ADDRESS = 1 << 24  # numbers up to here are no objects' ids


def name_of(place: tuple[Any, ...], roots: Sequence[str], tensors: Sequence[tuple[Any, ...]] = ()) -> str:
    """A place in words; the number of a leaf stands for its name in `roots`, and that of a tensor for its place.

    Example:
        >>> name_of((0, ".state", (Nth(1),), ("step",)), ["opt"], [("m", ".bias"), ("m", ".weight")])
        "opt.state[m.weight]['step']"
    """
    if place and type(place[0]) is int:
        place = (roots[place[0]] if place[0] < len(roots) else "an argument", *place[1:])
    return "".join(_part(x, roots, tensors) for x in place).lstrip(".")


def _part(x: Any, roots: Sequence[str], tensors: Sequence[tuple[Any, ...]]) -> str:
    if not isinstance(x, tuple):
        return str(x)
    (key,) = x
    return f"[{name_of(tensors[key], roots, tensors) if type(key) is Nth else repr(key)}]"


def settled(place: tuple[Any, ...], roots: Sequence[str], tensors: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """A place in which tensors that are keys have names, so that it is the same where they have other numbers.

    Example:
        >>> name_of(settled(("opt.state", (Nth(1),)), (), [("m", ".bias"), ("m", ".weight")]), ())
        'opt.state[m.weight]'
    """
    return tuple(
        (_Called(name_of(tensors[x[0]], roots, tensors)),) if isinstance(x, tuple) and type(x[0]) is Nth else x
        for x in place
    )


class Nth(int):
    """Stands for a key that is a tensor, or its id: the tensor's number."""


class _Called(str):
    """The name of a key that is no plain value."""

    def __repr__(self) -> str:
        return str(self)


def key_name(k: Any, i: int, numbers: Mapping[int, int]) -> Any:
    """Returns the part of a place for the i-th key of a dict; `numbers` are those of tensors, by their ids."""
    kind = type(k)
    if kind is int or isinstance(k, torch.Tensor):
        number = numbers.get(k if kind is int else id(k))
        if number is not None:
            return Nth(number)
    parts = k if kind is tuple else (k,)
    if all(type(y) in PLAIN and not (type(y) is int and abs(y) > _NO_ADDRESS) for y in parts):
        return k
    if isinstance(k, torch.Tensor):
        return _Called(f"tensor {i}")  # of whatever kind: `sl.check` has a whole one in place of a sharded one
    named = isinstance(k, type | types.FunctionType)
    return _Called(k.__qualname__ if named else k if isinstance(k, enum.Enum) else f"{kind.__name__} {i}")
