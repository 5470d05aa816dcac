"""The graph that the search for a cut works on, and the price of an assignment to stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

TOLERANCE = 1e-9  # relative; seconds that differ by less are equal
UNASSIGNED = -2
Price = tuple[float, float, float]  # most bytes of a stage above the limit, most seconds of a stage, bytes that travel
COPIES = -1  # the stage of a tied parameter's owner if each stage that reads the parameter has a copy


class Group(NamedTuple):
    """Nodes of one stage, from `earliest` to `latest`; `saved` are bytes of each live microbatch."""

    seconds: float
    memory: int
    saved: int
    earliest: int
    latest: int


class Value(NamedTuple):
    """A result that each stage but that of its producer receives once, if it reads it.

    A message takes `seconds` in both stages, and has `traffic` bytes in a step. The producer's stage, or each with a
    copy, keeps `kept` bytes; another that reads the value holds `held` bytes.
    """

    producer: int
    readers: Sequence[int]
    seconds: float
    traffic: int
    held: int
    kept: int


def is_below(price: Price, other: Price) -> bool:
    """Compares excess, then seconds, then traffic."""
    is_equal = price[0] == other[0] and abs(price[1] - other[1]) <= TOLERANCE * other[1]
    return price[2] < other[2] if is_equal else price[:2] < other[:2]


class CutGraph:
    """Groups in topological order, and behind them, from number `owners` on, the owners of tied parameters."""

    def __init__(
        self, groups: Sequence[Group], owners: int, values: Sequence[Value], live: Sequence[int], limit: float
    ) -> None:
        self.groups, self.owners, self.values, self.live, self.limit = groups, owners, values, live, limit
        self.stages = len(live)
        self.reads: list[list[int]] = [[] for _ in groups]  # numbers of values
        self.writes: list[list[int]] = [[] for _ in groups]
        for number, value in enumerate(values):
            self.writes[value.producer].append(number)
            for reader in value.readers:
                self.reads[reader].append(number)
        self.inputs = [[values[i].producer for i in numbers] for numbers in self.reads]
        self.outputs = [[x for i in numbers for x in values[i].readers] for numbers in self.writes]


class Assignment:
    """The stage of each group, or `UNASSIGNED`, and the costs of each stage."""

    def __init__(self, graph: CutGraph, stages: Iterable[int] = ()) -> None:
        self.graph, self.traffic = graph, 0
        self.stages = [UNASSIGNED for _ in graph.groups]
        self.seconds, self.memory, self.working = [0.0] * graph.stages, [0] * graph.stages, [0] * graph.stages
        self._readers: list[Counter[int]] = [Counter() for _ in graph.values]  # by stage
        for group, stage in enumerate(stages):
            self.put(group, stage)

    def put(self, group: int, stage: int) -> None:
        """Assigns a group to a stage, or takes it away."""
        graph, own = self.graph, self.graph.groups[group]
        self._charge(graph.reads[group] + graph.writes[group], -1)
        for target, sign in ((self.stages[group], -1), (stage, 1)):
            if target != UNASSIGNED:
                self.seconds[target] += sign * own.seconds
                self.memory[target] += sign * (own.memory + graph.live[target] * own.saved)
                self.working[target] += sign * (own.seconds > 0)
                for number in graph.reads[group]:
                    self._readers[number][target] += sign
        self.stages[group] = stage
        self._charge(graph.reads[group] + graph.writes[group], 1)

    def _charge(self, numbers: Sequence[int], sign: int) -> None:
        """Adds the messages and the memory of some values, or takes them away."""
        for number in numbers:
            value, owner = self.graph.values[number], self.stages[self.graph.values[number].producer]
            if owner == UNASSIGNED:
                continue
            present = sorted(stage for stage, count in self._readers[number].items() if count)
            messages = pairwise(present) if owner == COPIES else [(owner, x) for x in present if x != owner]
            for stage in present if owner == COPIES else [owner]:
                self.memory[stage] += sign * value.kept
            for source, target in messages:
                self.seconds[source] += sign * value.seconds
                self.seconds[target] += sign * value.seconds
                self.memory[target] += sign * value.held * (owner != COPIES)
                self.traffic += sign * value.traffic

    def price(self, work: float = 0.0) -> Price:
        """Returns the price, or the least that it becomes with some seconds of groups that have no stage yet."""
        seconds = max(max(self.seconds), (sum(self.seconds) + work) / self.graph.stages if work else 0.0)
        return max(0, max(self.memory) - self.graph.limit), seconds, self.traffic

    def move(self, group: int, stage: int) -> list[tuple[int, int]]:
        """Moves a group, and those that must come along so that values flow forwards; returns their old stages."""
        moved: list[tuple[int, int]] = []
        is_later, waiting = stage > self.stages[group], [group]
        while waiting:
            x = waiting.pop()
            old = self.stages[x]
            if x == group or (old < stage if is_later else old > stage):
                moved.append((x, old))
                self.put(x, stage)
                waiting += (self.graph.outputs if is_later else self.graph.inputs)[x]
        return moved
