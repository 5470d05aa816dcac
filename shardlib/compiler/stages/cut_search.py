"""The search for a cut: dynamic programming over the candidates of each boundary, on graphs that become finer.

A stage's cost depends on the boundaries before and behind it, and on the number of later stages that read each value
that it sends. So a state of the program is a candidate of a boundary with those numbers for the values that cross it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardlib.compiler.stages.boundaries import MAX_IDEALS, TOLERANCE, Boundary, find_boundaries, find_prefixes
from shardlib.compiler.stages.cut_graph import Array, Cost, CutGraph, contract_free_groups, contract_small_groups

MAX_STATES = 6_000  # of a boundary
TABLE = 4_000_000  # entries of a table of pairs of states


class Cut(NamedTuple):
    """The stage of each group (None: there is no cut), its objective and traffic, and True if no objective is less."""

    assignment: Array | None
    objective: float
    traffic: float
    exact: bool


@dataclass(frozen=True)
class States:
    """States of a boundary: a candidate, the number of later stages that read each tracked value, and the best rest.

    Values that are not tracked are read by one later stage if they cross. `choice` is the state of the next boundary.
    """

    candidate: Array
    tracked: Array
    counts: Array  # states x tracked values
    best: Array
    choice: Array


def search_cut(graph: CutGraph) -> Cut:
    """Returns the cut with the least objective, and of those the one with the least traffic, then the earliest.

    The best cut of a contracted graph bounds the search on the next finer one. If a graph has too many candidates, its
    best cut is the result, without proof.
    """
    levels = _contract(graph)
    best = Cut(None, np.inf, np.inf, True)
    for level, numbers in levels:
        max_ideals = MAX_IDEALS if level is levels[-1][0] else MAX_IDEALS // 8
        best = _improve(level, numbers, best, max_ideals, by_traffic=False)
    if best.assignment is None:
        return best
    return _improve(level, numbers, best, max_ideals, by_traffic=True)._replace(exact=best.exact)


def _improve(graph: CutGraph, numbers: Array, best: Cut, max_ideals: int, *, by_traffic: bool) -> Cut:
    """Returns the best cut of a graph that is not worse than `best`; cuts of one topological order come first.

    The search behind them is for faster cuts only, or with `by_traffic` for equally fast ones with less traffic.
    """
    bound = best.objective * (1 + TOLERANCE)
    quick = find_prefixes(graph, bound)
    best = _better(best, _solve(graph, quick, [True] * len(quick), bound, by_traffic=by_traffic), numbers)
    bound = best.objective * (1 + TOLERANCE if by_traffic else 1 - 2 * TOLERANCE)
    traffic = best.traffic if by_traffic else np.inf
    boundaries, complete = find_boundaries(graph, bound, traffic, max_ideals)
    cut = _solve(graph, boundaries, complete, bound, by_traffic=by_traffic)
    return _better(best, cut, numbers)._replace(exact=cut.exact)


def stage_costs(graph: CutGraph, cost: Cost, assignment: Array) -> Array:
    """Returns the cost of each stage."""
    total = np.bincount(assignment, cost.work[assignment, np.arange(graph.size)], graph.stages)
    flat, starts = graph.readers
    number = np.repeat(np.arange(len(graph.values)), np.diff([*starts, len(flat)]))
    sender, receiver = assignment[graph.producers[number]], assignment[flat]
    number, receiver = np.divmod(np.unique((number * graph.stages + receiver)[sender != receiver]), graph.stages)
    total += np.bincount(receiver, cost.receive[number], graph.stages)
    total += np.bincount(assignment[graph.producers[number]], cost.send[number], graph.stages)
    for i, readers in enumerate(graph.copies):
        present = sorted(set(assignment[list(readers)].tolist()))
        total[present] += cost.copy[i]
        total[present[1:]] += cost.before[i]
        total[present[:-1]] += cost.behind[i]
    return total


def _contract(graph: CutGraph) -> list[tuple[CutGraph, Array]]:
    """Returns graphs from the coarsest to the finest, each with the numbers of the groups that are parts of its own."""
    fine, numbers = contract_free_groups(graph)
    while (again := contract_free_groups(fine))[0].size < fine.size:
        fine, numbers = again[0], again[1][numbers]
    levels = [(fine, numbers)]
    smallest = max(48, 6 * graph.stages)
    while fine.size > 2 * smallest:
        coarse, merged = contract_small_groups(fine, max(smallest, fine.size // 4))
        if coarse.size > 0.9 * fine.size:
            break
        fine, numbers = coarse, merged[numbers]
        levels.append((fine, numbers))
    return levels[::-1]


def is_better(new: Cut, old: Cut) -> bool:
    """Returns whether a cut is faster, or equally fast with less traffic."""
    if new.objective < old.objective * (1 - TOLERANCE):
        return True
    return new.objective <= old.objective * (1 + TOLERANCE) and new.traffic < old.traffic


def _better(best: Cut, new: Cut, numbers: Array) -> Cut:
    """Returns the better of two cuts, the second for groups that are parts of those of its own graph."""
    if new.assignment is None or (best.assignment is not None and not is_better(new, best)):
        return best
    return new._replace(assignment=new.assignment[numbers], exact=best.exact)


def _solve(
    graph: CutGraph, boundaries: Sequence[Boundary], complete: Sequence[bool], bound: float, *, by_traffic: bool
) -> Cut:
    """Returns the best cut over the boundaries' candidates whose objective is at most `bound`.

    It is exact if all boundaries are complete. Without a cut, those from the last one to the first one whose states
    all exceed the bound suffice.
    """
    first = np.zeros(min(1, len(boundaries[-1])), dtype=np.int64)
    none = np.zeros(0, dtype=np.int64)
    states = [States(first, none, np.zeros((len(first), 0)), np.zeros(len(first)), first)]
    exact = complete[-1]
    for s in reversed(range(graph.stages)):
        if not len(states[-1].best):
            return Cut(None, np.inf, np.inf, exact)
        exact = exact and complete[s]
        extended = Pairs(graph, s, boundaries[s], boundaries[s + 1], states[-1]).extend(bound, by_traffic)
        if len(extended.best) > MAX_STATES:
            extended, exact = _keep_best(extended), False
        states.append(extended)
    if not len(states[-1].best):
        return Cut(None, np.inf, np.inf, exact)
    assignment = np.full(graph.size, graph.stages - 1)
    at = 0
    for s, rows in enumerate(states[:0:-1]):
        before = boundaries[s].contains(np.arange(graph.size))[rows.candidate[at]]
        if s:
            assignment[before & (assignment >= s)] = np.minimum(assignment[before & (assignment >= s)], s - 1)
        at = int(rows.choice[at])
    objective = float(stage_costs(graph, graph.objective, assignment).max())
    return Cut(assignment, objective, float(stage_costs(graph, graph.traffic, assignment).sum()), exact)


def _keep_best(states: States) -> States:
    rows = np.sort(np.argsort(states.best, kind="stable")[:MAX_STATES])
    return States(states.candidate[rows], states.tracked, states.counts[rows], states.best[rows], states.choice[rows])


@dataclass(frozen=True)
class Pairs:
    """Stage `s` between every candidate of the boundary before it and every state of the boundary behind it."""

    graph: CutGraph
    s: int
    front: Boundary
    back: Boundary
    states: States

    @cached_property
    def tracked(self) -> Array:
        """Values that may cross both boundaries: the stage may leave them unread, or not be their producer."""
        return np.intersect1d(self.front.crossing, self.back.crossing)

    @cached_property
    def back_counts(self) -> Array:
        """For each state and each value that crosses the back boundary, the number of later stages that read it."""
        counts = self.back.crosses[self.states.candidate].astype(np.float64)
        counts[:, np.searchsorted(self.back.crossing, self.states.tracked)] = self.states.counts
        return counts

    def extend(self, bound: float, by_traffic: bool) -> States:
        """Returns the states of the boundary before the stage; no stage may cost more than `bound`."""
        rows = max(8, min(128, TABLE // len(self.states.best)))  # few values cross for some of so few candidates
        parts = [
            self._extend_rows(np.arange(i, min(i + rows, len(self.front))), bound, by_traffic)
            for i in range(0, len(self.front), rows)
        ]
        none = np.zeros(0, dtype=np.int64)
        parts.append(States(none, self.tracked, np.zeros((0, len(self.tracked))), np.zeros(0), none))
        return States(
            np.concatenate([x.candidate for x in parts]),
            self.tracked,
            np.concatenate([x.counts for x in parts]),
            np.concatenate([x.best for x in parts]),
            np.concatenate([x.choice for x in parts]),
        )

    @cached_property
    def sums(self) -> tuple[Array, Array]:
        """The work of all groups before the front (rows) and the back boundary: objective, traffic, memory, number."""
        graph = self.graph
        costs = [cost.work[self.s] for cost in (graph.objective, graph.traffic, graph.memory)]
        weights = np.stack([*costs, graph.counts], axis=1)
        return self.front.sum(weights), self.back.sum(weights)[self.states.candidate]

    def _extend_rows(self, rows: Array, bound: float, by_traffic: bool) -> States:
        graph, states = self.graph, self.states
        table = Table(self, rows)
        objective = table.cost(graph.objective, 0)
        valid = table.nested & (objective <= bound)
        if np.isfinite(graph.limit):
            valid &= table.cost(graph.memory, 2) <= graph.limit
        total = table.cost(graph.traffic, 1) + states.best if by_traffic else np.maximum(objective, states.best)
        total[~valid] = np.inf
        codes = table.codes()
        if codes is None:
            state = total.argmin(axis=1)
            row = np.flatnonzero(np.isfinite(total[np.arange(len(rows)), state]))
            state = state[row]
        else:
            row, state = np.nonzero(valid)
            order = np.lexsort((total[row, state], codes[row, state], row))
            row, state = row[order], state[order]
            first = np.ones(len(order), dtype=bool)
            first[1:] = (np.diff(row) != 0) | (np.diff(codes[row, state]) != 0)
            row, state = row[first], state[first]
        return States(rows[row], self.tracked, table.counts(row, state), total[row, state], state)


class Table:
    """Costs of a stage for some candidates of its front boundary (rows) and all states behind it (columns)."""

    def __init__(self, pairs: Pairs, rows: Array) -> None:
        self.pairs = pairs
        self.front = front = pairs.front.keep(rows)
        back, graph = pairs.back, pairs.graph
        self.column = pairs.states.candidate
        groups = np.flatnonzero(front.union & ~back.intersection)
        outside = _any_common(front.contains(groups), ~back.contains(groups))
        self.sums = pairs.sums[0][rows], pairs.sums[1]
        self.nested = ~outside[:, self.column] & (self.sums[0][:, 3:] < self.sums[1][:, 3])
        self.crosses = pairs.front.crosses[rows]
        # For the tracked values that cross for some row: whether the producer is before the front boundary, how many
        # later stages read it, and if the stage does not surely read it, whether it does.
        crossing: Array = np.asarray(self.crosses[:, np.searchsorted(pairs.front.crossing, pairs.tracked)].any(axis=0))
        self.present = front.contains(graph.producers[pairs.tracked]) & crossing
        self.later = pairs.back_counts[:, np.searchsorted(back.crossing, pairs.tracked)]
        surely = back.intersection & ~front.union
        self.reads = {
            i: self._reads(graph.values[number].readers) & self.present[:, i : i + 1]
            for i, number in enumerate(pairs.tracked)
            if crossing[i] and not surely[list(graph.values[number].readers)].any()
        }

    def _reads(self, groups: Sequence[int]) -> Array:
        """Returns for each row and column whether one of the groups lies in the stage."""
        nodes = np.array(groups)
        return _any_common(~self.front.contains(nodes), self.pairs.back.contains(nodes))[:, self.column]

    def counts(self, row: Array, state: Array) -> Array:
        """Returns the number of stages, from this one on, that read each tracked value of some entries."""
        counts = self.present[row] * (self.later[state] + 1)
        for i, reads in self.reads.items():
            counts[:, i] -= self.present[row, i] & ~reads[row, state]
        return np.asarray(counts)

    def codes(self) -> Array | None:
        """Returns numbers that differ where two entries of a row have different counts; None if all are equal."""
        varies: Array = np.asarray(np.any(self.later != self.later[:1], axis=0) & np.any(self.present, axis=0))
        varying = [i for i in range(len(varies)) if i in self.reads or varies[i]]
        if not varying or not self.nested.any():
            return None
        codes = np.zeros(self.nested.shape, dtype=np.int64)
        weights = np.random.default_rng(0).integers(2**62, size=len(self.later.T))  # a hash; it wraps
        for i in varying:
            codes += weights[i] * (
                self.present[:, i : i + 1] * self.later[:, i].astype(np.int64) + self.reads.get(i, 0)
            )
        return codes

    def cost(self, cost: Cost, number: int) -> Array:
        """Returns the cost of the stage, as `stage_costs` does for a whole cut; `number` is its column of `sums`."""
        pairs, front, back = self.pairs, self.front, self.pairs.back
        received = self.crosses @ cost.receive[pairs.front.crossing]
        sent = pairs.back_counts @ cost.send[back.crossing]
        table = (self.sums[1][:, number] + sent)[None] + (received - self.sums[0][:, number])[:, None]
        table -= (self.present * cost.send[pairs.tracked]) @ self.later.T
        for i, reads in self.reads.items():
            value = pairs.tracked[i]
            column = self.crosses[:, np.searchsorted(pairs.front.crossing, value)]
            table -= cost.receive[value] * (column[:, None] & ~reads)
        for i, readers in enumerate(pairs.graph.copies):
            groups = np.array(readers)
            before = np.asarray(front.contains(groups).any(axis=1))[:, None]
            behind = ~np.asarray(back.contains(groups).all(axis=1))[self.column][None]
            table += self._reads(readers) * (cost.copy[i] + before * cost.before[i] + behind * cost.behind[i])
        return np.asarray(table)


def _any_common(a: Array, b: Array) -> Array:
    """Returns for each pair of rows whether both are True in one column."""
    return np.asarray(a.astype(np.float32) @ b.astype(np.float32).T > 0)
