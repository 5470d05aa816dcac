"""What of two values, one there before a trace and one there after it, is another: numbers, orders, objects."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shardlib.core.call_scalar import is_same_number
from shardlib.frontend.guards.attributes import attributes
from shardlib.frontend.guards.number_inputs import is_given
from shardlib.frontend.guards.value_kinds import OPAQUE, PLAIN
from shardlib.frontend.side_effects.mutable_places import NUMBERS, SHORT, Item, Place


def is_value(x: Any) -> bool:
    """Whether it does not matter which of equal objects one has: numbers, texts, enums, functions, modules, sets."""
    if type(x) in PLAIN or isinstance(x, (enum.Enum, *OPAQUE)):
        return True
    if isinstance(x, set | frozenset):
        return all(map(is_value, x))
    if dataclasses.is_dataclass(x) and x.__dataclass_params__.frozen:  # type: ignore[union-attr]
        return all(is_value(y) for _, y in attributes(x))
    return False


def is_reordered(x: Any, old: Any) -> bool:
    """Whether the keys of a dict are in another order than if new ones had been added, and some deleted."""
    if not isinstance(x, dict) or any(isinstance(k, Tensor) for k in x):
        return False
    return list(x) != [k for k in old if k in x] + [k for k in x if k not in old]


def changed_numbers(place: Place, old: Any, value: Any) -> Iterator[Place]:
    """The places of numbers, this one or those in it, that are others now."""
    if type(old) in NUMBERS and (is_given(value) or type(value) in NUMBERS):
        if not is_same(old, value):
            yield place
    elif type(old) is type(value) and type(old) in (tuple, list) and len(old) == len(value) <= SHORT:
        for i, (x, y) in enumerate(zip(old, value, strict=True)):
            if type(x) in NUMBERS or type(x) is type(old) is tuple:
                yield from changed_numbers((place[0], Item(place[1], i)), x, y)


def is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) in PLAIN and is_same_number(a, b))
