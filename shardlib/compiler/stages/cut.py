"""Cuts a lowered program into one program per stage.

Every stage runs its tasks in the order of its fragments: those of a schedule, and in front of and behind them what
belongs to no microbatch. A task that names no microbatch runs as soon as its operands are there. A value that another
stage reads is sent once, by the task that makes it, in the layout that it is made in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardlib.compiler.program.dependents import find_dependents
from shardlib.compiler.program.steps import Compute, Program, Step, Var, reads, swapped
from shardlib.compiler.stages.assign import Assignment, Boundary, Task, assign, list_parameter_tasks, list_tasks
from shardlib.compiler.stages.automatic import choose_stages
from shardlib.compiler.stages.fragment_tags import tag_step
from shardlib.compiler.stages.fragments import Fragment, Kind, PipelineShape
from shardlib.compiler.stages.pipeline_shape import choose_shape, count_live
from shardlib.compiler.stages.schedules import order_fragments
from shardlib.compiler.stages.staged import ONCE, Message, Staged, order_receives
from shardlib.compiler.stages.timetable import Orders
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Line
from shardlib.ops.transfers import RECEIVE, SEND


def cut(
    program: Program,
    stages: int,
    inputs: Mapping[Var, int],
    outputs: Mapping[int, Var | int | None],
    cotangents: Mapping[Var, Var],
    parameters: Collection[Var] = (),
    memory: int | None = None,
) -> Staged:
    """Returns the programs of `stages` stages.

    `inputs` are the stages of tensors that live on one, and `outputs`, by position, those that results must be on: a
    stage, all (None), or the first stage whose forward pass reads an input. Others stay where they are made.
    `cotangents` maps inputs to the results whose gradients they are. If the code names no stage, the tasks that depend
    on `parameters` are cut automatically, so that stages can keep saved values in `memory` bytes, if that is given. If
    parameters live on stages already, and that cut would move some, tasks follow the stages where they live instead.

    Raises `ShardingError` for values that flow backwards, a stage without work, and a schedule that cannot run.
    """
    tasks = list_tasks(program)
    calls = list(dict.fromkeys(task.tag.microbatches for task in tasks if task.tag.microbatches is not None))
    if len(calls) > 1:
        raise ShardingError(
            "one program has several calls of sl.microbatch",
            [f"n={x.n}, schedule={x.schedule!r}" for x in calls],
            rule="one call cuts the batch of a pipeline, so that one schedule orders its fragments",
        )
    call = calls[0] if calls else ONCE
    shared = list_parameter_tasks(tasks, parameters)
    named: Mapping[Task, int] = {
        task: task.tag.stage for task in tasks if task.tag.stage is not None and task not in shared
    }
    shape = choose_shape(call, stages, {*named.values()})
    orders = order_fragments(call.schedule, shape)
    partition, is_named = None, bool(named)
    is_trained = any(task.backward for task in tasks)
    if not named and (is_trained or not any(v in inputs for v in parameters)):
        live = count_live(shape, orders)
        trained = {program.inputs[i] for i in program.replaced}
        named, partition = choose_stages(program, tasks, shape.chain_length, parameters, trained, live, memory)
    boundary = Boundary(program.inputs, program.outputs, inputs, parameters, cotangents)
    assignment = assign(tasks, named, boundary, shape)
    if partition is not None and _moves_parameters(assignment, shape, inputs):
        assignment, partition = assign(tasks, {}, boundary, shape), None
    staged = _Cut(program, tasks, assignment, shape, orders, outputs, cotangents, parameters).run()
    return replace(staged, partition=partition, is_named=is_named, schedule=call.schedule)


def _moves_parameters(assignment: Assignment, shape: PipelineShape, owner_stages: Mapping[Var, int]) -> bool:
    """Returns whether parameters that live on a stage would have to move to the first one that reads them."""
    return any(
        v in owner_stages and owner_stages[v] != min(shape.stage_and_chunk(i)[0] for i in positions)
        for v, positions in assignment.reader_positions.items()
        if positions
    )


class _Cut:
    def __init__(
        self,
        program: Program,
        tasks: Sequence[Task],
        assignment: Assignment,
        shape: PipelineShape,
        orders: Orders,
        outputs: Mapping[int, Var | int | None],
        cotangents: Mapping[Var, Var],
        parameters: Collection[Var],
    ) -> None:
        self.parameters = set(parameters)
        self.behind_cotangents = find_dependents(((task.reads, task.makes) for task in tasks), cotangents)
        self.is_split = bool(cotangents)
        self.program, self.tasks, self.shape, self.orders, self.assignment = program, tasks, shape, orders, assignment
        self.positions, self.value_positions = assignment.positions, assignment.value_positions
        self.gradients = assignment.gradients
        self.number = {task: i for i, task in enumerate(tasks)}
        self.producers = {v: task for task in tasks for v in task.makes}
        self.readers = defaultdict[Var, list[Task]](list)
        for task in tasks:
            for v in dict.fromkeys(task.reads):
                self.readers[v].append(task)
        self.fragment_index = [{f: i for i, f in enumerate(order)} for order in orders]  # by stage
        self.index: dict[tuple[Task, int], int] = {}  # of the fragment that a task runs with, by task and stage
        self.fragments: dict[Task, Fragment] = {}  # of tasks that belong to one
        self.outputs = {i: x for i, x in outputs.items() if not isinstance(x, Var)}
        readers = {i: self._first_reader(x) for i, x in outputs.items() if isinstance(x, Var)}
        self.outputs |= {i: stage for i, stage in readers.items() if stage is not None}

    def run(self) -> Staged:
        """Places all tasks, and writes the programs."""
        self.weight_gradients = self._weight_gradients() if self.shape.split_weights else frozenset()
        faults: list[str] = []
        for task in self.tasks:
            if (position := self.positions[task]) is not None:
                faults += self._place(task, position)
        if faults:
            raise ShardingError(
                "the schedule runs fragments before what they need",
                [*dict.fromkeys(faults)][:10],
                rule="a fragment reads values of its own fragment and of earlier ones",
                remedy='schedule="gpipe" runs all forward fragments first; or take the gradients inside the function',
            )
        for task in reversed(self.tasks):
            if self.positions[task] is None:
                self._place_copies(task)
        return self._write()

    # Places ---------------------------------------------------------------------------------------------------------

    def _first_reader(self, v: Var) -> int | None:
        """Returns the first stage whose forward pass reads a parameter."""
        positions = self.assignment.reader_positions.get(v, ())
        return min((self.shape.stage_and_chunk(i)[0] for i in positions), default=None)

    def _fragment(self, task: Task, position: int) -> Fragment | None:
        """Returns the fragment of a task; None if it belongs to no microbatch, or runs behind the backward pass."""
        microbatch = task.tag.microbatch
        if microbatch is None:
            is_behind = not task.backward and not self.gradients.isdisjoint((*task.reads, *task.makes))
            if self.shape.microbatches > 1 or (is_behind and task not in self.assignment.named):
                return None
            microbatch = 0
        stage, chunk = self.shape.stage_and_chunk(position)
        kind: Kind = (
            "W"
            if task in self.weight_gradients
            else "B"
            if task.backward or not self.gradients.isdisjoint(task.reads)
            else "F"
        )
        return Fragment(kind, microbatch, stage, chunk)

    def _place(self, task: Task, position: int) -> list[str]:
        """Places a task of one stage; returns the fragments that its own one would run before."""
        stage, chunk = self.shape.stage_and_chunk(position)
        operands = [
            (v, self._available_index(task, v, stage, chunk))
            for v in task.reads
            if v in self.value_positions and v in self.producers
        ]
        latest = max((i for _, i in operands), default=-1)
        fragment = self._fragment(task, position)
        self.index[task, stage] = latest if fragment is None else self.fragment_index[stage][fragment]
        if fragment is not None:
            self.fragments[task] = fragment
        if fragment is None or latest <= self.fragment_index[stage][fragment]:
            return []
        if task.tag.microbatch is None:  # a second pass, outside of `sl.microbatch`, runs behind the first one
            self.index[task, stage] = latest
            return []
        v, last = max(operands, key=lambda item: item[1])
        return [f"{fragment!r} needs {v.name} of {self.orders[stage][last]!r}, which runs later"]

    def _available_index(self, task: Task, v: Var, stage: int, chunk: int) -> int:
        """Returns the index, on the stage of `task`, of the fragment in which a value is there."""
        producer = self.producers[v]
        owner, _ = self.shape.stage_and_chunk(self.value_positions[v])
        index = self.index[producer, owner]
        if owner == stage or index < 0:
            return index
        if not task.backward and task.tag.microbatch is None and v in self.gradients:
            # clipping or an optimizer, which waits for another stage, runs behind all fragments
            return len(self.orders[stage]) - 1
        f = self.orders[owner][index]
        return self.fragment_index[stage][f._replace(stage=stage, chunk=chunk)]

    def _place_copies(self, task: Task) -> None:
        """Places a task that all stages have in front of its first reader on each stage that needs it."""
        outputs = {i for i, x in enumerate(self.program.outputs) if x in task.makes}
        last = {stage: len(order) - 1 for stage, order in enumerate(self.orders)}
        if outputs:
            self.index.update({(task, stage): last[stage] for stage in last})
        for v in task.makes:
            for reader in self.readers[v]:
                for stage in last:
                    if (index := self.index.get((reader, stage))) is not None:
                        self.index[task, stage] = min(index, self.index.get((task, stage), index))

    def _weight_gradients(self) -> frozenset[Task]:
        """Returns the backward tasks of each fragment from which no earlier stage needs anything."""
        needed: set[Task] = set()
        for task in reversed(self.tasks):
            for v in task.makes:
                for r in self.readers[v]:
                    same = r.tag.microbatch == task.tag.microbatch and r.backward
                    if same and (r in needed or self.positions[r] != self.positions[task]):
                        needed.add(task)
        return frozenset(
            task for task in self.tasks if task.backward and task.tag.microbatch is not None and task not in needed
        )

    # Programs -------------------------------------------------------------------------------------------------------

    def _write(self) -> Staged:
        output_stages = tuple(self._output_stage(i, x) for i, x in enumerate(self.program.outputs))
        orders = [self._ordered(stage) for stage in range(self.shape.stages)]
        arrivals = self._arrivals(orders)
        messages: list[Message] = []
        sends = defaultdict[tuple[int, Var], list[Message]](list)  # by sender and value
        for stage, order in enumerate(orders):
            for v in [
                *(v for v in self.program.inputs if v in self.value_positions),
                *(v for task in order for v in task.makes),
            ]:
                if self._owner_stage(v) == stage:
                    for receiver in sorted(r for r, values in enumerate(arrivals) if v in values):
                        reader = arrivals[receiver][v]
                        m = Message(len(messages), v, stage, receiver, self._source(v), reader)
                        messages.append(m)
                        sends[stage, v].append(m)
        programs = [self._stage_program(stage, order, sends, output_stages) for stage, order in enumerate(orders)]
        return Staged(self.shape, self.orders, tuple(programs), None, output_stages, tuple(messages))

    def _owner_stage(self, v: Var) -> int | None:
        return None if v not in self.value_positions else self.shape.stage_and_chunk(self.value_positions[v])[0]

    def _output_stage(self, i: int, x: Any) -> int | None:
        return self.outputs[i] if i in self.outputs else self._owner_stage(x) if isinstance(x, Var) else None

    def _source(self, v: Var) -> Fragment | None:
        producer = self.producers.get(v)
        return None if producer is None else self.fragments.get(producer)

    def _ordered(self, stage: int) -> list[Task]:
        tasks = [task for task in self.tasks if (task, stage) in self.index]
        return sorted(tasks, key=lambda task: (self.index[task, stage], self.number[task]))

    def _arrivals(self, orders: Sequence[Sequence[Task]]) -> list[dict[Var, Fragment | None]]:
        """Returns the values of other stages that each stage reads, with the fragment that reads them first."""
        arrivals: list[dict[Var, Fragment | None]] = []
        for stage, order in enumerate(orders):
            values: dict[Var, Fragment | None] = {}
            for task in order:
                for v in task.reads:
                    if v in self.value_positions and self._owner_stage(v) != stage and values.get(v) is None:
                        values[v] = self.fragments.get(task)
            for i, output_stage in self.outputs.items():
                x = self.program.outputs[i]
                if (
                    output_stage in (None, stage)
                    and isinstance(x, Var)
                    and x in self.value_positions
                    and self._owner_stage(x) != stage
                ):
                    values.setdefault(x, None)
            arrivals.append(values)
        return arrivals

    def _stage_program(
        self,
        stage: int,
        order: Sequence[Task],
        sends: Mapping[tuple[int, Var], Sequence[Message]],
        output_stages: Sequence[int | None],
    ) -> Program:
        local = {
            m.var: replace(m.var, name=f"{m.var.name}.received")
            for ms in sends.values()
            for m in ms
            if m.receiver == stage
        }
        copies = (v for task in order if self.positions[task] is None for v in task.makes)  # each stage has its own
        local |= {v: replace(v, name=f"{v.name}.s{stage}") for v in copies}
        incoming = order_receives([m for ms in sends.values() for m in ms if m.receiver == stage], order)
        steps: list[Step] = [
            self._send(m) for v in self.program.inputs for m in sends.get((stage, v), ()) if v in self.value_positions
        ]
        for task in order:
            for m in incoming.pop(task, ()):
                steps.append(self._receive(m, local[m.var]))
            steps += [self._tagged(swapped(s, local), self.fragments.get(task)) for s in task.steps]
            steps += [self._send(m) for v in task.makes for m in sends.get((stage, v), ())]
        for m in incoming.pop(None, ()):
            steps.append(self._receive(m, local[m.var]))
        is_present = [
            not isinstance(x, Var) or output_stages[i] in (None, stage) for i, x in enumerate(self.program.outputs)
        ]
        outputs = tuple(
            (local.get(x, x) if isinstance(x, Var) else x) if present else None
            for x, present in zip(self.program.outputs, is_present, strict=True)
        )
        replaced = {i: output for i, output in self.program.replaced.items() if is_present[output]}
        program = replace(self.program, steps=tuple(steps), outputs=outputs, replaced=replaced)
        return program.with_vars({v: replace(v, elsewhere=True) for v in self._absent(program, stage)})

    def _absent(self, program: Program, stage: int) -> list[Var]:
        """Returns the inputs that live on other stages, or will: parameters on all stages that only others read."""
        used = {v for step in program.steps for v in reads(step)} | {*program.results}

        def is_absent(v: Var) -> bool:
            elsewhere = self._owner_stage(v) not in (None, stage)
            return v not in used and (elsewhere or (v not in self.value_positions and v in self.parameters))

        return [v for v in program.inputs if is_absent(v)]

    def _send(self, m: Message) -> Step:
        return self._tagged(Compute(SEND, (m.var, m.receiver, m.number), {}, (), *self._origin(m.var)), m.source)

    def _receive(self, m: Message, out: Var) -> Step:
        return self._tagged(Compute(RECEIVE, (m.sender, m.number), {}, (out,), *self._origin(m.var)), m.target)

    def _tagged(self, step: Step, fragment: Fragment | None) -> Step:
        return step if fragment is None else tag_step(step, fragment, self.shape)

    def _origin(self, v: Var) -> tuple[Line | None, bool]:
        """Returns the line of a value, and whether its message belongs to the backward pass."""
        producer = self.producers.get(v)
        backward = v in self.behind_cotangents if self.is_split else producer is not None and producer.backward
        return None if producer is None else producer.line, backward
