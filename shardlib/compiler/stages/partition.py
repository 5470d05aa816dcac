"""The automatic cut: assigns the nodes of a program to stages so that the slowest stage takes the least time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

import numpy as np

from shardlib.compiler.stages.cut_graph import Cost, CutGraph, Value
from shardlib.compiler.stages.cut_search import Cut, is_better, search_cut, stage_costs
from shardlib.compiler.stages.explain_cut import Alternative, Crossing, Partition, StageCost, move_boundary
from shardlib.core.errors import ShardingError
from shardlib.core.text_tables import format_si

MAX_CHOICES = 16  # of owner or copies, for all tied parameters together


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


def partition(
    nodes: Sequence[CutNode],
    stages: int,
    *,
    link_seconds_per_byte: float,
    latency: float = 0.0,
    memory: int | None = None,
    fixed: Mapping[int, int] = MappingProxyType({}),
    tied: Sequence[TiedParameter] = (),
    microbatches: int = 1,
    live: Sequence[int] | None = None,
) -> Partition:
    """Assigns nodes to stages so that values flow forwards only and the slowest stage takes the least time.

    The seconds of a stage are those of its nodes and of its messages, for one microbatch. A value is sent once to each
    later stage that reads it, directly; sender and receiver each spend `latency` (seconds) and `link_seconds_per_byte`
    on it, and again on its gradient. Of equally fast assignments, the one that sends fewest bytes is the result, then
    the one with the earliest boundaries; there, nodes without cost stay with their input. Every stage has a node that
    takes time.

    A tied parameter is owned by one stage, which sends its value and receives a gradient once a step, or each stage
    that reads it has a copy, and gradients are summed along these stages and back. The faster of both is chosen; if
    they are equal, an owner, which needs less memory. A stage without the parameter holds its value and gradient.

    Args:
        nodes: in topological order.
        memory: limit of a stage, in bytes.
        fixed: stages of some nodes, by number.
        microbatches: number in a step; messages of parameters are divided by it.
        live: number of microbatches whose saved values each stage holds at once (all 1 by default).

    Raises:
        ShardingError: there are more stages than nodes that take time, fixed stages let a value flow backwards, or no
            assignment stays within `memory`.

    All monotone assignments of the graph compete, not only cuts of one order (Tarnawski et al. 2020, arXiv:2006.16423).

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
    _refuse_backward_flow(nodes, fixed)
    working = sum(node.seconds > 0 for node in nodes)
    if working < stages:
        raise ShardingError(
            f"{stages} stages need {stages - 1} cuts, but there are {max(0, working - 1)} places to cut",
            [f"{working} of {len(nodes)} nodes take time"],
            rule="every stage has a node that takes time",
            remedy="use fewer stages",
        )
    problem = Problem(
        nodes, stages, link_seconds_per_byte, latency, memory, fixed, tied, microbatches, live or [1] * stages
    )
    return problem.describe(*_choose(problem))


def _choose(problem: Problem) -> tuple[Cut, tuple[bool, ...]]:
    """Returns the best cut over all choices of an owner or copies (True) for tied parameters, and the choice."""
    choices = list(product((False, True), repeat=len(problem.tied)))
    is_complete = len(choices) <= MAX_CHOICES
    if not is_complete:
        choices = [choices[0], choices[-1]]
    results: list[tuple[Cut, tuple[bool, ...]]] = []
    for copied in choices:
        cut = search_cut(problem.graph(copied))
        is_complete = is_complete and cut.exact
        if cut.assignment is not None and (not results or is_better(cut, results[-1][0])):
            results.append((cut, copied))
    if results:
        return results[-1][0]._replace(exact=is_complete), results[-1][1]
    needs = []
    for copied in choices:
        graph = problem.graph(copied)
        needs.append((search_cut(replace(graph, objective=graph.memory, limit=np.inf)), copied))
    cut, copied = min(needs, key=lambda need: need[0].objective)
    if cut.assignment is None or cut.objective > graph.limit:
        raise _refuse_no_cut(problem, cut)
    return cut._replace(exact=False), copied  # the search for a fast cut left out all that fit into memory


@dataclass(frozen=True)
class Problem:
    """The arguments of `partition`, as graphs for the search."""

    nodes: Sequence[CutNode]
    stages: int
    link_seconds_per_byte: float
    latency: float
    memory: int | None
    fixed: Mapping[int, int]
    tied: Sequence[TiedParameter]
    microbatches: int
    live: Sequence[int]

    def message_seconds(self, nbytes: int) -> float:
        return self.latency + nbytes * self.link_seconds_per_byte

    def graph(self, copied: Sequence[bool]) -> CutGraph:
        """Returns the graph of the search; an owned parameter is a node in front of all others, without work."""
        owners = [x for x, copy in zip(self.tied, copied, strict=True) if not copy]
        copies = [x for x, copy in zip(self.tied, copied, strict=True) if copy]
        shift = len(owners)
        readers: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for producer in dict.fromkeys(node.inputs):
                readers[producer].append(i + shift)
        values = [Value(i, tuple(x + shift for x in sorted(set(p.readers)))) for i, p in enumerate(owners)]
        values += [Value(i + shift, tuple(others)) for i, others in enumerate(readers) if others]
        senders = [self.nodes[i] for i, others in enumerate(readers) if others]
        seconds = np.array([0.0] * shift + [node.seconds for node in self.nodes])
        saved = np.array([0.0] * shift + [node.saved for node in self.nodes])
        kept = np.array([p.memory for p in owners] + [node.memory for node in self.nodes], dtype=np.float64)
        once = 2 / self.microbatches
        sent = [once * self.message_seconds(p.nbytes) for p in owners]
        sent += [(1 + node.has_gradient) * self.message_seconds(node.nbytes) for node in senders]
        moved = [2 * p.nbytes for p in owners]
        moved += [self.microbatches * (1 + node.has_gradient) * node.nbytes for node in senders]
        held = [2 * p.nbytes for p in owners] + [0 for _ in senders]
        summed = [once * self.message_seconds(p.nbytes) for p in copies]
        nothing, no_copies = np.zeros(len(values)), np.zeros(len(copies))
        earliest, latest = stage_ranges(self.nodes, self.stages, self.fixed)
        return CutGraph(
            stages=self.stages,
            values=tuple(values),
            copies=tuple(tuple(x + shift for x in sorted(set(p.readers))) for p in copies),
            counts=seconds > 0,
            earliest=np.array([0] * shift + earliest),
            latest=np.array([min(latest[x] for x in p.readers) for p in owners] + latest),
            objective=Cost(
                np.tile(seconds, (self.stages, 1)),
                np.array(sent),
                np.array(sent),
                no_copies,
                np.array(summed),
                np.array(summed),
            ),
            traffic=Cost(
                np.zeros((self.stages, len(seconds))),
                np.array(moved, dtype=np.float64),
                nothing,
                no_copies,
                np.array([2.0 * p.nbytes for p in copies]),
                no_copies,
            ),
            memory=Cost(
                kept + np.array(self.live)[:, None] * saved,
                np.array(held, dtype=np.float64),
                nothing,
                np.array([float(p.memory) for p in copies]),
                no_copies,
                no_copies,
            ),
            limit=np.inf if self.memory is None else self.memory,
        )

    def describe(self, cut: Cut, copied: Sequence[bool]) -> Partition:
        """Returns the cut with its costs, crossings and alternatives."""
        assert cut.assignment is not None
        graph, shift = self.graph(copied), len(copied) - sum(copied)
        stages = [int(x) for x in cut.assignment[shift:]]
        work = graph.objective.least_work
        bound = cut.objective if cut.exact else max(float(work.sum()) / self.stages, float(work.max()))
        seconds = stage_costs(graph, graph.objective, cut.assignment)
        memory = stage_costs(graph, graph.memory, cut.assignment)
        working = np.bincount(cut.assignment, work, self.stages)
        costs = [StageCost(float(w), float(s - w), int(m)) for w, s, m in zip(working, seconds, memory, strict=True)]
        return Partition(
            names=tuple(node.name for node in self.nodes),
            stages=tuple(stages),
            costs=tuple(costs),
            crossings=tuple(self._crossings(stages)),
            traffic=int(cut.traffic),
            bound=bound,
            exact=cut.exact,
            tied=tuple(self._describe_tied(p, copy, stages) for p, copy in zip(self.tied, copied, strict=True)),
            later=tuple(self._alternative(graph, stages, i, later=True) for i in range(self.stages - 1)),
            earlier=tuple(self._alternative(graph, stages, i, later=False) for i in range(self.stages - 1)),
            memory_limit=self.memory,
        )

    def _crossings(self, stages: Sequence[int]) -> list[Crossing]:
        pairs = {
            (producer, stages[i]): None
            for i, node in enumerate(self.nodes)
            for producer in node.inputs
            if stages[producer] != stages[i]
        }
        return [Crossing(self.nodes[i].name, stages[i], target, self.nodes[i].nbytes) for i, target in sorted(pairs)]

    def _describe_tied(self, parameter: TiedParameter, is_copied: bool, stages: Sequence[int]) -> str:
        first, *others = sorted({stages[i] for i in parameter.readers})
        names = ", ".join(map(str, others))
        if not others:
            return f"{parameter.name} is read by stage {first} alone"
        if is_copied:
            return f"{parameter.name} has a copy in stages {first}, {names}; their gradients are summed once a step"
        size = format_si(parameter.nbytes, "B")
        return f"{parameter.name} is owned by stage {first} and sent to {names} once a step ({size} and its gradient)"

    def _alternative(self, graph: CutGraph, stages: list[int], stage: int, *, later: bool) -> Alternative | None:
        """Prices the cut with one boundary elsewhere; None if a stage would be empty or a fixed node would move."""
        has_work = [node.seconds > 0 for node in self.nodes]
        move = move_boundary([node.inputs for node in self.nodes], has_work, stages, stage, later=later)
        if move is None or any(move[1][i] != fixed for i, fixed in self.fixed.items()):
            return None
        node, moved = move
        owners = len(stages) - graph.size
        firsts = [min(moved[x + owners] for x in graph.values[i].readers) for i in range(-owners)]
        assignment = np.array(firsts + moved)
        seconds = stage_costs(graph, graph.objective, assignment)
        memory = int(stage_costs(graph, graph.memory, assignment).max())
        slowest = int(seconds.argmax())
        return Alternative(self.nodes[node].name, slowest, float(seconds[slowest]), memory)


def stage_ranges(nodes: Sequence[CutNode], stages: int, fixed: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Returns for each node the first and the last stage that fixed producers and readers allow."""
    earliest = [fixed.get(i, 0) for i in range(len(nodes))]
    latest = [fixed.get(i, stages - 1) for i in range(len(nodes))]
    for i, node in enumerate(nodes):
        earliest[i] = max([earliest[i], *(earliest[x] for x in node.inputs)])
    for i in reversed(range(len(nodes))):
        for x in nodes[i].inputs:
            latest[x] = min(latest[x], latest[i])
    return earliest, latest


def _refuse_bad_numbers(
    nodes: Sequence[CutNode],
    stages: int,
    fixed: Mapping[int, int],
    tied: Sequence[TiedParameter],
    live: Sequence[int] | None,
) -> None:
    faults = [f"stages is {stages}, not at least 1"] if stages < 1 else []
    for i, node in enumerate(nodes):
        faults += [
            f"{node.name} (node {i}) reads node {x}, which is not before it" for x in node.inputs if not 0 <= x < i
        ]
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


def _refuse_backward_flow(nodes: Sequence[CutNode], fixed: Mapping[int, int]) -> None:
    """Raises if a node that is fixed to a stage depends on one that is fixed to a later stage."""
    origin: list[int | None] = []  # the fixed node, of all that a node depends on, with the last stage
    faults = []
    for i, node in enumerate(nodes):
        sources = [x for producer in node.inputs if (x := origin[producer]) is not None]
        last = max(sources, key=lambda x: fixed[x], default=None)
        if i in fixed:
            if last is not None and fixed[last] > fixed[i]:
                source = f"{nodes[last].name} of stage {fixed[last]}"
                faults.append(f"{node.name} is fixed to stage {fixed[i]}, and depends on {source}")
            else:
                last = i
        origin.append(last)
    if faults:
        raise ShardingError(
            "a value would flow backwards",
            faults,
            rule="the stage of a node is not before the stages of its inputs",
            remedy="assign the reader to the same or a later stage",
        )


def _refuse_no_cut(problem: Problem, need: Cut) -> ShardingError:
    """Returns the error for a program that no assignment serves; `need` is the cut with the least memory."""
    if need.assignment is None:
        return ShardingError(
            f"no assignment gives each of {problem.stages} stages a node that takes time",
            [f"{problem.nodes[i].name} is fixed to stage {stage}" for i, stage in sorted(problem.fixed.items())],
            remedy="fix fewer nodes, or use fewer stages",
        )
    assert problem.memory is not None
    least = format_si(need.objective, "B")
    return ShardingError(
        f"no assignment to {problem.stages} stages fits into {format_si(problem.memory, 'B')} per stage",
        [f"the smallest need of the largest stage is {least}" + ("" if need.exact else ", as far as was searched")],
        remedy=f"allow {least}, or use more stages, or a schedule that holds fewer microbatches",
    )
