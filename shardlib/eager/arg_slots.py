"""Arguments of eager calls: the tensors among them, apart from the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from shardlib.core.call_scalar import Scalar

_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype})  # most of what is neither tensor nor sequence


@dataclass(frozen=True)
class Slot:
    """Where a tensor stands in a call's arguments: its number."""

    index: int


def slotted(x: Any, tensors: list[torch.Tensor]) -> Any:
    """Arguments with a `Slot` for every tensor, which goes to the end of `tensors`."""
    if type(x) in _ATOMS:
        return x
    if isinstance(x, torch.Tensor):
        tensors.append(x)
        return Slot(len(tensors) - 1)
    if isinstance(x, dict):
        return {k: slotted(y, tensors) for k, y in x.items()}
    return [slotted(y, tensors) for y in x] if isinstance(x, list | tuple) else x


def filled(x: Any, values: Any, kind: type = list) -> Any:
    """Arguments with a value in every slot; sequences become of type `kind`."""
    if type(x) in _ATOMS:
        return x
    if isinstance(x, Slot):
        return values[x.index]
    if isinstance(x, dict):
        return {k: filled(y, values, kind) for k, y in x.items()}
    return kind([filled(y, values, kind) for y in x]) if isinstance(x, list | tuple) else x


def devices_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.device]:
    """The devices that a call asks for."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]


def made_on(device: torch.device, asked: Sequence[torch.device]) -> torch.device:
    """Where results of a call live: where its operands do. Of meta tensors something is made where one asks for it."""
    return asked[0] if asked and device.type == "meta" else device


def moved(x: Any, device: torch.device) -> Any:
    """Arguments in which every device is this one."""
    if type(x) in _ATOMS or isinstance(x, Slot):
        return x
    if isinstance(x, torch.device):
        return device
    if isinstance(x, dict):
        return {k: moved(y, device) for k, y in x.items()}
    return [moved(y, device) for y in x] if isinstance(x, list | tuple) else x


def frozen(x: Any) -> Any:
    """Arguments that can be a key."""
    return tuple(map(frozen, x)) if isinstance(x, list | tuple) else x


def listed(x: Any) -> Any:
    """What `frozen` froze, as ops take it."""
    return list(map(listed, x)) if isinstance(x, tuple) else x


def tensors_of(x: torch.Tensor | Sequence[Any] | dict[str, Any]) -> list[torch.Tensor]:
    """All tensors among arguments, in order."""
    found: list[torch.Tensor] = []
    for y in x.values() if isinstance(x, dict) else (x,) if isinstance(x, torch.Tensor) else x:
        if isinstance(y, torch.Tensor):
            found.append(y)
        elif isinstance(y, list | tuple | dict):
            found += tensors_of(y)
    return found


def with_scalars(x: Any) -> Any:
    """Returns `slotted` arguments in which numbers are inputs: each is the `Scalar` at its place in `numbers_of`.

    Numbers that `is_special` says, and flags, are constants.
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
_LARGE = 1e38  # float32 has no number far above


def is_special(number: complex) -> bool:
    """Whether a factor may not go into the addends of a partial sum as others may: 0, an infinite one, or NaN."""
    return not 0 < abs(number) < _LARGE


def specials_of(numbers: Iterable[Any]) -> tuple[str | None, ...]:
    """Returns the part of a key that says which numbers are constants of a program."""
    return tuple([repr(n) if is_special(n) else None for n in numbers])


def numbers_of(x: Any) -> Iterator[Any]:
    """All numbers among arguments, in order."""
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, list | tuple):
        for y in x:
            yield from numbers_of(y)
    elif isinstance(x, _NUMBERS):
        yield x
