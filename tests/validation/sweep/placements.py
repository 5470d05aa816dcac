"""Where the tensors of one call may live: corner cases first, then all the others in a fixed random order."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

from shardlib import P

Cut = tuple[tuple[str, ...], ...]  # for every dim, the mesh axes that cut it, major first
Placement = tuple[Cut, ...]  # for every tensor

_TRIES = 200  # draws; nearly all of them new ones while there are many placements


def placements(shapes: Sequence[Sequence[int]], mesh: Mapping[str, int], even: bool, seed: str) -> Iterator[Placement]:
    """Placements of tensors of these shapes, each once; `even` leaves out cuts that do not divide a dim.

    Everything whole; every tensor cut on the same dim, counted from the front and from the back; one tensor cut alone;
    then anything.
    """
    choices = [cuts(shape, mesh, even) for shape in shapes]
    seen: set[Placement] = set()
    for one in itertools.chain(_corners(choices), _rest(choices, random.Random(seed))):
        if one not in seen:
            seen.add(one)
            yield one


def cuts(shape: Sequence[int], mesh: Mapping[str, int], even: bool) -> list[Cut]:
    """All cuts of one tensor, the whole one first; several axes on one dim in the mesh's order and the other way."""
    found: dict[Cut, None] = {}
    for dims in itertools.product((None, *range(len(shape))), repeat=len(mesh)):
        plain = _cut(dims, tuple(mesh), len(shape))
        for cut in (plain, tuple(axes[::-1] for axes in plain)):
            if not even or all(n % math.prod(mesh[a] for a in axes) == 0 for n, axes in zip(shape, cut, strict=True)):
                found[cut] = None
    return list(found)


def specs(placement: Placement) -> list[P]:
    """The same, for `shard`."""
    return [P(*(axes or None for axes in cut)) for cut in placement]


def _cut(dims: Sequence[int | None], axes: Sequence[str], rank: int) -> Cut:
    return tuple(tuple(a for a, d in zip(axes, dims, strict=True) if d == i) for i in range(rank))


def _corners(choices: Sequence[list[Cut]]) -> Iterator[Placement]:
    whole = tuple(c[0] for c in choices)
    yield whole
    for cut in sorted({cut for c in choices for cut in c[1:]}, key=len, reverse=True):
        for fit in (_front, _back):
            yield tuple(fit(cut, c) for c in choices)
    for i, c in enumerate(choices):
        for cut in c[1:]:
            yield (*whole[:i], cut, *whole[i + 1 :])


def _front(cut: Cut, choices: list[Cut]) -> Cut:
    rank = len(choices[0])
    return next((c for c in choices if c == (*cut, *((),) * rank)[:rank]), choices[0])


def _back(cut: Cut, choices: list[Cut]) -> Cut:
    rank = len(choices[0])
    return next((c for c in choices if c == (*((),) * rank, *cut)[len(cut) :]), choices[0])


def _rest(choices: Sequence[list[Cut]], rng: random.Random) -> Iterator[Placement]:
    if math.prod(map(len, choices)) <= _TRIES:
        every = list(itertools.product(*choices))
        yield from rng.sample(every, len(every))
    else:
        for _ in range(_TRIES):
            yield tuple(map(rng.choice, choices))
