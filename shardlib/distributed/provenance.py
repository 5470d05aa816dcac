"""What tensors come from, as numbers that all ranks share.

Two ranks may meet in one program, from one line, with tensors that have nothing to do with each other: a set of names
has another order in every process. So a tensor on ranks knows its origin: the digest of what it was placed from, or
which program made it of which tensors and numbers. It is 0 where nobody knows. Ranks compare the origins of what they
meet with. A plain tensor has none; a few of its elements stand for it, so that ranks notice when theirs went apart.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_MASK = (1 << 62) - 1
_SAMPLES = 5


def made(program: int, tensors: Iterable[Any], numbers: Sequence[Any] = ()) -> int:
    """The origin of what a program makes of tensors and numbers. (Hashes of numbers are the same in all processes.)

    Example:
        >>> from types import SimpleNamespace as Tensor
        >>> x, y = Tensor(_origin=1), Tensor(_origin=2)
        >>> made(7, [x, y]) == made(7, [x, y]) != made(7, [y, x])
        True
    """
    return origin_of((program, *[getattr(x, "_origin", 0) for x in tensors], *[x == x and x for x in numbers]))


def origin_of(parts: tuple[Any, ...]) -> int:
    """The same of a program's number, origins and numbers. It is none of a known one's neighbors."""
    return hash(parts) & _MASK


def note(origin: int, results: Iterable[Any]) -> None:
    """These tensors, in this order, were made in one go."""
    for i, x in enumerate(results if origin else ()):
        if isinstance(x, torch.Tensor):
            x._origin = origin + i  # type: ignore[attr-defined]


def sample(x: torch.Tensor) -> int:
    """A number that stands for some elements of a plain tensor on the CPU; 0 for others, which would have to wait.

    Example:
        >>> sample(torch.arange(8.0)) == sample(torch.arange(8.0)) != sample(torch.arange(8.0) + 1)
        True
    """
    if x.device.type != "cpu" or not x.numel():
        return 0
    base, size = x.data_ptr(), x.itemsize
    return zlib.crc32(b"".join([ctypes.string_at(base + at, size) for at in _places(x.shape, x.stride(), size)]))


@functools.lru_cache(1 << 12)
def _places(shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> list[int]:
    """Where they are, in bytes: on the diagonal from the first element to the last one, and beside it."""
    points = [[(n - 1) * k // (_SAMPLES - 1) for n in shape] for k in range(_SAMPLES)]
    points += [[(n - 1) * (k * (d + 1) % _SAMPLES) // (_SAMPLES - 1) for d, n in enumerate(shape)] for k in (1, 2)]
    offsets = (sum(i * step for i, step in zip(point, stride, strict=True)) * size for point in points)
    return list(dict.fromkeys(offsets))
