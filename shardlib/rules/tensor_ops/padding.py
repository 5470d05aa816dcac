"""Padding by reflection or replication, and its gradient, as concatenations of ranges of the dim."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.ops.splice import SPLICE
from shardlib.rules.local_forms.halo import Range, length


def _sides(x: Tensor, padding: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields the padded dims with the padding before and after; negative numbers crop."""
    for k, pair in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        yield (x.dim() - 1 - k, *pair)


def _concatenate(x: Tensor, dim: int, ranges: Sequence[Range], *, flipped: Sequence[bool]) -> Tensor:
    """Ranges of a dim side by side, some flipped; (-n, 0) stands for n zeros."""
    parts = [(start, stop, flip) for (start, stop), flip in zip(ranges, flipped, strict=True) if start < stop]
    sources = [0 if start >= 0 else -1 for start, *_ in parts]
    starts = [max(start, 0) for start, *_ in parts]
    stops = [stop if start >= 0 else -start for start, stop, _ in parts]
    flips = [flip for *_, flip in parts]
    out: Tensor = SPLICE([x], dim, sources, starts, stops, [0] * len(parts), [], flips)
    return out


# The ranges of a dim of n elements that a padding puts before and after it.
_AROUND: dict[str, Callable[[int, int, int], tuple[list[Range], list[Range]]]] = {
    "reflection": lambda n, before, after: ([(1, 1 + before)], [(n - 1 - after, n - 1)]),
    "replication": lambda n, before, after: ([(0, 1)] * before, [(n - 1, n)] * after),
}


def _parts(name: str, n: int, before: int, after: int) -> list[tuple[Range, int, bool]]:
    """Returns the parts of a padded dim of n elements: their ranges, their positions in it, and which are flipped."""
    front, back = _AROUND[name](n, before, after)
    own = max(-before, 0), n - max(-after, 0)
    ranges, flips = [r for r in (*front, own, *back) if length(r) > 0], name == "reflection"
    begins = itertools.accumulate(map(length, ranges), initial=0)
    return [(r, begin, flips and r is not own) for r, begin in zip(ranges, begins, strict=False)]


def _pad(name: str, x: Tensor, padding: Sequence[int]) -> Tensor:
    for dim, before, after in _sides(x, padding):
        parts = _parts(name, x.shape[dim], before, after)
        x = _concatenate(x, dim, [r for r, *_ in parts], flipped=[flip for *_, flip in parts])
    return x


def _pad_backward(name: str, grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Moves the gradient of each part back to its range, and sums them."""
    for dim, before, after in _sides(x, padding):
        n, terms = x.shape[dim], []
        for (start, stop), begin, flip in _parts(name, n, before, after):
            ranges = [(-start, 0), (begin, begin + stop - start), (stop - n, 0)]
            terms.append(_concatenate(grad, dim, ranges, flipped=[False, flip, False]))
        grad = functools.reduce(torch.add, terms or [_concatenate(grad, dim, [(-n, 0)], flipped=[False])])
    return grad


ROWS: dict[str, Any] = {}
DECOMPOSED: dict[str, Callable[..., Any]] = {
    f"{name}_pad{dims}d{way}": partial(form, name)
    for name in _AROUND
    for dims in (1, 2, 3)
    for way, form in (("", _pad), ("_backward", _pad_backward))
}
