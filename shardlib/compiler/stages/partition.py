"""The automatic cut: assigns the nodes of a program to stages so that the slowest stage takes the least time.

All assignments of a small graph compete, not only cuts of one order (Tarnawski et al. 2020, arXiv:2006.16423).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from shardlib.compiler.stages.cut_graph import COPIES, Assignment, CutGraph, Group, Value
from shardlib.compiler.stages.cut_search import search_cut
from shardlib.compiler.stages.explain_cut import Crossing, Partition, StageCost, format_ms
from shardlib.core.errors import ShardingError
from shardlib.core.text_tables import format_si


@dataclass(frozen=True)
class CutNode:
    """An op of the forward pass of one microbatch, with its share of the backward pass.

    `seconds` are those of both passes. `inputs` are the numbers of the nodes whose values it reads. `nbytes` is the
    size of its own value, which travels to each later stage that reads it; a gradient of the same size comes back
    unless `has_gradient` is False. `memory` are bytes of parameters, gradients and optimizer state; `saved` are bytes
    that a microbatch keeps for the backward pass.
    """

    name: str
    seconds: float
    inputs: tuple[int, ...] = ()
    nbytes: int = 0
    memory: int = 0
    saved: int = 0
    has_gradient: bool = True


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several nodes read; `memory` are the bytes of itself, its gradient and optimizer state."""

    name: str
    readers: tuple[int, ...]
    nbytes: int
    memory: int


Nodes = Sequence[CutNode]
Tied = Sequence[TiedParameter]
Fixed = Mapping[int, int]
Ranges = Sequence[tuple[int, int]]


def partition(
    nodes: Nodes,
    stages: int,
    *,
    link_seconds_per_byte: float,
    latency: float = 0.0,
    memory: int | None = None,
    fixed: Fixed = MappingProxyType({}),
    tied: Tied = (),
    microbatches: int = 1,
    live: Sequence[int] | None = None,
    strict: bool = True,
) -> Partition:
    """Assigns nodes to stages so that values flow forwards only and the slowest stage takes the least time.

    The seconds of a stage are those of its nodes and messages, for one microbatch. A value is sent once to each later
    stage that reads it; sender and receiver each spend `latency` (seconds) and `link_seconds_per_byte` on it, and again
    on its gradient. Of equally fast assignments, the one that sends fewest bytes is preferred, then early boundaries. A
    tied parameter is owned by one stage, which sends its value and receives a gradient once a step, or each stage that
    reads it has a copy, and gradients are summed along these stages and back; of equally good ways, an owner.

    Args:
        nodes: in topological order.
        memory: limit of a stage, in bytes. A stage that reads another's parameter holds its value and gradient.
        fixed: stages of some nodes, by number.
        microbatches: number in a step; messages of parameters are divided by it.
        live: number of microbatches whose saved values each stage holds at once (all 1 by default).
        strict: if False and no assignment stays within `memory`, returns one whose largest stage needs least.

    Raises:
        ShardingError: there are more stages than nodes that take time, fixed stages let a value flow backwards, or no
            assignment stays within `memory`.

    Example:
        >>> layers = [CutNode(f"layers.{i}", 1e-3, (i - 1,) if i else (), nbytes=2**20) for i in range(5)]
        >>> print(partition([*layers, CutNode("head", 2e-3, (4,))], 2, link_seconds_per_byte=1e-11))
        2 stages, 4.021 ms per microbatch (stage 1); bound 4.021 ms: no assignment is faster
        stage 0: layers.0 to layers.2 (3 nodes), 3.021 ms (3 ms work, 0.02097 ms messages), 0 B
          cut 0|1: sends layers.2 to stage 1 (1.05 MB); behind layers.3 stage 0 would need 4.021 ms;
                   before layers.2 stage 1 would need 5.021 ms
        stage 1: layers.3 to head (3 nodes), 4.021 ms (4 ms work, 0.02097 ms messages), 0 B
    """
    _refuse_bad_numbers(nodes, stages, fixed, tied, live)

    def message_seconds(nbytes: int) -> float:
        return latency + nbytes * link_seconds_per_byte

    ranges = _stage_ranges(nodes, stages, fixed)
    numbers, groups, values = _build_groups(nodes, ranges, tied, message_seconds, microbatches)
    limit = math.inf if memory is None else memory
    cut, bound, exact = search_cut(CutGraph(groups, len(groups) - len(tied), values, live or [1] * stages, limit))
    _refuse_no_cut(nodes, stages, fixed, memory if strict else None, cut, exact)
    assert cut is not None
    return _describe(nodes, tied, fixed, numbers, cut, bound, exact)


def _build_groups(
    nodes: Nodes, ranges: Ranges, tied: Tied, message_seconds: Callable[[int], float], microbatches: int
) -> tuple[list[int], list[Group], list[Value]]:
    """Returns the number of each node's group, and groups and values for the search.

    A node without cost (a view) joins the group of its only input if nothing else reads that, at most one node reads
    the view, and its message is not larger: some best cut has it there.
    """
    uses = Counter(x for node in nodes for x in {*node.inputs})
    is_tied = {x for parameter in tied for x in parameter.readers}
    numbers: list[int] = []
    groups: list[Group] = []
    for i, node in enumerate(nodes):
        x = node.inputs[0] if node.inputs else i
        is_view = not (node.seconds or node.memory or node.saved) and i not in is_tied and len({*node.inputs}) == 1
        is_smaller = node.nbytes <= nodes[x].nbytes and node.has_gradient <= nodes[x].has_gradient
        joins = is_view and is_smaller and uses[x] == 1 and uses[i] <= 1 and ranges[i] == ranges[x]
        numbers.append(numbers[x] if joins else len(groups))
        groups += [] if joins else [Group(node.seconds, node.memory, node.saved, *ranges[i])]
    readers: list[set[int]] = [set() for _ in nodes]
    for node, number in zip(nodes, numbers, strict=True):
        for x in node.inputs:
            readers[x] |= {number} - {numbers[x]}
    values = []
    for node, number, others in zip(nodes, numbers, readers, strict=True):
        times = 1 + node.has_gradient
        seconds, traffic = times * message_seconds(node.nbytes), microbatches * times * node.nbytes
        values += [Value(number, sorted(others), seconds, traffic, 0, 0)] if others else []
    for parameter in tied:
        seconds, size = 2 / microbatches * message_seconds(parameter.nbytes), 2 * parameter.nbytes
        reading = sorted({numbers[x] for x in parameter.readers})
        values.append(Value(len(groups), reading, seconds, size, size, parameter.memory))
        groups.append(Group(0.0, 0, 0, COPIES, min(groups[x].latest for x in reading)))
    return numbers, groups, values


def _describe(
    nodes: Nodes, tied: Tied, fixed: Fixed, numbers: Sequence[int], cut: Assignment, bound: float, exact: bool
) -> Partition:
    """Returns the cut with its costs, crossings and alternatives."""
    graph, assigned = cut.graph, cut.stages
    other, stages = Assignment(graph, assigned), [assigned[x] for x in numbers]
    work = np.bincount(stages, [node.seconds for node in nodes], graph.stages).tolist()
    costs = [StageCost(s, w, s - w, m) for w, s, m in zip(work, other.seconds, other.memory, strict=True)]
    pairs = sorted({(x, stages[i]) for i, node in enumerate(nodes) for x in node.inputs if stages[x] != stages[i]})

    def alternative(source: int, target: int) -> list[str]:
        """Prices the cut with the outermost working node of stage `source` in its neighbor."""
        members = [i for i, node in enumerate(nodes) if node.seconds and stages[i] == source]
        node, side = (members[0], "behind") if target < source else (members[-1], "before")
        moved = other.move(numbers[node], target)
        slowest, memory = other.seconds.index(max(other.seconds)), max(other.memory)
        need = format_ms(other.seconds[slowest])
        if memory > graph.limit:
            need = f"{format_si(memory, 'B')} of {format_si(graph.limit, 'B')}"
        for group, stage in reversed(moved):
            other.put(group, stage)
        if len(members) == 1 or {numbers[i] for i in fixed} & {group for group, _ in moved}:
            return []
        return [f"{side} {nodes[node].name} stage {slowest} would need {need}"]

    return Partition(
        names=tuple(node.name for node in nodes),
        stages=tuple(stages),
        costs=tuple(costs),
        crossings=tuple(Crossing(nodes[x].name, stages[x], stage, nodes[x].nbytes) for x, stage in pairs),
        traffic=other.traffic,
        bound=bound,
        exact=exact,
        tied=tuple(_describe_tied(p, stages, x) for p, x in zip(tied, assigned[graph.owners :], strict=True)),
        alternatives=tuple((*alternative(s + 1, s), *alternative(s, s + 1)) for s in range(graph.stages - 1)),
    )


def _describe_tied(parameter: TiedParameter, stages: Sequence[int], owner: int) -> str:
    present = sorted({stages[i] for i in parameter.readers})
    names = ", ".join(str(x) for x in present if x != owner)
    if owner == COPIES:
        return f"{parameter.name} has a copy in stages {names}; their gradients are summed once a step"
    if not names:
        return f"{parameter.name} is read by stage {owner} alone"
    size = format_si(parameter.nbytes, "B")
    return f"{parameter.name} is owned by stage {owner} and sent to {names} once a step ({size} and its gradient)"


def _stage_ranges(nodes: Nodes, stages: int, fixed: Fixed) -> Ranges:
    """Returns for each node the first and the last stage that fixed producers and readers allow."""
    origins: list[int | None] = []  # of a node and all that it depends on, the fixed one with the last stage
    faults = []
    for i, node in enumerate(nodes):
        sources = [x for producer in node.inputs if (x := origins[producer]) is not None]
        last = max(sources, key=lambda x: fixed[x], default=None)
        if i in fixed and last is not None and fixed[last] > fixed[i]:
            source = f"{nodes[last].name} of stage {fixed[last]}"
            faults.append(f"{node.name} is fixed to stage {fixed[i]}, and depends on {source}")
        origins.append(i if i in fixed and (last is None or fixed[last] <= fixed[i]) else last)
    if faults:
        raise ShardingError(
            "a value would flow backwards",
            faults,
            rule="the stage of a node is not before the stages of its inputs",
            remedy="assign the reader to the same or a later stage",
        )
    latest = [fixed.get(i, stages - 1) for i in range(len(nodes))]
    for i in reversed(range(len(nodes))):
        for x in nodes[i].inputs:
            latest[x] = min(latest[x], latest[i])
    return [(0 if x is None else fixed[x], last) for x, last in zip(origins, latest, strict=True)]


def _refuse_bad_numbers(nodes: Nodes, stages: int, fixed: Fixed, tied: Tied, live: Sequence[int] | None) -> None:
    faults = [f"stages is {stages}, not at least 1"] if stages < 1 else []
    for i, node in enumerate(nodes):
        wrong = [x for x in node.inputs if not 0 <= x < i]
        faults += [f"{node.name} (node {i}) reads node {x}, which is not before it" for x in wrong]
        if min(node.seconds, node.nbytes, node.memory, node.saved) < 0:
            faults.append(f"{node.name} (node {i}) has a negative cost")
    for i, stage in fixed.items():
        if not 0 <= i < len(nodes):
            faults.append(f"node {i}, fixed to stage {stage}, does not exist")
        elif not 0 <= stage < stages:
            faults.append(f"{nodes[i].name} is fixed to stage {stage} of {stages}")
    for parameter in tied:
        faults += [f"{parameter.name} is read by node {x}" for x in parameter.readers if not 0 <= x < len(nodes)]
        faults += [f"{parameter.name} has no readers"] if not parameter.readers else []
    if live is not None and len(live) != stages:
        faults.append(f"live has {len(live)} numbers, where there are {stages} stages")
    if faults:
        raise ShardingError(
            "the graph cannot be cut", faults, rule=f"nodes are 0 to {len(nodes) - 1} in topological order"
        )
    working = sum(node.seconds > 0 for node in nodes)
    if working < stages:
        raise ShardingError(
            f"{stages} stages need {stages - 1} cuts, but there are {max(0, working - 1)} places to cut",
            [f"{working} of {len(nodes)} nodes take time"],
            rule="every stage has a node that takes time",
            remedy="use fewer stages",
        )


def _refuse_no_cut(
    nodes: Nodes, stages: int, fixed: Fixed, limit: int | None, cut: Assignment | None, exact: bool
) -> None:
    if cut is None:
        raise ShardingError(
            f"no assignment gives each of {stages} stages a node that takes time",
            [f"{nodes[i].name} is fixed to stage {stage}" for i, stage in sorted(fixed.items())],
            remedy="fix fewer nodes, or use fewer stages",
        )
    if limit is not None and max(cut.memory) > limit:
        least = format_si(max(cut.memory), "B")
        raise ShardingError(
            f"no assignment to {stages} stages fits into {format_si(limit, 'B')} per stage",
            [f"the smallest need of the largest stage is {least}" + ("" if exact else ", as far as was searched")],
            remedy=f"allow {least}, or use more stages, or a schedule that holds fewer microbatches",
        )
