"""Separates the tensors of an eager call's arguments from the other arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from shardlib.core.call_scalar import Scalar


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in a call's arguments: its number."""

    index: int


def map_args(x: Any, change: Callable[[Any], Any], kind: type = list) -> Any:
    """Applies `change` to every value in nested arguments; sequences become of type `kind`."""
    if isinstance(x, dict):
        return {k: map_args(y, change, kind) for k, y in x.items()}
    return kind([map_args(y, change, kind) for y in x]) if isinstance(x, list | tuple) else change(x)


def extract_tensors(x: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns arguments with a `Slot` for each tensor; appends the tensors to `tensors`."""

    def extract(y: Any) -> Any:
        if not isinstance(y, torch.Tensor):
            return y
        tensors.append(y)
        return Slot(len(tensors) - 1)

    return map_args(x, extract)


def fill_slots(x: Any, values: Any, kind: type = list) -> Any:
    """Returns arguments with a value in each slot, and sequences of type `kind`."""
    return map_args(x, lambda y: values[y.index] if isinstance(y, Slot) else y, kind)


def requested_devices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.device]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]


def choose_device(device: torch.device, requested: Sequence[torch.device]) -> torch.device:
    """Returns the device of a call's results: the operands', except that a call on meta tensors may request another."""
    return requested[0] if requested and device.type == "meta" else device


def replace_devices(x: Any, device: torch.device) -> Any:
    """Returns arguments with `device` in the place of every device."""
    return map_args(x, lambda y: device if isinstance(y, torch.device) else y)


def freeze_args(x: Any) -> Any:
    """Returns hashable arguments: lists become tuples."""
    return tuple(map(freeze_args, x)) if isinstance(x, list | tuple) else x


def thaw_args(x: Any) -> Any:
    """Reverts `freeze_args`."""
    return list(map(thaw_args, x)) if isinstance(x, tuple) else x


def list_tensors(x: torch.Tensor | Sequence[Any] | dict[str, Any]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for y in x.values() if isinstance(x, dict) else (x,) if isinstance(x, torch.Tensor) else x:
        if isinstance(y, torch.Tensor):
            tensors.append(y)
        elif isinstance(y, list | tuple | dict):
            tensors += list_tensors(y)
    return tensors


def lift_numbers(x: Any) -> Any:
    """Returns arguments without tensors in which each number is a `Scalar`, an input at its place in `iterate_numbers`.

    Special numbers (`is_special`) and flags stay constants.
    """
    place = count()

    def lift(y: Any) -> Any:
        if not isinstance(y, _NUMBERS):
            return y
        leaf = next(place)
        return y if type(y) not in _NUMBERS or is_special(y) else Scalar.from_leaf(leaf, f"n{leaf}", y)

    return map_args(x, lift)


_NUMBERS = (int, float, complex)
_LARGE = 1e38  # near the largest float32


def is_special(number: complex) -> bool:
    """True for factors that may not be multiplied into the addends of a partial sum: 0, infinity and NaN."""
    return not 0 < abs(number) < _LARGE


def special_numbers_key(numbers: Iterable[Any]) -> tuple[str | None, ...]:
    """Returns a key of the numbers that are constants of a program."""
    return tuple([repr(n) if is_special(n) else None for n in numbers])


def iterate_numbers(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, list | tuple):
        for y in x:
            yield from iterate_numbers(y)
    elif isinstance(x, _NUMBERS):
        yield x
