"""What tensors come from, as numbers that all ranks share.

Two ranks may meet in one program, from one line, with tensors that have nothing to do with each other: a set of names
has another order in every process. So a tensor on ranks knows its origin: the digest of what it was placed from, or
which program made it of which tensors and numbers. It is 0 where nobody knows. Ranks compare the origins of what they
meet with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

_MASK = (1 << 62) - 1


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
    """The same of a program's number, origins and numbers. It is none of a known one's neighbours."""
    return hash(parts) & _MASK


def note(origin: int, results: Iterable[Any]) -> None:
    """These tensors, in this order, were made in one go."""
    for i, x in enumerate(results if origin else ()):
        if isinstance(x, torch.Tensor):
            x._origin = origin + i  # type: ignore[attr-defined]
