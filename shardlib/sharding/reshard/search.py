"""The cheapest way between even cuts: Dijkstra's algorithm over single steps, never dearer than a way that is known.

A state is a cut and what is still pending. From there axes may be sliced off locally, gathered, exchanged for another
factor's, summed or scattered; or the pieces stay as they are and go to other devices. Axes that stay together from
beginning to end move as one *block*.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from shardlib.sharding.chunks import Placed, even
from shardlib.sharding.mesh.axis import Axis, ways
from shardlib.sharding.reshard.permute_devices import moving
from shardlib.sharding.reshard.prices import Prices
from shardlib.sharding.reshard.step import Axes, Cut, Leaves, Step, fits

_BLOCKS = 5  # with more, the number of arrangements outgrows what a better way is worth

T = TypeVar("T")
Blocks = tuple[int, ...]  # blocks, by their number, major first
State = tuple[tuple[Blocks, ...], Blocks]  # what is on every factor, and what is pending
Move = tuple[float, str, Blocks, int, int, State]  # bytes, kind, blocks, factor, to, what is then


def cheapest(
    parts: Leaves,
    itemsize: int,
    src: Cut,
    dst: Cut,
    pending: Axes,
    reduce: str,
    known: tuple[Step, ...],
    prices: Prices,
) -> tuple[Step, ...]:
    """The steps from `src` to `dst`, in no more bytes and less time than the way that is `known`, or that.

    `parts` are the sizes of the leaves that each factor is made of; uneven and chosen pieces stay on the known way.
    """
    factors = [(math.prod(leaves), axes) for cut in (src, dst) for leaves, axes in zip(parts, cut, strict=True)]
    if any(isinstance(n, Placed) for leaves in parts for n in leaves) or not all(even(n, axes) for n, axes in factors):
        return known
    blocks = _blocks([*src, *dst, pending])
    if len(blocks) > _BLOCKS:
        return known
    found = _Search(parts, itemsize, blocks, src, dst, pending, prices).run(known, reduce)
    if pending or sum(step.bytes > 0 for step in found) < 2:
        return found
    limit = sum(step.bytes for step in found)
    others = [way for way in _permuted(parts, itemsize, src, dst) if sum(step.bytes for step in way) <= limit]
    return min([found, *others], key=lambda way: sum(step.seconds(prices) for step in way))


def _permuted(parts: Leaves, itemsize: int, src: Cut, dst: Cut) -> Iterator[tuple[Step, ...]]:
    """The ways to send pieces, as they are, to where one exchange of minor axes brings them: these may be parts of axes
    that stay together otherwise."""
    sizes = tuple(map(math.prod, parts))
    local = itemsize * math.prod(sizes) / math.prod(map(ways, src))
    for to, axes in enumerate(dst):
        for k, factor in itertools.product(range(len(axes)), range(len(dst))):
            between = _with(_with(dst, to, axes[:k]), factor, (*dst[factor], *axes[k:]))
            if factor == to or [*map(ways, between)] != [*map(ways, src)] or not all(map(fits, parts, between)):
                continue
            along = moving([*zip(src, between, strict=True)])
            first = next(i for i, (x, y) in enumerate(zip(src, between, strict=True)) if x != y)
            n = ways(axes[k:])
            yield (
                Step("ppermute", Axis.merge(along), first, first, between, sizes, local),
                Step("all_to_all", Axis.merge(axes[k:]), factor, to, dst, sizes, local * (n - 1) / n),
            )


def _blocks(runs: Sequence[Axes]) -> list[Axes]:
    """The axes of `runs` in blocks: an axis joins the one that it follows wherever either stands."""
    pairs = [pair for run in runs for pair in pairwise((None, *run, None))]
    ahead: dict[Axis | None, set[Axis | None]] = defaultdict(set)
    behind: dict[Axis | None, set[Axis | None]] = defaultdict(set)
    for a, b in pairs:
        behind[a].add(b)
        ahead[b].add(a)
    blocks: dict[Axis, list[Axis]] = {}
    for previous, a in pairs:
        if a is not None and a not in blocks:
            joins = previous is not None and ahead[a] == {previous} and behind[previous] == {a}
            blocks[a] = blocks[previous] if joins and previous is not None else []
            blocks[a].append(a)
    return [tuple(block) for block in {id(block): block for block in blocks.values()}.values()]


class _Search:
    """All ways from one cut to another, the cheapest first."""

    def __init__(
        self, parts: Leaves, itemsize: int, blocks: list[Axes], src: Cut, dst: Cut, pending: Axes, prices: Prices
    ) -> None:
        self.parts, self.blocks, self.prices = parts, blocks, prices
        self.ways = [ways(block) for block in blocks]
        self.nbytes = itemsize * math.prod(n for leaves in parts for n in leaves)
        number = {block[0]: i for i, block in enumerate(blocks)}

        def numbered(axes: Axes) -> Blocks:
            return tuple(number[a] for a in axes if a in number)

        self.src: State = (tuple(map(numbered, src)), numbered(pending))
        self.dst: State = (tuple(map(numbered, dst)), ())
        self.wanted = [b for run in self.dst[0] for b in run]
        self.movable = [i for i in range(len(parts)) if src[i] or dst[i]]
        self._fits: dict[tuple[int, Blocks], bool] = {}
        self._arranged: dict[tuple[tuple[int, ...], Blocks], list[tuple[Blocks, ...]]] = {}

    def run(self, known: tuple[Step, ...], reduce: str) -> tuple[Step, ...]:
        """The steps of the cheapest way, or those of the `known` one."""
        limit = sum(step.bytes for step in known)
        bound = sum(step.seconds(self.prices) for step in known) * (1 - 1e-6)
        best: dict[State, float] = {self.src: 0.0}
        came: dict[State, tuple[State, Move]] = {}
        queue: list[tuple[float, float, State]] = [(0.0, 0.0, self.src)]
        while queue:
            cost, sent, state = heapq.heappop(queue)
            if state == self.dst:
                return self._told(came, reduce)
            if cost > best[state]:
                continue
            for move in self._moves(state, min(limit - sent, (bound - cost) * self.prices.fastest)):
                after, total = move[-1], sent + move[0]
                least = best.get(after, bound)
                if total > limit or cost + move[0] / self.prices.fastest >= least:
                    continue
                if (then := cost + self._paid(state, move)) < least:
                    best[after], came[after] = then, (state, move)
                    heapq.heappush(queue, (then, total, after))
        return known

    def _paid(self, state: State, move: Move) -> float:
        """Seconds of a move."""
        return 0.0 if move[1] == "slice" else self.prices.sent(self._along(state, move), move[0], move[1])

    def _along(self, state: State, move: Move) -> Axes:
        """The axes along which it goes; pieces that go to other devices, along those that tell them apart."""
        if move[1] != "ppermute":
            return tuple([a for b in move[2] for a in self.blocks[b]])
        return tuple(moving([*zip(self._axes(state), self._axes(move[-1]), strict=True)]))

    def _told(self, came: dict[State, tuple[State, Move]], reduce: str) -> tuple[Step, ...]:
        taken: list[tuple[State, Move]] = []
        state = self.dst
        while state != self.src:
            taken.append(came[state])
            state, _ = came[state]
        sizes, steps = tuple(map(math.prod, self.parts)), []
        for before, move in reversed(taken):
            nbytes, kind, _, factor, to, after = move
            axes = Axis.merge(self._along(before, move))
            steps.append(Step(kind, axes, factor, to, self._axes(after), sizes, nbytes, reduce))
        return tuple(steps)

    def _axes(self, state: State) -> Cut:
        return tuple(tuple(a for b in run for a in self.blocks[b]) for run in state[0])

    def _moves(self, state: State, limit: float) -> Iterator[Move]:
        """Every step from `state` that sends at most `limit` bytes."""
        cut, pending = state
        used = {*pending, *(b for run in cut for b in run)}
        local = self.nbytes / math.prod([self.ways[b] for run in cut for b in run])
        for i in self.movable:
            for b in self.wanted:
                if b not in used and self._fit(i, (*cut[i], b)):
                    yield 0.0, "slice", (b,), i, i, (_with(cut, i, (*cut[i], b)), pending)
            for b in pending:
                nbytes = local - local / self.ways[b]
                if nbytes <= limit and self._fit(i, (*cut[i], b)):
                    left = tuple(p for p in pending if p != b)
                    yield nbytes, "reduce_scatter", (b,), i, i, (_with(cut, i, (*cut[i], b)), left)
            for k in range(len(cut[i])):
                kept, run = cut[i][:k], cut[i][k:]
                n = math.prod([self.ways[b] for b in run])
                if local * (n - 1) <= limit:
                    yield local * (n - 1), "all_gather", run, i, i, (_with(cut, i, kept), pending)
                for j in self.movable if local * (n - 1) / n <= limit else ():
                    if j != i and self._fit(j, (*cut[j], *run)):
                        after = _with(_with(cut, i, kept), j, (*cut[j], *run))
                        yield local * (n - 1) / n, "all_to_all", run, i, j, (after, pending)
        n = math.prod([self.ways[b] for b in pending])
        if pending and 2 * local * (n - 1) / n <= limit:
            yield 2 * local * (n - 1) / n, "all_reduce", pending, -1, -1, (cut, ())
        if local <= limit:
            pieces = tuple([math.prod([self.ways[b] for b in run]) for run in cut])
            if (every := self._arranged.get((pieces, pending))) is None:
                others = [b for b in range(len(self.blocks)) if b not in pending]
                every = self._arranged[pieces, pending] = list(self._arrangements(pieces, others))
            for arranged in every:
                if arranged != cut:
                    first = next(i for i in self.movable if cut[i] != arranged[i])
                    yield local, "ppermute", (), first, first, (arranged, pending)

    def _arrangements(self, pieces: Sequence[int], blocks: Sequence[int], i: int = 0) -> Iterator[tuple[Blocks, ...]]:
        """All cuts into so many pieces of every factor, by whichever blocks."""
        if i == len(pieces):
            yield ()
            return
        for mine in self._runs(pieces[i], blocks):
            if self._fit(i, mine):
                for rest in self._arrangements(pieces, [b for b in blocks if b not in mine], i + 1):
                    yield (mine, *rest)

    def _runs(self, product: int, blocks: Sequence[int]) -> Iterator[Blocks]:
        """All runs of blocks with this product of sizes."""
        if product == 1:
            yield ()
            return
        for b in blocks:
            if product % self.ways[b] == 0:
                for rest in self._runs(product // self.ways[b], [x for x in blocks if x != b]):
                    yield (b, *rest)

    def _fit(self, i: int, run: Blocks) -> bool:
        """Whether factor i can be cut by these blocks evenly, and its leaves with it."""
        if (known := self._fits.get((i, run))) is None:
            known = self._fits[i, run] = fits(self.parts[i], [a for b in run for a in self.blocks[b]])
        return known


def _with(cut: tuple[tuple[T, ...], ...], i: int, run: tuple[T, ...]) -> tuple[tuple[T, ...], ...]:
    return (*cut[:i], run, *cut[i + 1 :])
