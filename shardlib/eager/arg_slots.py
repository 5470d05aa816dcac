"""Separates the tensors of an eager call's arguments from the other arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from shardlib.core.call_scalar import Scalar

_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype})  # common arguments without tensors inside


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in a call's arguments: its number."""

    index: int


def extract_tensors(x: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns arguments with a `Slot` for each tensor; appends the tensors to `tensors`."""
    if type(x) in _ATOMS:
        return x
    if isinstance(x, torch.Tensor):
        tensors.append(x)
        return Slot(len(tensors) - 1)
    if isinstance(x, dict):
        return {k: extract_tensors(y, tensors) for k, y in x.items()}
    return [extract_tensors(y, tensors) for y in x] if isinstance(x, list | tuple) else x


def fill_slots(x: Any, values: Any, kind: type = list) -> Any:
    """Returns arguments with a value in each slot, and sequences of type `kind`."""
    if type(x) in _ATOMS:
        return x
    if isinstance(x, Slot):
        return values[x.index]
    if isinstance(x, dict):
        return {k: fill_slots(y, values, kind) for k, y in x.items()}
    return kind([fill_slots(y, values, kind) for y in x]) if isinstance(x, list | tuple) else x


def requested_devices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.device]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]


def choose_device(device: torch.device, requested: Sequence[torch.device]) -> torch.device:
    """Returns the device of a call's results: the operands', except that a call on meta tensors may request another."""
    return requested[0] if requested and device.type == "meta" else device


def replace_devices(x: Any, device: torch.device) -> Any:
    """Returns arguments with `device` in the place of every device."""
    if type(x) in _ATOMS or isinstance(x, Slot):
        return x
    if isinstance(x, torch.device):
        return device
    if isinstance(x, dict):
        return {k: replace_devices(y, device) for k, y in x.items()}
    return [replace_devices(y, device) for y in x] if isinstance(x, list | tuple) else x


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

    def scalar(y: Any) -> Any:
        if isinstance(y, dict):
            return {k: scalar(z) for k, z in y.items()}
        if isinstance(y, list | tuple):
            return [scalar(z) for z in y]
        if not isinstance(y, _NUMBERS):
            return y
        leaf = next(place)
        return y if type(y) not in _NUMBERS or is_special(y) else Scalar.given(leaf, f"n{leaf}", y)

    return scalar(x)


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
