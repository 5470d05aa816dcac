"""Where the layers of a forward pass begin: what it repeats, cut where the least has to be handed on."""

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

Handed = tuple[int, int]  # bytes that are handed on at a step, and those of them that nobody else holds


def boundaries(crossing: Crossing) -> list[int]:
    """The steps in front of which something begins that the program has several of, and the step behind the last.

    Where a turn repeats nothing, it is cut into about as many parts as each then has products.
    """
    found: list[int] = []
    for first, last in _forward(crossing):
        keys = [key(step) for step in crossing.program.steps[first:last]]
        cost = _handed_on(crossing, first, last)
        work = [bool(getattr(s, "flops", 0)) and _contracts(s) for s in crossing.program.steps[first:last]]
        at = list(_repeats(keys, cost, work, 0, last - first))
        found += [first + i for i in at or _even(cost, work)]
    return found


def frontier(crossing: Crossing, at: int) -> set[Var]:
    """The memory that the turn of step `at` made, or turns before it, and steps of it from `at` on read."""
    turn = crossing.turn[at]
    later = (i for i in range(at, len(crossing.turn)) if crossing.turn[i] == turn)
    owners = {crossing.owner.get(v, v) for i in later for v in reads(crossing.program.steps[i])}
    return {o for o in owners if crossing.maker.get(o, at) < at}


def _forward(crossing: Crossing) -> Iterator[tuple[int, int]]:
    """The turns that a turn back follows."""
    first = 0
    for i in range(1, len(crossing.turn)):
        if crossing.turn[i] != crossing.turn[first]:
            if crossing.back[i]:
                yield first, i
            first = i


def key(step: Step) -> Hashable:
    """What is alike in equal steps of equal layers."""
    if isinstance(step, Compute):
        return str(step.target), tuple(map(_form, step.outs))
    kinds = [c.kind for c in step.moves] if isinstance(step, Start) else []
    return type(step).__name__, *kinds, *map(_form, gives(step))


def _form(v: Var | None) -> Hashable:
    return v and (v.dtype, v.shape if v.layout is None else str(v.layout))


def _contracts(step: Step) -> bool:
    """Returns whether most of a step's work is a product."""
    tags = getattr(getattr(step, "target", None), "tags", ())
    return not (torch.Tag.pointwise in tags or torch.Tag.reduction in tags)


def _handed_on(crossing: Crossing, first: int, last: int) -> list[Handed]:
    """Of what is made before each step of a turn and read from there on, the bytes, of what is still to be summed twice
    as many; and those that no step back reads (a user's checkpoints hold what goes into them, and no more)."""
    change = [(0, 0)] * (last - first + 1)

    def count(i: int, bytes_: int, unread: int) -> None:
        change[i] = change[i][0] + bytes_, change[i][1] + unread

    held = set(crossing.held)
    for owner, readers in crossing.readers.items():
        made = crossing.maker.get(owner, -1)
        inside = [i for i in readers if first <= i < last]
        if made >= first and inside:
            owed = owner.layout is not None and bool(owner.layout.pending_axes)
            size = owner.nbytes * (1 + owed)
            unread = 0 if owner in held else size
            count(made - first + 1, size, unread)
            count(inside[-1] - first + 1, -size, -unread)
    return list(accumulate(change[:-1], lambda a, b: (a[0] + b[0], a[1] + b[1])))


def _repeats(
    keys: Sequence[Hashable], cost: Sequence[Handed], work: Sequence[bool], first: int, last: int
) -> Iterator[int]:
    """Of the longest stretch that goes on as it began, where each period begins; then of what is beside it."""
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


def _even(cost: Sequence[Handed], work: Sequence[bool]) -> list[int]:
    """Cuts for about as many parts as each has products, where the least is handed on."""
    products = [i for i, is_product in enumerate(work) if is_product]
    parts = max(math.isqrt(len(products)), 1)
    ends = [products[len(products) * k // parts] for k in range(1, parts)] if products else []
    reach = len(cost) // (2 * parts)
    return sorted({min(range(max(i - reach, 1), min(i + reach, len(cost))), key=cost.__getitem__) for i in ends})
