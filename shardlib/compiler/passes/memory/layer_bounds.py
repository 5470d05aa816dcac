"""Finds the layers of a forward pass: the sequences that it repeats, divided where the fewest bytes are live."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from shardlib.compiler.passes.memory.saved_values import Crossing
from shardlib.compiler.passes.split_backward import gives
from shardlib.compiler.program.steps import Compute, Start, Step, Var, reads

_LEAST = 4  # steps of a layer

Live = tuple[int, int]  # live bytes at a step, and those of them that no backward step reads


def boundaries(crossing: Crossing) -> list[int]:
    """Returns the first step of each layer, and the step behind the last layer.

    A turn without repetitions is divided into about as many parts as each part has products.
    """
    bounds: list[int] = []
    for first, last in _forward(crossing):
        keys = [key(step) for step in crossing.program.steps[first:last]]
        cost = _live(crossing, first, last)
        work = [bool(getattr(s, "flops", 0)) and _contracts(s) for s in crossing.program.steps[first:last]]
        at = list(_repeats(keys, cost, work, 0, last - first))
        bounds += [first + i for i in at or _even(cost, work)]
    return bounds


def frontier(crossing: Crossing, at: int) -> set[Var]:
    """Returns the memory made before step `at` that later steps of its turn read."""
    turn = crossing.turn[at]
    later = (i for i in range(at, len(crossing.turn)) if crossing.turn[i] == turn)
    owners = {crossing.owner.get(v, v) for i in later for v in reads(crossing.program.steps[i])}
    return {o for o in owners if crossing.maker.get(o, at) < at}


def _forward(crossing: Crossing) -> Iterator[tuple[int, int]]:
    """Yields the forward turns that a backward turn follows."""
    first = 0
    for i in range(1, len(crossing.turn)):
        if crossing.turn[i] != crossing.turn[first]:
            if crossing.back[i]:
                yield first, i
            first = i


def key(step: Step) -> Hashable:
    """Returns a key that is equal for the same step of equal layers."""
    if isinstance(step, Compute):
        return str(step.target), tuple(map(_form, step.outs))
    kinds = [c.kind for c in step.moves] if isinstance(step, Start) else []
    return type(step).__name__, *kinds, *map(_form, gives(step))


def _form(v: Var | None) -> Hashable:
    return v and (v.dtype, v.shape if v.layout is None else str(v.layout))


def _contracts(step: Step) -> bool:
    """Returns whether a step is a product."""
    tags = getattr(getattr(step, "target", None), "tags", ())
    return not (torch.Tag.pointwise in tags or torch.Tag.reduction in tags)


def _live(crossing: Crossing, first: int, last: int) -> list[Live]:
    """Returns the live bytes at each step of a turn; partial sums count twice.

    The second number has only memory that no backward step reads: a user's checkpoints hold only their inputs.
    """
    change = [(0, 0)] * (last - first + 1)

    def count(i: int, bytes_: int, unread: int) -> None:
        change[i] = change[i][0] + bytes_, change[i][1] + unread

    held = set(crossing.held)
    for owner, readers in crossing.readers.items():
        maker = crossing.maker.get(owner, -1)
        inside = [i for i in readers if first <= i < last]
        if maker >= first and inside:
            is_partial = owner.layout is not None and bool(owner.layout.pending_axes)
            size = owner.nbytes * (1 + is_partial)
            unread = 0 if owner in held else size
            count(maker - first + 1, size, unread)
            count(inside[-1] - first + 1, -size, -unread)
    return list(accumulate(change[:-1], lambda a, b: (a[0] + b[0], a[1] + b[1])))


def _repeats(
    keys: Sequence[Hashable], cost: Sequence[Live], work: Sequence[bool], first: int, last: int
) -> Iterator[int]:
    """Yields the beginning of each period of the longest periodic run, then those of the steps around the run."""
    number: dict[Any, int] = {}
    row = torch.tensor([number.setdefault(k, len(number)) for k in keys[first:last]])
    n, best = last - first, (0, 0, 0)
    for period in range(_LEAST, n // 2 + 1):
        differs = torch.nonzero(row[period:] != row[:-period]).flatten()
        ends = torch.cat([torch.tensor([-1]), differs, torch.tensor([n - period])])
        longest = torch.argmax(torch.diff(ends))
        start = int(ends[longest]) + 1
        length = int(ends[longest + 1]) - start
        if length >= period and length > best[0]:
            best = length, start, period
    length, start, period = best
    start += first
    if not period or not any(work[start : start + period]):
        return
    end = start + length + period
    offset = min(range(start, start + period), key=lambda i: (max(cost[i:end:period]), i))
    yield from _repeats(keys, cost, work, first, start)
    yield from range(offset, min(end + 1, len(cost)), period)
    yield from _repeats(keys, cost, work, end, last)


def _even(cost: Sequence[Live], work: Sequence[bool]) -> list[int]:
    """Returns bounds of about as many parts as each has products, at steps with few live bytes."""
    products = [i for i, is_product in enumerate(work) if is_product]
    parts = max(math.isqrt(len(products)), 1)
    ends = [products[len(products) * k // parts] for k in range(1, parts)] if products else []
    reach = len(cost) // (2 * parts)
    return sorted({min(range(max(i - reach, 1), min(i + reach, len(cost))), key=cost.__getitem__) for i in ends})
