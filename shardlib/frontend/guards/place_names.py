"""Names places: `net.head.weight`, `self.scales[0]`, `opt.state[net.head.weight]['step']`.

A place is a tuple of parts: a text, or `(key,)` for an item. Names are the same in all processes, so that ranks can
compare the names of their variables: a key that is no plain value never shows its address.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardlib.frontend.guards.value_kinds import PLAIN

_NO_ADDRESS = 1 << 24  # no id of an object is smaller


def format_place(place: tuple[Any, ...], roots: Sequence[str], tensors: Sequence[tuple[Any, ...]] = ()) -> str:
    """Formats a place; the number of a leaf becomes its name in `roots`, and a `TensorKey` the tensor's name."""
    if place and type(place[0]) is int:
        place = (roots[place[0]] if place[0] < len(roots) else "an argument", *place[1:])
    return "".join(_part(x, roots, tensors) for x in place).lstrip(".")


def _part(x: Any, roots: Sequence[str], tensors: Sequence[tuple[Any, ...]]) -> str:
    if not isinstance(x, tuple):
        return str(x)
    (key,) = x
    return f"[{format_place(tensors[key], roots, tensors) if type(key) is TensorKey else repr(key)}]"


def name_tensor_keys(
    place: tuple[Any, ...], roots: Sequence[str], tensors: Sequence[tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Replaces the numbers of tensor keys by names, which are equal in calls that number tensors otherwise."""
    return tuple(
        (_KeyName(format_place(tensors[x[0]], roots, tensors)),)
        if isinstance(x, tuple) and type(x[0]) is TensorKey
        else x
        for x in place
    )


class TensorKey(int):
    """The number of a tensor, in place of a key that is the tensor or its id."""


class _KeyName(str):
    """The name of a key that is no plain value; its `repr` has no quotes."""

    def __repr__(self) -> str:
        return str(self)


def key_part(k: Any, i: int, numbers: Mapping[int, int]) -> Any:
    """Returns the part of a place for the i-th key of a dict; `numbers` maps ids of tensors to their numbers."""
    kind = type(k)
    if kind is int or isinstance(k, torch.Tensor):
        number = numbers.get(k if kind is int else id(k))
        if number is not None:
            return TensorKey(number)
    parts = k if kind is tuple else (k,)
    if all(type(y) in PLAIN and not (type(y) is int and abs(y) > _NO_ADDRESS) for y in parts):
        return k
    if isinstance(k, torch.Tensor):
        return _KeyName(f"tensor {i}")  # without its class: `sl.check` replaces sharded tensors by plain ones
    named = isinstance(k, type | types.FunctionType)
    return _KeyName(k.__qualname__ if named else k if isinstance(k, enum.Enum) else f"{kind.__name__} {i}")
