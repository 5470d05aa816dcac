"""Assigns every step of a lowered program to a stage.

A step for which the user's code names a stage runs there, and so do its gradients. Others follow their operands:

* in the forward pass, to the last of their stages;
* in the backward pass, to a stage that has the saved values and reads the parameters: the one of the incoming gradient,
  or the next one in front of it;
* behind the backward pass (clipping, optimizers), to the stage of most bytes.

A parameter decides about a step only if nothing else does. A step that reads only parameters, or values which all
stages have, is computed on each stage that needs it. The first steps of a model, which read parameters and the batch,
run on the first stage that reads them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardlib.compiler.program.dependents import find_dependents
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, makes, reads
from shardlib.compiler.stages.fragments import PipelineShape
from shardlib.core.errors import ShardingError
from shardlib.core.fragment_tag import NO_TAG, FragmentTag
from shardlib.core.source_lines import Line, format_path_line


@dataclass(frozen=True, eq=False)
class Task:
    """A call, or a message with its wait: what runs on one stage as a whole."""

    steps: tuple[Step, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    line: Line | None
    backward: bool
    is_pure: bool

    @property
    def tag(self) -> FragmentTag:
        return NO_TAG if self.line is None else self.line.tag

    def __str__(self) -> str:
        names = ", ".join(v.name for v in self.makes) or "a call"
        return f"{names} ({format_path_line(self.line)})"


def list_tasks(program: Program) -> list[Task]:
    """Returns the steps of a lowered program, each message together with its wait."""
    result = []
    for step in program.steps:
        if isinstance(step, Start):
            wait = Wait(step.outs)
            result.append(Task((step, wait), reads(step), makes(wait), step.first.line, step.first.backward, True))
        elif isinstance(step, Compute):
            result.append(Task((step,), step.operands, step.out_vars, step.line, step.backward, step.is_pure))
        else:
            assert isinstance(step, Wait), "a lowered program only calls and communicates"
    return result


def list_parameter_tasks(
    tasks: Iterable[Task], parameters: Collection[Var], outputs: Collection[Any] = ()
) -> Set[Task]:
    """Returns tasks that read parameters alone (gathers, casts), but for those that make one of `outputs`."""
    values = set(parameters)
    result = set()
    for task in tasks:
        if task.reads and task.is_pure and values.issuperset(task.reads) and not any(v in outputs for v in task.makes):
            values.update(task.makes)
            result.add(task)
    return result


def find_gradients(tasks: Sequence[Task], cotangents: Collection[Var] = ()) -> set[Var]:
    """Returns `cotangents`, the values that backward tasks make, and those that depend on them."""
    backward = (v for task in tasks if task.backward for v in task.makes)
    return find_dependents(((task.reads, task.makes) for task in tasks), [*cotangents, *backward])


class Assignment(NamedTuple):
    """The position in the chain of every task (None: each stage that needs it has its own), and of values.

    `named` has the positions that the code names. `gradients` are the values of the backward pass, and those that
    depend on them. `reader_positions` are those whose forward pass reads a parameter.
    """

    named: Mapping[Task, int]
    positions: Mapping[Task, int | None]
    value_positions: Mapping[Var, int]
    gradients: Set[Var]
    reader_positions: Mapping[Var, Set[int]]


class Boundary(NamedTuple):
    """The inputs and outputs of a program, as its stages see them.

    `owner_stages` are the stages of inputs that live on one; their number is also the position of a stage's first
    chunk. `parameters` are the inputs that are no arguments of the call. `cotangents` map inputs to the results whose
    gradients they are; they come to the same stage.
    """

    inputs: Collection[Var]
    outputs: Collection[Any]
    owner_stages: Mapping[Var, int]
    parameters: Collection[Var]
    cotangents: Mapping[Var, Var]


def assign(tasks: Sequence[Task], named: Mapping[Task, int], boundary: Boundary, shape: PipelineShape) -> Assignment:
    """Assigns tasks to positions in the chain: `named` ones as given.

    If none is named, each task follows the parameters to the stages where they live.

    Raises `ShardingError` for values that flow backwards: all of them are named.
    """
    return _Assigner(named, boundary, shape).run(tasks)


class _Assigner:
    def __init__(self, named: Mapping[Task, int], boundary: Boundary, shape: PipelineShape) -> None:
        self.named, self.boundary, self.shape = named, boundary, shape
        self.positions: dict[Task, int | None] = {}
        parameters = set(boundary.parameters)
        self.sources = {v: frozenset({v}) for v in parameters}  # parameters of values that depend on nothing else
        self.value_positions = {v: stage for v, stage in boundary.owner_stages.items() if v not in parameters}
        self.available = defaultdict[Var, set[int]](set)  # positions that have a value, or read a parameter, in forward
        self.available.update({v: {position} for v, position in self.value_positions.items()})
        self.data = {*boundary.inputs} - parameters - {*boundary.cotangents}  # the batch, and what only it decides
        self.outputs = {v for v in boundary.outputs if isinstance(v, Var)}
        self.producers: dict[Var, Task] = {}
        self.readers = defaultdict[Var, list[Task]](list)
        self.gradients: set[Var] = set()
        self.bound: set[Task] = set()  # tasks of the backward pass whose saved values or parameters decide

    def run(self, tasks: Sequence[Task]) -> Assignment:
        for task in tasks:
            self.producers.update(dict.fromkeys(task.makes, task))
            for v in dict.fromkeys(task.reads):
                self.readers[v].append(task)
        self.gradients = find_gradients(tasks, self.boundary.cotangents)
        late = [task for task in tasks if task.backward or not self.gradients.isdisjoint(task.reads)]
        forward = [task for task in tasks if not task.backward and self.gradients.isdisjoint(task.reads)]
        first = [t for t in forward if self._assign(t, self._forward_position(t)) is None and self._reads_both(t)]
        for task in reversed(first):
            self._assign(task, min(self._positions_of_readers(task), default=0))
        self._check_flow(forward)
        for v, result in self.boundary.cotangents.items():
            if result in self.value_positions:
                self.value_positions[v] = self.value_positions[result]
        for task in late:
            self._assign(task, self._late_position(task))
        pulled = self._pull(late)
        for task in late if pulled else ():
            self._assign(task, pulled.get(task, self._late_position(task)))
        value_positions = {**self.boundary.owner_stages, **self.value_positions}
        readers = {v: self.available[v] for v in self.boundary.parameters}
        return Assignment(self.named, self.positions, value_positions, self.gradients, readers)

    def _assign(self, task: Task, position: int | None) -> int | None:
        between_halves = [v for v in task.reads if v.layout is None and v in self.value_positions]  # of a reshard
        if between_halves:
            position = self.value_positions[between_halves[0]]
        self.positions[task] = position
        sources = None if position is not None or self._reads_both(task) else self._parameters(task)
        for v in task.makes:
            if position is not None:
                self.value_positions[v], self.available[v] = position, {position}
            elif sources:
                self.sources[v] = sources
            elif not self.data.isdisjoint(task.reads):
                self.data.add(v)
        return position

    def _parameters(self, task: Task) -> frozenset[Var]:
        return frozenset[Var]().union(*(self.sources.get(v, ()) for v in task.reads))

    def _reads_both(self, task: Task) -> bool:
        """Returns whether a task reads parameters, and the batch or what is computed from it."""
        return not self.data.isdisjoint(task.reads) and not self.sources.keys().isdisjoint(task.reads)

    def _check_flow(self, forward: Sequence[Task]) -> None:
        """Notes the positions that read a value; raises `ShardingError` for readers in front of its producer."""
        faults = []
        for task in forward:
            if (position := self.positions[task]) is None:
                continue
            for v in task.reads:
                for source in self.sources.get(v, (v,)):
                    self.available[source].add(position)
                if v in self.producers and (origin := self.value_positions.get(v, position)) > position:
                    faults.append(f"{task} of stage {position} reads {self.producers[v]} of stage {origin}")
        if faults:
            raise ShardingError(
                "values flow backwards through the stages",
                faults,
                rule="a forward pass reads values of its own stage and of earlier ones",
                remedy="number the stages in the order in which the model runs",
            )

    def _positions_of_readers(self, task: Task) -> set[int]:
        positions = (self.positions.get(reader) for v in task.makes for reader in self.readers[v])
        return {position for position in positions if position is not None}

    def _forward_position(self, task: Task) -> int | None:
        if (position := self.named.get(task)) is not None:
            return position
        inputs = [self.value_positions[v] for v in task.reads if v in self.value_positions]
        owner_stages = self.boundary.owner_stages
        owners = [owner_stages[v] for v in self._parameters(task) if v in owner_stages]
        if not inputs and owners and not self.outputs.isdisjoint(task.makes):
            return max(owners)
        if not self.named and owners and (inputs or self._reads_both(task)):
            return self._next_position(max(inputs, default=0), max(owners))
        if not inputs:
            return None if task.is_pure else max(owners, default=0)
        return max(inputs)

    def _next_position(self, first: int, stage: int) -> int:
        """Returns the first position, from `first` on, that a stage of the mesh runs; without one, `first`."""
        positions = range(first, self.shape.chain_length)
        return next((i for i in positions if self.shape.stage_and_chunk(i)[0] == stage), first)

    def _late_position(self, task: Task) -> int | None:
        if (position := self.named.get(task)) is not None:
            return position
        inputs = [v for v in task.reads if v in self.value_positions]
        parameters = self._parameters(task)
        if not task.backward:
            staged_parameters = [v for v in parameters if v in self.boundary.owner_stages]
            is_written = bool(staged_parameters) and not self.outputs.isdisjoint(task.makes)
            if inputs or is_written:
                return self._position_of_most_bytes([*inputs, *staged_parameters])
            return None if task.is_pure else 0
        saved = [self.available[v] for v in inputs if v not in self.gradients]
        gradients = [v for v in inputs if v in self.gradients]
        if not inputs and task.is_pure and (not parameters or all(self._is_common(v) for v in task.reads)):
            return None
        options = [*saved, *(self.available[v] for v in parameters if self.available[v])]
        if not options:
            return self._position_of_most_bytes(gradients) if gradients else 0
        self.bound.add(task)
        common = set.intersection(*options) or set.intersection(*(saved or options)) or set.union(*options)
        last = max((self.value_positions[v] for v in gradients), default=self.shape.chain_length)
        return max((position for position in common if position <= last), default=min(common))

    def _is_common(self, v: Var) -> bool:
        """Returns whether a value is no gradient: it depends on parameters alone, or on the batch."""
        return v not in self.gradients or v in self.sources or v in self.data

    def _pull(self, late: Iterable[Task]) -> dict[Task, int]:
        """Returns the positions of tasks that only view or sum up a gradient which earlier positions alone read."""
        roots: dict[Var, Var] = {}
        readers = defaultdict[Var, set[int]](set)
        groups = defaultdict[Var, list[Task]](list)
        for task in late:
            inputs = [v for v in task.reads if v in self.value_positions]
            if task in self.bound:
                for v in inputs:
                    readers[roots.get(v, v)].add(self.value_positions[task.makes[0]] if task.makes else 0)
            elif task.backward and task not in self.named and len(inputs) == 1:
                root = roots.get(inputs[0], inputs[0])
                roots.update(dict.fromkeys(task.makes, root))
                groups[root].append(task)
        return {
            task: position
            for root, group in groups.items()
            if readers[root] and (position := max(readers[root])) < self.value_positions[root]
            for task in group
        }

    def _position_of_most_bytes(self, values: Iterable[Var]) -> int:
        """Returns the position of most bytes, the first of equal ones; a parameter counts on its owner."""
        counts = Counter[int]()
        for v in values:
            owner = self.value_positions[v] if v in self.value_positions else self.boundary.owner_stages[v]
            counts[owner] += v.nbytes
        return min(counts, key=lambda position: (-counts[position], position))
