"""The boundaries that a cut may have: for each, the sets of groups that may lie before it.

A cut into P stages is a chain of *ideals*: boundary s has before it the groups of stages 0 to s - 1, closed under
inputs. Few ideals can be part of a cut that is no slower than a known one: stages before and behind the boundary must
be able to hold the work, and the values that cross all boundaries must fit into the time that work leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from typing import NamedTuple

import numpy as np

from shardlib.compiler.stages.cut_graph import Array, CutGraph, byte_tables

TOLERANCE = 1e-9  # relative; costs that differ by less are equal
MAX_IDEALS = 4_000  # of a boundary
MAX_PREFIXES = 1_500  # the same, of one topological order
STEPS = 20  # of an enumeration, for each ideal


@dataclass(frozen=True)
class Boundary:
    """Candidates for the groups before a boundary: `base` and for each candidate a row of `bits` over groups `free`."""

    graph: CutGraph
    base: Array
    free: Array
    bits: Array

    def __len__(self) -> int:
        return len(self.bits)

    def keep(self, rows: Array) -> Boundary:
        """Returns the boundary with some of its candidates."""
        return Boundary(self.graph, self.base, self.free, self.bits[rows])

    def contains(self, groups: Array) -> Array:
        """Returns for each candidate and group whether the group lies before the boundary."""
        return np.asarray(self._padded[:, self._columns[groups]])

    @cached_property
    def _padded(self) -> Array:
        """The bits, and behind them a column for groups of no candidate and one for groups of all."""
        constants = np.broadcast_to(np.array([False, True]), (len(self), 2))
        return np.concatenate([self.bits, constants], axis=1)

    @cached_property
    def _columns(self) -> Array:
        """The column of `_padded` of each group."""
        columns = len(self.free) + self.base.astype(np.int64)
        columns[self.free] = np.arange(len(self.free))
        return columns

    def sum(self, weights: Array) -> Array:
        """Returns for each candidate the sum of the weights of its groups."""
        return np.asarray(self.bits.astype(np.float64) @ weights[self.free] + weights[self.base].sum(axis=0))

    @cached_property
    def union(self) -> Array:
        """Groups that some candidate contains."""
        groups = self.base.copy()
        groups[self.free] |= self.bits.any(axis=0)
        return groups

    @cached_property
    def intersection(self) -> Array:
        """Groups that all candidates contain."""
        groups = self.base.copy()
        groups[self.free] |= self.bits.all(axis=0)
        return groups

    @cached_property
    def crossing(self) -> Array:
        """Numbers of the values that cross the boundary for some candidate."""
        graph = self.graph
        return np.flatnonzero(self.union[graph.producers] & ~graph.all_readers(self.intersection[None])[0])

    @cached_property
    def crosses(self) -> Array:
        """For each candidate and each value of `crossing`, whether it crosses."""
        rows = np.ascontiguousarray(self._padded.T)
        outside, inside = len(self.free), len(self.free) + 1
        table = np.empty((len(self.crossing), len(self)), dtype=bool)
        for i, number in enumerate(self.crossing):
            producer, readers = self.graph.values[number]
            columns = set(self._columns[list(readers)].tolist()) - {inside}
            all_read = rows[outside if outside in columns else inside].copy()
            for column in columns - {outside}:
                all_read &= rows[column]
            np.greater(rows[self._columns[producer]], all_read, out=table[i])
        return table.T


class Ranges(NamedTuple):
    """Facts that hold for all cuts within a bound.

    `before` and `behind` (boundaries x groups) say that a group must lie on that side of a boundary. `sure` (stages x
    values) says that a stage must receive a value. Values without sure messages count at each of the `n` boundaries
    that they may cross with `share`, an n-th of their cost.
    """

    before: Array
    behind: Array
    sure: Array
    share: Array


def find_boundaries(
    graph: CutGraph, bound: float, traffic: float = np.inf, max_ideals: int = MAX_IDEALS
) -> tuple[list[Boundary], list[bool]]:
    """Returns the candidates of all P + 1 boundaries for cuts whose objective is at most `bound`.

    With `traffic`, only cuts with at most this traffic count. The second result is False for a boundary with too many
    candidates; those of the topological order take their place.
    """
    ranges = _find_ranges(graph, bound)
    boundaries, complete = [], []
    for s in range(graph.stages + 1):
        masks = _enumerate_ideals(Space(graph, bound, traffic, s, ranges), max_ideals)
        complete.append(masks is not None)
        boundaries.append(_prefixes(graph, s, ranges) if masks is None else _pack(graph, s, ranges, masks))
    return _tighten(graph, boundaries, complete, bound, traffic, ranges), complete


def find_prefixes(graph: CutGraph, bound: float) -> list[Boundary]:
    """Returns for each boundary the cuts of one topological order, for cuts whose objective is at most `bound`."""
    ranges = _find_ranges(graph, bound)
    boundaries = [_prefixes(graph, s, ranges) for s in range(graph.stages + 1)]
    return _tighten(graph, boundaries, [True] * len(boundaries), bound, np.inf, ranges)


def _prefixes(graph: CutGraph, s: int, ranges: Ranges) -> Boundary:
    """Returns the cuts of the topological order in which groups that must lie before the boundary come first."""
    before, behind = ranges.before[s], ranges.behind[s]
    free = np.flatnonzero(~before & ~behind)
    bits = np.tri(len(free) + 1, len(free), -1, dtype=bool)
    if len(bits) > MAX_PREFIXES:
        bits = bits[np.linspace(0, len(free), MAX_PREFIXES).astype(np.int64)]
    return Boundary(graph, before, free, bits)


def _find_ranges(graph: CutGraph, bound: float) -> Ranges:
    stages = np.arange(graph.stages + 1)[:, None]
    before, behind = graph.latest[None] < stages, graph.earliest[None] >= stages
    if np.isfinite(bound):
        most = bound * (1 + TOLERANCE)
        before = before | (graph.work_behind > (graph.stages - stages) * most)
        behind = behind | (graph.work_before > stages * most)
    all_before = graph.all_readers(before)
    may_cross = ~behind[:, graph.producers] & ~all_before
    # A reader that is before the next boundary and behind this one is in the stage.
    sure = before[:-1, graph.producers] & ~graph.all_readers(~(before[1:] & behind[:-1]))
    share = np.where(sure.any(axis=0), 0.0, 1 / np.maximum(1, may_cross.sum(axis=0)))
    return Ranges(before, behind, sure, share)


def sure_costs(graph: CutGraph, s: int, ranges: Ranges) -> tuple[float, float]:
    """Returns the cost of sure messages for the stages before boundary s, and for those behind it."""
    sends = graph.objective.send * ranges.sure.sum(axis=0)
    received = ranges.sure @ graph.objective.receive
    before, behind = (side[s, graph.producers] for side in (ranges.before, ranges.behind))
    return float(received[:s].sum() + sends[before].sum()), float(received[s:].sum() + sends[behind].sum())


def _enumerate_ideals(space: Space, max_ideals: int) -> list[int] | None:
    """Lists the ideals of a boundary as bit masks over its free groups, or returns None if there are too many."""
    ideals: list[int] = []
    for steps, mask in enumerate(space.ideals()):
        if mask is not None:
            ideals.append(mask)
        if len(ideals) > max_ideals or steps > STEPS * max_ideals:
            return None
    return ideals


class Space:
    """The free groups of one boundary: their order, work, and the values that cross once a group lies behind it."""

    def __init__(self, graph: CutGraph, bound: float, traffic: float, s: int, ranges: Ranges) -> None:
        before, behind, share = ranges.before[s], ranges.behind[s], ranges.share
        self.is_empty = bool((before & behind).any())
        free = np.flatnonzero(~before & ~behind)
        local = {int(group): i for i, group in enumerate(free)}
        self.inputs = [sum(1 << local[x] for x in graph.inputs[g] if x in local) for g in map(int, free)]
        self.outputs = [[local[x] for x in graph.outputs[g] if x in local] for g in map(int, free)]
        self.reach = [0] * len(free)
        for i in reversed(range(len(free))):
            self.reach[i] = 1 << i
            for x in self.outputs[i]:
                self.reach[i] |= self.reach[x]
        work = graph.objective.least_work
        most = bound * (1 + TOLERANCE)
        self.work = [float(x) for x in work[free]]
        self.tables = byte_tables(np.append(work[free], np.zeros(-len(free) % 8))).tolist()
        self.start = float(work[before].sum()), float(work[behind].sum())
        sent, received = sure_costs(graph, s, ranges)
        self.limits = (
            (s * most if s else 0.0) - sent,
            ((graph.stages - s) * most if s < graph.stages else 0.0) - received,
        )
        sure = ranges.sure.sum(axis=0)
        self.budgets = (
            graph.stages * most - float(work.sum() + sure @ graph.message),
            traffic * (1 + TOLERANCE) - sure @ graph.traffic.receive,
        )
        crossing = np.flatnonzero(~behind[graph.producers] & ~graph.all_readers(before[None])[0])
        costs = np.stack([graph.message, graph.traffic.receive])[:, crossing] * share[crossing]
        self.cost: list[tuple[float, float]] = list(zip(*costs.tolist(), strict=True))
        self.reads: list[int] = [0] * len(free)  # values that each group reads, as bits
        self.crossing = 0  # values that cross for every candidate
        for i, (producer, readers) in enumerate(graph.values[x] for x in crossing):
            for x in readers:
                if x in local:
                    self.reads[local[x]] |= 1 << i
                elif behind[x] and before[producer]:
                    self.crossing |= 1 << i

    def ideals(self) -> Iterator[int | None]:
        """Yields every ideal that the limits allow, and None for each step without a result.

        A step takes the first group whose inputs lie before the boundary, and puts it before or behind the boundary.
        """
        if self.is_empty:
            return
        ready = sum(1 << i for i, inputs in enumerate(self.inputs) if not inputs)
        stack = [(0, ready, *self.start, 0, self.crossing, *self._spend(self.crossing, *self.budgets))]
        while stack:
            mask, ready, work, rest, out, crossing, budget, traffic = stack.pop()
            if budget < 0 or traffic < 0 or work > self.limits[0] or rest > self.limits[1]:
                yield None
            elif not ready:
                yield mask
            else:
                bit = ready & -ready
                group = bit.bit_length() - 1
                added, new = self.reach[group] & ~out, self.reads[group] & ~crossing
                behind = rest + sum(map(getitem, self.tables, added.to_bytes(len(self.tables), "little")))
                left = self._spend(new, budget, traffic)
                stack.append((mask, ready ^ bit, work, behind, out | added, crossing | new, *left))
                inside = mask | bit
                more = sum(1 << i for i in self.outputs[group] if not self.inputs[i] & ~inside)
                work += self.work[group]
                stack.append((inside, ready ^ bit | more, work, rest, out, crossing, budget, traffic))
                yield None

    def _spend(self, values: int, budget: float, traffic: float) -> tuple[float, float]:
        """Returns what is left of both budgets behind values that cross."""
        for i in _bits(values):
            budget -= self.cost[i][0]
            traffic -= self.cost[i][1]
        return budget, traffic


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def _pack(graph: CutGraph, s: int, ranges: Ranges, masks: list[int]) -> Boundary:
    """Returns a boundary of these candidates, smaller ones first."""
    groups = np.flatnonzero(~ranges.before[s] & ~ranges.behind[s])
    width = max(1, -(-len(groups) // 8))
    masks = sorted(masks, key=lambda mask: (mask.bit_count(), mask))
    data = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(data.reshape(len(masks), width), axis=1, count=len(groups), bitorder="little")
    return Boundary(graph, ranges.before[s], groups, bits.astype(bool))


def _tighten(
    graph: CutGraph,
    boundaries: list[Boundary],
    complete: list[bool],
    bound: float,
    traffic: float,
    ranges: Ranges,
) -> list[Boundary]:
    """Drops candidates whose work and messages, with the least ones of all other boundaries, exceed a bound.

    A value that may cross one boundary only costs its sender and its receiver; of others, one of the two is sure.
    """
    if not np.isfinite(bound):
        return boundaries
    cost, share = graph.objective, ranges.share
    both = np.where(share == 1, graph.message, np.minimum(cost.send, cost.receive))
    shares = np.stack([both, graph.traffic.receive, cost.send, cost.receive], axis=1) * share[:, None]
    crossing = [boundary.crosses.astype(np.float64) @ shares[boundary.crossing] for boundary in boundaries]
    least = np.zeros((len(boundaries), 2))
    for s, messages in enumerate(crossing):
        if complete[s] and len(messages):
            least[s] = messages.min(axis=0)[:2]
    most = bound * (1 + TOLERANCE)
    total = float(cost.least_work.sum())
    slack = TOLERANCE * total
    moved = float((ranges.sure @ graph.traffic.receive).sum() + least[:, 1].sum())
    result = []
    for s, (boundary, messages) in enumerate(zip(boundaries, crossing, strict=True)):
        work = boundary.sum(cost.least_work)
        sent, received = sure_costs(graph, s, ranges)
        fits = work + messages[:, 2] + sent + least[:s, 0].sum() <= s * most + slack
        fits &= total - work + messages[:, 3] + received + least[s + 1 :, 0].sum() <= (graph.stages - s) * most + slack
        fits &= messages[:, 1] + moved - least[s, 1] <= traffic * (1 + TOLERANCE)
        result.append(boundary.keep(fits))
    return result
