"""Chooses stages for a lowered program whose code names none: its forward pass becomes a graph for `partition`.

One microbatch is cut; the others follow it. Tasks that read no parameter, and nothing computed from one, are left out:
all stages that need them compute them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardlib.compiler.program.dependents import find_dependents
from shardlib.compiler.program.steps import Collective, Compute, Program, Start, Var
from shardlib.compiler.simulate import rooflines
from shardlib.compiler.simulate.collectives import transfer
from shardlib.compiler.stages.assign import Task, find_gradients, list_parameter_tasks
from shardlib.compiler.stages.explain_cut import Partition
from shardlib.compiler.stages.partition import CutNode, TiedParameter, partition
from shardlib.core.fragment_tag import NO_TAG
from shardlib.core.source_lines import Line
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.machine import Machine

_STATE = 4  # a trained parameter comes with a gradient and two moments


def choose_stages(
    program: Program,
    tasks: Sequence[Task],
    chain_length: int,
    parameters: Collection[Var],
    trained: Collection[Var],
    live: Sequence[int],
    memory: int | None = None,
) -> tuple[Mapping[Task, int], Partition]:
    """Returns the position in a chain of so many chunks of every forward task that one of them runs, and the cut.

    `live` are the microbatches that each chunk holds at once. If possible, a stage keeps all saved values in `memory`
    bytes; else the fullest stage needs least, and its program recomputes or offloads values.
    """
    forward = _forward_tasks(tasks, parameters)
    microbatch = next((task.tag.microbatch for task in forward if task.tag.microbatch is not None), None)
    first = [task for task in forward if task.tag.microbatch in (None, microbatch)]
    seconds = _seconds(program, tasks, first)
    nodes, tied = _graph(first, seconds, set(parameters), set(trained))
    mesh = program.mesh
    link = Machine.convert(mesh.machine).span([Axis(str(mesh.stage_axis), mesh.stages)], mesh.shape)
    count = len({task.tag.microbatch for task in forward} - {None}) or 1
    latency = max(link.inner.latency, link.outer.latency) if link.far > 1 else link.inner.latency
    result = partition(
        nodes, chain_length, link_seconds_per_byte=1 / link.pairwise, latency=latency, memory=memory, tied=tied,
        microbatches=count, live=live, strict=False,
    )  # fmt: skip
    numbering = _Numbering(parameters)
    by_number = dict(zip(numbering.number(first), result.stages, strict=True))
    chosen = dict(zip(first, result.stages, strict=True))
    for m in {task.tag.microbatch for task in forward} - {None, microbatch}:
        others = [task for task in forward if task.tag.microbatch in (None, m)]
        numbers = zip(others, numbering.number(others), strict=True)
        chosen = {task: by_number[number] for task, number in numbers if number in by_number} | chosen
    outputs = {v for v in program.outputs if isinstance(v, Var)}
    copied = list_parameter_tasks(forward, parameters, outputs)  # each stage computes them
    return {task: position for task, position in chosen.items() if task not in copied}, result


def _forward_tasks(tasks: Sequence[Task], parameters: Collection[Var]) -> list[Task]:
    """Returns the tasks of the forward pass that depend on a parameter, in front of all that depends on gradients."""
    gradients = find_gradients(tasks)
    forward = [task for task in tasks if not task.backward and gradients.isdisjoint(task.reads)]
    values = find_dependents(((task.reads, task.makes) for task in forward), parameters)
    result = [task for task in forward if not values.isdisjoint(task.reads)]
    saved = {v for task in tasks if task.backward for v in task.reads}
    return _model(result, saved) if saved else result


def _model(forward: Sequence[Task], saved: set[Var]) -> list[Task]:
    """Returns the tasks that belong to the model: those of microbatches, and those that lead to gradients.

    The backward pass reads the `saved` values.
    """
    needed: set[Var] = set()
    result = []
    for task in reversed(forward):
        is_saved = not saved.isdisjoint((*task.makes, *task.reads))
        if task.tag.microbatch is not None or is_saved or not needed.isdisjoint(task.makes):
            needed.update(task.reads)
            result.append(task)
    return result[::-1]


class _Numbering:
    """Numbers tasks by their line, their op and the numbers of their operands: alike in all microbatches.

    Microbatches may share tasks that read parameters alone: those of the first one.
    """

    def __init__(self, parameters: Collection[Var]) -> None:
        self.numbers: dict[Any, int] = {}
        self.values: dict[Var, Any] = {v: v for v in parameters}

    def number(self, tasks: Sequence[Task]) -> list[int]:
        counts = Counter[Any]()
        result = []
        for task in tasks:
            step = task.steps[0]
            kind = str(step.target) if isinstance(step, Compute) else "message"
            key = _bare(task), kind, tuple(self.values.get(v) for v in task.reads)
            number = self.numbers.setdefault((key, counts[key]), len(self.numbers))
            counts[key] += 1
            self.values.update({v: (number, i) for i, v in enumerate(task.makes)})
            result.append(number)
        return result


def _seconds(program: Program, tasks: Sequence[Task], first: Sequence[Task]) -> dict[Task, float]:
    """Returns the seconds of each forward task, and its share of those that the backward pass of its line takes."""
    machine = Machine.convert(program.mesh.machine)
    costs = rooflines.plain(program)

    def run_alone(task: Task) -> float:
        step = task.steps[0]
        if isinstance(step, Start):
            return sum(send(c) for c in step.moves)
        return rooflines.seconds(step, costs[step], machine.device) if isinstance(step, Compute) else 0.0

    def send(c: Collective) -> float:
        return transfer(c.kind, c.bytes, machine.span(c.axes, program.mesh.shape)).seconds

    forward = {task: run_alone(task) for task in first}
    of_line = defaultdict[Line | None, float](float)
    microbatches = {task.tag.microbatch for task in first}
    back = defaultdict[Line | None, float](float)
    for task in first:
        of_line[_bare(task)] += forward[task]
    for task in tasks:
        if task.backward and task.tag.microbatch in microbatches:
            back[_bare(task)] += run_alone(task)
    return {task: s * (1 + back[_bare(task)] / of_line[_bare(task)]) if s else 0.0 for task, s in forward.items()}


def _bare(task: Task) -> Line | None:
    return None if task.line is None else task.line._replace(tag=NO_TAG)


def _graph(
    tasks: Sequence[Task], seconds: Mapping[Task, float], parameters: set[Var], trained: set[Var]
) -> tuple[list[CutNode], list[TiedParameter]]:
    producers = {v: i for i, task in enumerate(tasks) for v in task.makes}
    readers = defaultdict[Var, list[int]](list)
    for i, task in enumerate(tasks):
        for v in dict.fromkeys(task.reads):
            if v in parameters:
                readers[v].append(i)
    memory = {v: v.nbytes * (_STATE if v in trained else 1) for v in readers}
    parameter_bytes = defaultdict[int, int](int)
    for v, numbers in readers.items():
        if len(numbers) == 1:
            parameter_bytes[numbers[0]] += memory[v]
    nodes = []
    for i, task in enumerate(tasks):
        sizes = [v.nbytes for v in task.makes]
        floats = any(v.dtype.is_floating_point or v.dtype.is_complex for v in task.makes)
        inputs = tuple(dict.fromkeys(producers[v] for v in task.reads if v in producers))
        nodes.append(
            CutNode(_name(task), seconds[task], inputs, max(sizes, default=0), parameter_bytes[i], sum(sizes), floats)
        )
    tied = [
        TiedParameter(v.name, tuple(numbers), v.nbytes, memory[v]) for v, numbers in readers.items() if len(numbers) > 1
    ]
    return nodes, tied


def _name(task: Task) -> str:
    step = task.steps[0]
    inside = step.inside[-1].path if isinstance(step, Compute) and step.inside else ""
    result = task.makes[0].name if task.makes else "a call"
    return f"{inside}:{result}" if inside else result
