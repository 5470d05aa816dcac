"""Searches the cheapest reshard between even shardings by the A* algorithm over single steps.

A state is the axes of every factor and of the partial sum. A step slices a factor locally, gathers it, moves axes to
another factor, reduces or reduce-scatters the partial sum, or permutes shards over devices. Axes that stay together
from beginning to end move as one *block*.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from shardlib.sharding.chunks import UnchunkedSize, is_even
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.sharding.reshard.permute_devices import changed_axes
from shardlib.sharding.reshard.prices import Prices
from shardlib.sharding.reshard.step import Axes, FactorAxes, FactorSizes, Step, is_evenly_sharded

_BLOCKS = 5  # with more, the search takes longer than a better reshard saves

T = TypeVar("T")
Blocks = tuple[int, ...]  # blocks, by their number, major first
State = tuple[tuple[Blocks, ...], Blocks]  # the blocks of every factor, and of the partial sum
Move = tuple[float, str, Blocks, int, int, State]  # bytes, kind, blocks, factor, to, next state


def find_cheapest(
    parts: FactorSizes,
    itemsize: int,
    src: FactorAxes,
    dst: FactorAxes,
    pending: Axes,
    reduce: str,
    direct: tuple[Step, ...],
    prices: Prices,
) -> tuple[Step, ...]:
    """Returns steps from `src` to `dst` with no more bytes and less time than the `direct` ones, or these.

    `parts` are the sizes of the factors that were fused into each factor. Uneven shardings keep the direct steps.
    """
    factors = [(math.prod(leaves), axes) for cut in (src, dst) for leaves, axes in zip(parts, cut, strict=True)]
    if any(isinstance(n, UnchunkedSize) for leaves in parts for n in leaves) or not all(
        is_even(n, axes) for n, axes in factors
    ):
        return direct
    blocks = _blocks([*src, *dst, pending])
    if len(blocks) > _BLOCKS:
        return direct
    best = _Search(parts, itemsize, blocks, src, dst, pending, prices).run(direct, reduce)
    if pending or sum(step.bytes > 0 for step in best) < 2:
        return best
    limit = sum(step.bytes for step in best)
    others = [way for way in _permute_then_exchange(parts, itemsize, src, dst) if sum(s.bytes for s in way) <= limit]
    return min([best, *others], key=lambda way: sum(step.seconds(prices) for step in way))


def _permute_then_exchange(
    parts: FactorSizes, itemsize: int, src: FactorAxes, dst: FactorAxes
) -> Iterator[tuple[Step, ...]]:
    """Yields reshards that permute shards and then exchange minor axes, also parts of blocks."""
    sizes = tuple(map(math.prod, parts))
    local = itemsize * math.prod(sizes) / math.prod(map(group_size, src))
    for to, axes in enumerate(dst):
        for k, factor in itertools.product(range(len(axes)), range(len(dst))):
            between = _with(_with(dst, to, axes[:k]), factor, (*dst[factor], *axes[k:]))
            if (
                factor == to
                or [*map(group_size, between)] != [*map(group_size, src)]
                or not all(map(is_evenly_sharded, parts, between))
            ):
                continue
            along = changed_axes([*zip(src, between, strict=True)], operator.attrgetter("size"))
            first = next(i for i, (x, y) in enumerate(zip(src, between, strict=True)) if x != y)
            n = group_size(axes[k:])
            yield (
                Step("ppermute", Axis.merge(along), first, first, between, sizes, local),
                Step("all_to_all", Axis.merge(axes[k:]), factor, to, dst, sizes, local * (n - 1) / n),
            )


def _blocks(runs: Sequence[Axes]) -> list[Axes]:
    """Groups the axes of `runs` into blocks: two axes join if they are neighbors in every run that has either."""
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
    """The A* algorithm from one sharding to another (Hart, Nilsson and Raphael, 1968).

    It drops a state as soon as the bytes that some device still lacks would exceed the cost of the best known way.
    """

    def __init__(
        self,
        parts: FactorSizes,
        itemsize: int,
        blocks: list[Axes],
        src: FactorAxes,
        dst: FactorAxes,
        pending: Axes,
        prices: Prices,
    ) -> None:
        self.parts, self.blocks, self.prices = parts, blocks, prices
        self.ways = [group_size(block) for block in blocks]
        self.nbytes = itemsize * math.prod(n for leaves in parts for n in leaves)
        number = {block[0]: i for i, block in enumerate(blocks)}

        def numbered(axes: Axes) -> Blocks:
            return tuple(number[a] for a in axes if a in number)

        self.src: State = (tuple(map(numbered, src)), numbered(pending))
        self.dst: State = (tuple(map(numbered, dst)), ())
        self.end_bytes = self.nbytes / math.prod(map(group_size, dst))
        self.wanted = [b for run in self.dst[0] for b in run]
        self.movable = [i for i in range(len(parts)) if src[i] or dst[i]]
        self._fits: dict[tuple[int, Blocks], bool] = {}
        self._arranged: dict[tuple[tuple[int, ...], Blocks], list[tuple[Blocks, ...]]] = {}
        self._missing_memo: dict[State, float] = {}
        self._axes_memo: dict[Blocks, Axes] = {}

    def run(self, direct: tuple[Step, ...], reduce: str) -> tuple[Step, ...]:
        """Returns the cheapest steps, or the `direct` ones if none are cheaper."""
        limit = sum(step.bytes for step in direct)
        bound = sum(step.seconds(self.prices) for step in direct) * (1 - 1e-6)
        fastest = self.prices.highest_rate
        best: dict[State, float] = {self.src: 0.0}
        came: dict[State, tuple[State, Move]] = {}
        queue: list[tuple[float, float, float, State]] = [(0.0, 0.0, 0.0, self.src)]
        while queue:
            _, cost, sent, state = heapq.heappop(queue)
            if state == self.dst:
                return self._trace_back(came, reduce)
            if cost > best[state]:
                continue
            is_permuted = state in came and came[state][1][1] == "ppermute"
            for move in self._moves(state, min(limit - sent, (bound - cost) * fastest), is_permuted):
                after, total = move[-1], sent + move[0]
                missing = self._missing(after)
                least = best.get(after, bound)
                if (
                    total + missing > limit
                    or (then := cost + move[0] / fastest) >= least
                    or then + missing / fastest >= bound
                ):
                    continue
                if (then := cost + self._seconds(state, move)) < least and then + missing / fastest < bound:
                    best[after], came[after] = then, (state, move)
                    heapq.heappush(queue, (then + missing / fastest, then, total, after))
        return direct

    def _missing(self, state: State) -> float:
        """Returns the bytes of its shard in `dst` that some device lacks in `state`."""
        if (missing := self._missing_memo.get(state)) is None:
            cut, pending = state
            share = 0.0 if pending else 1.0  # of the shard in `dst`, on the device that holds least
            for run, end in zip(cut, self.dst[0], strict=True):
                longer = run[len(end) :]
                share = 0.0 if any(map(operator.ne, run, end)) else share / math.prod([self.ways[b] for b in longer])
            missing = self._missing_memo[state] = self.end_bytes * (1 - share)
        return missing

    def _seconds(self, state: State, move: Move) -> float:
        return 0.0 if move[1] == "slice" else self.prices.comm_seconds(self._along(state, move), move[0], move[1])

    def _along(self, state: State, move: Move) -> Axes:
        """Returns the axes of a move; for a permutation, the axes along which shards change."""
        blocks = move[2]
        if move[1] == "ppermute":
            blocks = tuple(changed_axes([*zip(state[0], move[-1][0], strict=True)], self.ways.__getitem__))
        if (axes := self._axes_memo.get(blocks)) is None:
            axes = self._axes_memo[blocks] = tuple([a for b in blocks for a in self.blocks[b]])
        return axes

    def _trace_back(self, came: dict[State, tuple[State, Move]], reduce: str) -> tuple[Step, ...]:
        moves: list[tuple[State, Move]] = []
        state = self.dst
        while state != self.src:
            moves.append(came[state])
            state, _ = came[state]
        sizes, steps = tuple(map(math.prod, self.parts)), []
        for before, move in reversed(moves):
            nbytes, kind, _, factor, to, after = move
            axes = Axis.merge(self._along(before, move))
            steps.append(Step(kind, axes, factor, to, self._axes(after), sizes, nbytes, reduce))
        return tuple(steps)

    def _axes(self, state: State) -> FactorAxes:
        return tuple(tuple(a for b in run for a in self.blocks[b]) for run in state[0])

    def _moves(self, state: State, limit: float, is_permuted: bool) -> Iterator[Move]:
        """Yields the steps from `state` that send at most `limit` bytes."""
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
        if local <= limit and not is_permuted:  # two permutations are one
            shards = tuple([math.prod([self.ways[b] for b in run]) for run in cut])
            if (every := self._arranged.get((shards, pending))) is None:
                others = [b for b in range(len(self.blocks)) if b not in pending]
                every = self._arranged[shards, pending] = list(self._arrangements(shards, others))
            for arranged in every:
                if arranged != cut:
                    first = next(i for i in self.movable if cut[i] != arranged[i])
                    yield local, "ppermute", (), first, first, (arranged, pending)

    def _arrangements(self, shards: Sequence[int], blocks: Sequence[int], i: int = 0) -> Iterator[tuple[Blocks, ...]]:
        """Yields all shardings with these numbers of shards per factor."""
        if i == len(shards):
            yield ()
            return
        for run in self._runs(shards[i], blocks):
            if self._fit(i, run):
                for rest in self._arrangements(shards, [b for b in blocks if b not in run], i + 1):
                    yield (run, *rest)

    def _runs(self, product: int, blocks: Sequence[int]) -> Iterator[Blocks]:
        """Yields all runs of blocks with this product of sizes."""
        if product == 1:
            yield ()
            return
        for b in blocks:
            if product % self.ways[b] == 0:
                for rest in self._runs(product // self.ways[b], [x for x in blocks if x != b]):
                    yield (b, *rest)

    def _fit(self, i: int, run: Blocks) -> bool:
        """Returns whether these blocks shard factor i evenly, and the factors in it."""
        if (fits := self._fits.get((i, run))) is None:
            fits = self._fits[i, run] = is_evenly_sharded(self.parts[i], [a for b in run for a in self.blocks[b]])
        return fits


def _with(cut: tuple[tuple[T, ...], ...], i: int, run: tuple[T, ...]) -> tuple[tuple[T, ...], ...]:
    return (*cut[:i], run, *cut[i + 1 :])
