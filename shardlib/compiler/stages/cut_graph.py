"""The graph that the search for a cut works on: nodes, values that travel, costs as tables, and its contractions.

A *group* is a set of nodes that stay on one stage. Contraction merges groups so that the graph stays acyclic: a group
joins its only producer, or its only reader.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Value(NamedTuple):
    """A result of the group `producer` that other groups read."""

    producer: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """A quantity of a stage: seconds, bytes that travel, or bytes of memory.

    It is the sum of its groups' `work` (stages x groups), of `receive` for each value that it receives, and of `send`
    for each value that it sends, times the stages that read it. For each parameter with copies, a stage that reads it
    adds `copy`, and `before` and `behind` if an earlier and a later stage has a copy, too.
    """

    work: Array
    receive: Array
    send: Array
    copy: Array
    before: Array
    behind: Array

    @cached_property
    def least_work(self) -> Array:
        """The work of each group on the stage where it is least."""
        return np.asarray(self.work.min(axis=0))


@dataclass(frozen=True)
class CutGraph:
    """Groups in topological order; each lies on a stage from `earliest` to `latest`.

    `objective` is the cost of the slowest stage, `memory` a cost that no stage may have above `limit`, and `traffic`
    decides between equal ones. `counts` is True for groups that make a stage nonempty.
    """

    stages: int
    values: tuple[Value, ...]
    copies: tuple[tuple[int, ...], ...]  # readers of each copied parameter
    counts: Array
    earliest: Array
    latest: Array
    objective: Cost
    traffic: Cost
    memory: Cost
    limit: float

    @property
    def size(self) -> int:
        return len(self.counts)

    @cached_property
    def inputs(self) -> list[set[int]]:
        """The groups whose values each group reads."""
        inputs: list[set[int]] = [set() for _ in range(self.size)]
        for producer, readers in self.values:
            for reader in readers:
                inputs[reader].add(producer)
        return inputs

    @cached_property
    def outputs(self) -> list[set[int]]:
        """The groups that read values of each group."""
        outputs: list[set[int]] = [set() for _ in range(self.size)]
        for producer, readers in self.values:
            outputs[producer].update(readers)
        return outputs

    @cached_property
    def message(self) -> Array:
        """The objective's cost of each value for its sender and its receiver together."""
        return np.asarray(self.objective.receive + self.objective.send)

    @cached_property
    def producers(self) -> Array:
        return np.array([value.producer for value in self.values], dtype=np.int64)

    @cached_property
    def readers(self) -> tuple[Array, Array]:
        """The readers of all values behind each other, and where each value's begin."""
        lengths = [len(value.readers) for value in self.values]
        flat = np.array([reader for value in self.values for reader in value.readers], dtype=np.int64)
        return flat, np.cumsum([0, *lengths[:-1]])[: len(lengths)]

    @cached_property
    def work_behind(self) -> Array:
        """For each group the objective's work of itself and of all groups that depend on it."""
        return closure_work(self, self.outputs, reverse=True)

    @cached_property
    def work_before(self) -> Array:
        """For each group the objective's work of itself and of all groups that it depends on."""
        return closure_work(self, self.inputs, reverse=False)

    def all_readers(self, table: Array) -> Array:
        """Returns for each row and value whether all readers are in the rows' sets (rows x groups)."""
        if not self.values:
            return np.zeros((len(table), 0), dtype=bool)
        flat, starts = self.readers
        return np.asarray(np.logical_and.reduceat(table[:, flat], starts, axis=1))


def closure_work(graph: CutGraph, neighbors: list[set[int]], reverse: bool) -> Array:
    """Returns for each group the work of itself and of all groups that it reaches over `neighbors`."""
    reached = np.zeros((graph.size, -(-graph.size // 8)), dtype=np.uint8)
    order = range(graph.size)
    for group in reversed(order) if reverse else order:
        row = reached[group]
        row[group // 8] = 1 << group % 8
        for x in neighbors[group]:
            row |= reached[x]
    work = np.zeros(8 * reached.shape[1])
    work[: graph.size] = graph.objective.least_work
    sums = np.zeros(graph.size)
    for byte, table in enumerate(byte_tables(work)):
        rows = slice(0, 8 * byte + 8) if reverse else slice(8 * byte, None)  # others cannot reach these groups
        sums[rows] += table[reached[rows, byte]]
    result = sums.tolist()
    for group in reversed(order) if reverse else order:  # rounding must not make a closure smaller than its parts
        result[group] = max([result[group], *(result[x] for x in neighbors[group])])
    return np.array(result)


def byte_tables(work: Array) -> Array:
    """Returns for each eight groups the sum of their work for each of 256 sets, bit i for group i of the eight."""
    sets = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.asarray(work.reshape(-1, 8) @ sets.T)


def topological_order(inputs: Sequence[Iterable[int]], key: Sequence[Any]) -> list[int]:
    """Sorts nodes so that inputs come first; of several that are ready, the smallest `key` is next."""
    waiting = [len(set(sources)) for sources in inputs]
    readers: list[list[int]] = [[] for _ in inputs]
    for node, sources in enumerate(inputs):
        for source in set(sources):
            readers[source].append(node)
    ready = [(key[node], node) for node, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for reader in readers[node]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, (key[reader], reader))
    return order


def merge_groups(graph: CutGraph, target: Sequence[int]) -> tuple[CutGraph, Array]:
    """Returns the graph in which each group is part of group `target`, and the new number of each old group."""
    roots = sorted(set(target))
    number = {root: i for i, root in enumerate(roots)}
    merged = np.array([number[t] for t in target], dtype=np.int64)
    inputs: list[set[int]] = [set() for _ in roots]
    for group, sources in enumerate(graph.inputs):
        inputs[merged[group]].update(int(merged[source]) for source in sources)
    for i, sources in enumerate(inputs):
        sources.discard(i)
    earliest, latest = np.zeros(len(roots), np.int64), np.full(len(roots), graph.stages - 1)
    np.maximum.at(earliest, merged, graph.earliest)
    np.minimum.at(latest, merged, graph.latest)
    order = topological_order(inputs, [(int(e), i) for i, e in enumerate(earliest)])
    place = np.empty(len(roots), np.int64)
    place[order] = np.arange(len(roots))
    numbers = place[merged]
    values, kept = [], []
    for i, (producer, readers) in enumerate(graph.values):
        source = int(numbers[producer])
        others = sorted({int(numbers[reader]) for reader in readers} - {source})
        if others:
            values.append(Value(source, tuple(others)))
            kept.append(i)

    def merge_cost(cost: Cost) -> Cost:
        work = np.zeros((graph.stages, len(roots)), cost.work.dtype)
        np.add.at(work.T, numbers, cost.work.T)
        return replace(cost, work=work, receive=cost.receive[kept], send=cost.send[kept])

    counts = np.zeros(len(roots), bool)
    counts[numbers[graph.counts]] = True
    result = replace(
        graph,
        values=tuple(values),
        copies=tuple(tuple(sorted({int(numbers[reader]) for reader in readers})) for readers in graph.copies),
        counts=counts,
        earliest=earliest[order],
        latest=latest[order],
        objective=merge_cost(graph.objective),
        traffic=merge_cost(graph.traffic),
        memory=merge_cost(graph.memory),
    )
    return result, numbers


def contract_free_groups(graph: CutGraph) -> tuple[CutGraph, Array]:
    """Merges groups without cost (views, constants) into neighbors that they never leave in some best cut.

    * One without inputs and with one reader joins it: its message disappears.
    * One that nothing reads, with one producer, joins it.
    * One with one input and one reader joins its producer if nothing else reads the input and the result is not larger:
      the smaller message replaces the larger one.
    """
    target = list(range(graph.size))

    def root(group: int) -> int:
        while target[group] != group:
            target[group] = group = target[target[group]]
        return group

    results: list[list[int]] = [[] for _ in target]
    for i, value in enumerate(graph.values):
        results[value.producer].append(i)
    is_free = ~graph.counts & ~graph.objective.work.any(axis=0) & ~graph.memory.work.any(axis=0)
    for readers in graph.copies:
        is_free[list(readers)] = False
    for group in map(int, np.flatnonzero(is_free)):
        sources, outputs = graph.inputs[group], graph.outputs[group]
        neighbor = -1
        if not sources and len(outputs) == 1:
            (neighbor,) = outputs
        elif len(sources) == 1 and len(outputs) <= 1:
            (source,) = sources
            before, behind = results[source], results[group]
            if not outputs or (
                len(before) == len(behind) == 1
                and graph.outputs[source] == {group}
                and all(c.receive[behind[0]] <= c.receive[before[0]] for c in (graph.objective, graph.traffic))
                and all(c.send[behind[0]] <= c.send[before[0]] for c in (graph.objective, graph.traffic))
                and graph.memory.receive[behind[0]] <= graph.memory.receive[before[0]]
            ):
                neighbor = source
        if neighbor >= 0 and _same_range(graph, group, neighbor):
            target[root(group)] = root(neighbor)
    return merge_groups(graph, [root(group) for group in target])


def contract_small_groups(graph: CutGraph, size: int) -> tuple[CutGraph, Array]:
    """Merges pairs of groups until `size` are left, or as far as that goes: the smallest first, for a quick cut."""
    numbers = np.arange(graph.size)
    while graph.size > size:
        target = _pairs(graph, size)
        if target == list(range(graph.size)):
            break
        graph, merged = merge_groups(graph, target)
        numbers = merged[numbers]
    return graph, numbers


def _pairs(graph: CutGraph, size: int) -> list[int]:
    """Returns for each group itself, or the neighbor that it joins; no group is part of two pairs."""
    work = graph.objective.least_work
    most = 2 * float(work.sum()) / size
    target = list(range(graph.size))
    left = graph.size - size
    paired: set[int] = set()
    for group in map(int, np.argsort(work, kind="stable")):
        if left == 0 or group in paired:
            continue
        near = [*graph.inputs[group]] if len(graph.inputs[group]) == 1 else []
        near += [*graph.outputs[group]] if len(graph.outputs[group]) == 1 else []
        near += [x for x in graph.outputs[group] if len(graph.inputs[x]) == 1]
        near += [x for x in graph.inputs[group] if len(graph.outputs[x]) == 1]
        near = [x for x in near if x not in paired and work[group] + work[x] <= most and _overlap(graph, group, x)]
        if near:
            other = min(near, key=lambda x: (float(work[x]), x))
            target[group] = other
            paired |= {group, other}
            left -= 1
    return target


def _same_range(graph: CutGraph, a: int, b: int) -> bool:
    return bool(graph.earliest[a] == graph.earliest[b] and graph.latest[a] == graph.latest[b])


def _overlap(graph: CutGraph, a: int, b: int) -> bool:
    """Returns whether two groups may lie on one stage."""
    return bool(max(graph.earliest[a], graph.earliest[b]) <= min(graph.latest[a], graph.latest[b]))
