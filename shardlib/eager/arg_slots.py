"""Arguments of eager calls: the tensors among them, apart from the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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


def numbers_of(x: Any) -> Iterator[Any]:
    """All numbers among arguments, in order."""
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, list | tuple):
        for y in x:
            yield from numbers_of(y)
    elif isinstance(x, int | float | complex):
        yield x
