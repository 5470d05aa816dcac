"""Origins of tensors, as numbers that all ranks share.

Two ranks may call one program from one line with unrelated tensors: iteration over a set of names has another order in
every process. So a sharded tensor has an origin: the digest of the value it was placed from, or of the program and the
inputs that computed it. It is 0 if unknown. Ranks compare the origins of the tensors of a call. A plain tensor has no
origin; a few of its elements represent it, so that ranks notice different values.
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


def result_origin(program: int, tensors: Iterable[Any], numbers: Sequence[Any] = ()) -> int:
    """Returns the origin of a program's result from its tensors and numbers; the same in all processes."""
    return hash_origin((program, *[getattr(x, "_origin", 0) for x in tensors], *[x == x and x for x in numbers]))


def hash_origin(parts: tuple[Any, ...]) -> int:
    """Hashes a program's number, origins and numbers; not equal to a known origin plus a small number."""
    return hash(parts) & _MASK


def record_origin(origin: int, results: Iterable[Any]) -> None:
    """Sets the origins of the results of one call, in this order."""
    for i, x in enumerate(results if origin else ()):
        if isinstance(x, torch.Tensor):
            x._origin = origin + i  # type: ignore[attr-defined]


def checksum_sample(x: torch.Tensor) -> int:
    """Returns a checksum of some elements of a plain tensor; 0 for tensors on GPUs, which would have to wait."""
    if x.device.type != "cpu" or not x.numel():
        return 0
    base, size = x.data_ptr(), x.itemsize
    return zlib.crc32(
        b"".join([ctypes.string_at(base + at, size) for at in _sample_offsets(x.shape, x.stride(), size)])
    )


@functools.lru_cache(1 << 12)
def _sample_offsets(shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> list[int]:
    """Returns the byte offsets of the samples: the diagonal from the first to the last element, and two other lines."""
    points = [[(n - 1) * k // (_SAMPLES - 1) for n in shape] for k in range(_SAMPLES)]
    points += [[(n - 1) * (k * (d + 1) % _SAMPLES) // (_SAMPLES - 1) for d, n in enumerate(shape)] for k in (1, 2)]
    offsets = (sum(i * step for i, step in zip(point, stride, strict=True)) * size for point in points)
    return list(dict.fromkeys(offsets))
