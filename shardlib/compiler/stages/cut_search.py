"""The search for a cut: the best intervals of a few orders, moves of branches, and for small graphs all assignments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlib.compiler.stages.cut_graph import COPIES, TOLERANCE, UNASSIGNED, Assignment, CutGraph, Price, is_below

Array = NDArray[Any]
NO_PRICE: Price = (np.inf, np.inf, np.inf)
MAX_PLACES = 256  # for a boundary, that are compared at once
MAX_ROUNDS = 4  # of such comparisons, near the boundaries of the last one
MAX_MOVES = 10_000  # groups that the local search assigns
SMALL = 14  # groups of a graph whose assignments are all compared
MAX_STEPS = 40_000  # groups that this comparison assigns


def search_cut(graph: CutGraph) -> tuple[Assignment | None, float, bool]:
    """Returns the cut with the least price that the search sees, or None if each leaves a stage without work.

    The other results are seconds that no cut is below, and True if those of this cut are none above.
    """
    best: Assignment | None = None
    for order in _orders(graph):
        if (stages := Intervals(graph, order).best_stages()) is not None:
            cut = Assignment(graph, stages)
            best = cut if best is None or is_below(cut.price(), best.price()) else best
    if best is not None:
        _improve(best)
    exact = len(graph.groups) < MAX_PLACES and all(x == [i - 1] for i, x in enumerate(graph.inputs) if i)  # a chain
    if len(graph.groups) <= SMALL and not exact:
        best, exact = _compare_all(graph, best)
    work = [group.seconds for group in graph.groups]
    excess, seconds, _ = best.price() if best else NO_PRICE
    bound = seconds if exact else max(sum(work) / graph.stages, *work)
    return best, bound, exact or (excess == 0 and seconds <= bound * (1 + TOLERANCE))


def _compare_all(graph: CutGraph, best: Assignment | None) -> tuple[Assignment | None, bool]:
    """Returns the best of all assignments by branch and bound, and False if that takes too many steps."""
    price, stages = best.price() if best else NO_PRICE, None
    cut, steps = Assignment(graph), 0
    work = [*accumulate((group.seconds for group in reversed(graph.groups)), initial=0.0)][::-1]
    working = [*accumulate((group.seconds > 0 for group in reversed(graph.groups)), initial=0)][::-1]

    def assign(group: int) -> None:
        nonlocal price, stages, steps
        if group == len(graph.groups):
            price, stages = cut.price(), [*cut.stages]
            return
        inputs, outputs = ([cut.stages[x] for x in near[group]] for near in (graph.inputs, graph.outputs))
        last = min([graph.groups[group].latest, *(x for x in outputs if x != UNASSIGNED)])
        first = max([graph.groups[group].earliest, *inputs])
        for stage in range(last, first - 1, -1):
            steps += 1
            if steps <= MAX_STEPS:
                cut.put(group, stage)
                has_work = cut.working.count(0) <= working[group + 1]
                if has_work and is_below(cut.price(work[group + 1]), price):
                    assign(group + 1)
                cut.put(group, UNASSIGNED)

    assign(0)
    return (Assignment(graph, stages) if stages else best), steps <= MAX_STEPS


def _improve(cut: Assignment) -> None:
    """Moves groups, each with those that must come along, to other stages while that helps; slow stages first."""
    graph, price, left, is_better = cut.graph, cut.price(), MAX_MOVES, True
    while is_better:
        is_better = False
        for group in sorted(range(len(graph.groups)), key=lambda x: -cut.seconds[cut.stages[x]]):
            old, (*_, earliest, latest) = cut.stages[group], graph.groups[group]
            for stage in (old - 1, old + 1) if group < graph.owners else range(COPIES, graph.stages):
                if left < 0 or not earliest <= stage <= latest:
                    continue
                moved = cut.move(group, stage)
                left -= len(moved)
                if all(cut.working) and is_below(cut.price(), price):
                    price, is_better = cut.price(), True
                    break
                for x, before in reversed(moved):
                    cut.put(x, before)


def _orders(graph: CutGraph) -> list[tuple[int, ...]]:
    """Returns topological orders: the given one, and depth-first ones, in which branches lie behind each other.

    Groups that must lie on early stages come first.
    """
    orders = [range(graph.owners), _depth_first(graph, 1), _depth_first(graph, -1)]
    keys = [[group[3:] for group in graph.groups], [group[:2:-1] for group in graph.groups]]
    return list(dict.fromkeys(tuple(sorted(order, key=key.__getitem__)) for key in keys for order in orders))


def _depth_first(graph: CutGraph, step: int) -> list[int]:
    order: dict[int, None] = {}
    waiting = [group for group in range(graph.owners) if not graph.outputs[group]][::step]
    while waiting:
        inputs = [x for x in graph.inputs[waiting[-1]][::step] if x not in order and x < graph.owners]
        waiting += inputs
        if not inputs:
            order[waiting.pop()] = None
    return list(order)


class Intervals:
    """Cuts of one order into intervals, compared by dynamic programming.

    An interval pays once for each value that it sends, even if several stages read it. A tied parameter is owned by its
    first reader.
    """

    def __init__(self, graph: CutGraph, order: Sequence[int]) -> None:
        self.graph, self.order, self.size = graph, order, len(order)
        position = {group: i for i, group in enumerate(order)}
        # An interval that begins in positions (a, b] and ends in (c, d] pays seconds, traffic and memory.
        rows: list[tuple[float, ...]] = []
        for producer, readers, seconds, traffic, held, kept in graph.values:
            places = sorted(position[x] for x in readers)
            last = position.get(producer, places[0])
            rows += [(-1, last, last, places[-1], seconds, 0, 0), (-1, last, last, self.size, 0, 0, kept)]
            rows += [(a, b, b, self.size, seconds, traffic, held) for a, b in pairwise([last, *places])]
        self.rows = np.array(rows, dtype=np.float64).reshape(-1, 7)
        groups = np.array([graph.groups[x] for x in order], dtype=np.float64).T
        self.sums = np.cumsum(np.pad([*groups[:3], groups[0] > 0], ((0, 0), (1, 0))), axis=1)
        self.barred = np.array([np.cumsum([0, *((groups[3] > s) | (groups[4] < s))]) for s in range(graph.stages)])

    def best_stages(self) -> list[int] | None:
        """Returns the stage of each group, or None if each cut of the order leaves a stage without work."""
        graph, size, is_long = self.graph, self.size, self.size >= MAX_PLACES
        places = np.arange(size + 1)
        if is_long:  # first of all, places behind some groups that take time
            ends = np.flatnonzero(np.diff(self.sums[3])) + 1
            turns = np.flatnonzero(np.diff(self.barred).any(axis=0)) + 1
            places = np.unique([0, size, *turns, *ends[np.linspace(0, len(ends) - 1, MAX_PLACES).astype(int)]])
        if (cuts := self._solve(places)) is None:
            return None
        far = np.geomspace(1, max(2, size // graph.stages), max(2, MAX_PLACES // graph.stages // 2)).astype(int)
        for _ in range(MAX_ROUNDS if is_long else 0):
            closer = self._solve(np.unique(np.clip(np.add.outer(cuts, [*-far, 0, *far]), 0, size)))
            cuts = cuts if closer is None else closer
        stages = dict(zip(self.order, np.searchsorted(cuts[1:-1], np.arange(self.size), side="right"), strict=True))
        owners = range(graph.owners, len(graph.groups))
        stages |= {owner: min(stages[x] for x in graph.outputs[owner]) for owner in owners}
        return [int(stages[group]) for group in range(len(graph.groups))]

    def _solve(self, places: Array) -> Array | None:
        """Returns the best boundaries among some places: with least memory above the limit, seconds, then traffic."""
        graph, tables = self.graph, np.zeros((3, len(places) + 1, len(places) + 1))
        corners = np.searchsorted(places, self.rows[:, :4], side="right")
        for begin, end, sign in ((0, 2, 1), (1, 2, -1), (0, 3, -1), (1, 3, 1)):
            for table, costs in zip(tables, self.rows[:, 4:].T, strict=True):
                np.add.at(table, (corners[:, begin], corners[:, end]), sign * costs)
        messages, traffic, held = tables.cumsum(axis=1).cumsum(axis=2)[:, :-1, :-1]
        work, memory, saved, working = (x[None, places] - x[places, None] for x in self.sums)
        memories = [memory + held + live * saved for live in graph.live]
        is_valid = [(working > 0) & (x[None, places] == x[places, None]) for x in self.barred]
        seconds = messages + work

        def chain(costs: Sequence[Array], combine: np.ufunc) -> tuple[float, list[int]]:
            """Returns the least combined cost of all stages, and the boundaries."""
            best, choices = np.where(places == 0, 0.0, np.inf), []
            for cost, valid in zip(costs, is_valid, strict=True):
                total = np.where(valid, combine(best[:, None], cost), np.inf)
                choices.append(total.argmin(axis=0))
                best = total.min(axis=0)
            boundaries = [len(places) - 1]
            for choice in reversed(choices):
                boundaries.append(int(choice[boundaries[-1]]))
            return float(best[-1]), boundaries[::-1]

        if graph.limit < np.inf:
            limit = max(chain(memories, np.maximum)[0], graph.limit)
            is_valid = [valid & (cost <= limit) for valid, cost in zip(is_valid, memories, strict=True)]
        slowest, _ = chain([seconds] * graph.stages, np.maximum)
        is_valid = [valid & (seconds <= slowest * (1 + TOLERANCE)) for valid in is_valid]
        _, boundaries = chain([traffic] * graph.stages, np.add)
        return places[boundaries] if slowest < np.inf else None
