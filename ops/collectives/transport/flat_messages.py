"""Flat messages: packing parts of tensors into them, and reducing messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def resolve_views(xs: Sequence[Tensor]) -> list[Tensor]:
    """Resolves lazy conjugations and negations: other ranks read the memory itself."""
    return [x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x for x in xs]


def group_by_dtype(xs: Sequence[Tensor]) -> list[list[int]]:
    """Returns the positions of the tensors of each dtype: they may share a message."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(xs):
        groups.setdefault(x.dtype, []).append(i)
    return list(groups.values())


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Packs tensors of one dtype, each in row-major order, into one flat message; copies each element once."""
    counts = [part.numel() for part in parts]
    message = parts[0].new_empty(sum(counts))
    for target, part in zip(message.split_with_sizes(counts), parts, strict=True):
        target.view(part.shape).copy_(part)
    return message


def combine(parts: Sequence[Tensor], kind: str) -> Tensor:
    """Reduce tensors of one shape in the order of members, so that every member and every runtime gets the same bits.

    A sum of floats of less than 32 bits is formed in float32 and rounded once; complex numbers are added as pairs,
    which keeps the signs of zeros. The result never shares memory with the parts, unless there is only one.
    """
    first, *rest = parts
    if not rest:
        return first
    if (wide := sum_dtype(first.dtype, kind)) != first.dtype:
        total = first.to(wide)
        for part in rest:
            total += part
        return total.to(first.dtype)
    if first.is_complex():
        return torch.view_as_complex(combine([torch.view_as_real(x.resolve_conj()) for x in parts], kind).contiguous())
    reduce = _REDUCE[kind]
    total = reduce(first, rest[0])
    for part in rest[1:]:
        reduce(total, part, out=total)
    return total


def sum_dtype(dtype: torch.dtype, kind: str) -> torch.dtype:
    """Returns the dtype in which a reduction of this kind is formed."""
    return torch.float32 if kind == "sum" and dtype.is_floating_point and dtype.itemsize < 4 else dtype


def split_evenly(count: int, n: int) -> list[int]:
    """Splits `count` elements into `n` parts whose sizes differ by one at most.

    Example:
        >>> split_evenly(7, 3)
        [2, 2, 3]
    """
    return [count * (i + 1) // n - count * i // n for i in range(n)]


def resize_dim(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """Returns `shape` with another size along `dim`."""
    new = list(shape)
    new[dim] = size
    return new


def is_leading(shape: Sequence[int], dim: int) -> bool:
    """True if all dims before `dim` have size 1: shards along `dim` are then consecutive in memory."""
    return math.prod(shape[:dim]) == 1
