"""Padding by what is beside the border, or mirrored there: ranges of the dim itself, put together; and its gradient."""

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
    """The dims that are padded, and how far in front and behind: negative numbers crop."""
    for k, pair in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        yield (x.dim() - 1 - k, *pair)


def _spliced(x: Tensor, dim: int, ranges: Sequence[Range], *, turned: Sequence[bool]) -> Tensor:
    """Ranges of a dim side by side, some turned round; (-n, 0) are n zeros."""
    kept = [(start, stop, turn) for (start, stop), turn in zip(ranges, turned, strict=True) if start < stop]
    sources = [0 if start >= 0 else -1 for start, *_ in kept]
    starts = [max(start, 0) for start, *_ in kept]
    stops = [stop if start >= 0 else -start for start, stop, _ in kept]
    turns = [turn for *_, turn in kept]
    out: Tensor = SPLICE([x], dim, sources, starts, stops, [0] * len(kept), [], turns)
    return out


# What is in front of a dim and behind it, of what the dim itself has.
_AROUND: dict[str, Callable[[int, int, int], tuple[list[Range], list[Range]]]] = {
    "reflection": lambda n, before, after: ([(1, 1 + before)], [(n - 1 - after, n - 1)]),
    "replication": lambda n, before, after: ([(0, 1)] * before, [(n - 1, n)] * after),
}


def _parts(name: str, n: int, before: int, after: int) -> list[tuple[Range, int, bool]]:
    """What a padded dim of n elements is put together of: ranges, where they begin in it, and whether they are turned
    round."""
    front, behind = _AROUND[name](n, before, after)
    own = max(-before, 0), n - max(-after, 0)
    ranges, turns = [r for r in (*front, own, *behind) if length(r) > 0], name == "reflection"
    begins = itertools.accumulate(map(length, ranges), initial=0)
    return [(r, begin, turns and r is not own) for r, begin in zip(ranges, begins, strict=False)]


def _padded(name: str, x: Tensor, padding: Sequence[int]) -> Tensor:
    for dim, before, after in _sides(x, padding):
        parts = _parts(name, x.shape[dim], before, after)
        x = _spliced(x, dim, [r for r, *_ in parts], turned=[turn for *_, turn in parts])
    return x


def _padded_back(name: str, grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Every range goes back to where it is from, and they are added up."""
    for dim, before, after in _sides(x, padding):
        n, found = x.shape[dim], []
        for (start, stop), begin, turn in _parts(name, n, before, after):
            there = [(-start, 0), (begin, begin + stop - start), (stop - n, 0)]
            found.append(_spliced(grad, dim, there, turned=[False, turn, False]))
        grad = functools.reduce(torch.add, found or [_spliced(grad, dim, [(-n, 0)], turned=[False])])
    return grad


ROWS: dict[str, Any] = {}
DECOMPOSED: dict[str, Callable[..., Any]] = {
    f"{name}_pad{dims}d{way}": partial(form, name)
    for name in _AROUND
    for dims in (1, 2, 3)
    for way, form in (("", _padded), ("_backward", _padded_back))
}
