"""Collects the figures of a pipeline from the programs of its stages, after all passes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from shardlib.compiler.graph.ir import Value
from shardlib.compiler.passes.split_backward import gives, needs
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan.names import Naming
from shardlib.compiler.plan.pipeline_view import CrossingView, PipelineView, StageView, TiedView
from shardlib.compiler.plan.stage_modules import stage_modules
from shardlib.compiler.program import flops
from shardlib.compiler.program.steps import Compute, Program, Start, Var, makes, reads
from shardlib.compiler.stages.fragment_tags import fragments_of
from shardlib.compiler.stages.fragments import PipelineShape
from shardlib.compiler.stages.stage_times import StageTimes, stage_times, staged_timetable, step_seconds
from shardlib.compiler.stages.staged import Message, Staged
from shardlib.compiler.stages.timetable import Timetable
from shardlib.ops.transfers import SEND
from shardlib.sharding.mesh.machine import Machine


def view_pipeline(compiled: Compiled, naming: Naming, machine: Machine) -> PipelineView:
    """Returns the pipeline of a program with stages, as simulated on `machine`."""
    staged = compiled.staged
    assert staged is not None, "its mesh has stages"
    times = stage_times(staged, machine)
    table = staged_timetable(staged, times, machine)
    parameters = _parameters(compiled)
    tied = _messages_of_parameters(staged, parameters)
    modules = stage_modules(staged)
    stages = tuple(
        _stage(i, staged.shape, p, modules[i], times[i], table, parameters) for i, p in enumerate(staged.programs)
    )
    schedule = staged.schedule
    return PipelineView(
        schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "of the user"),
        staged.shape.microbatches,
        staged.shape.chunks,
        stages,
        tuple(_crossings(staged.messages, tied)),
        tuple(_tied(staged, tied, naming)),
        step_seconds(times, table),
        table,
        staged.partition,
        staged.is_named,
    )


def _parameters(compiled: Compiled) -> set[Value]:
    """Returns the inputs that are state, or have gradients; those that a forward pass reads are parameters."""
    inputs, paths = compiled.graph.inputs, compiled.traced.input_paths
    trained = {value.like for value in compiled.graph.values() if not value.constant}
    return {value for value, path in zip(inputs, paths, strict=True) if path is None or value in trained}


def _read_in_forward(program: Program, shape: PipelineShape) -> set[Var]:
    """Returns the inputs that forward fragments read: directly, or by way of steps of no fragment (views, casts)."""
    sources: dict[Var, set[Var]] = {v: {v} for v in program.inputs}
    read = set[Var]()
    for step, f in zip(program.steps, fragments_of(program.steps, shape), strict=True):
        inputs = set[Var]().union(*(sources.get(v, ()) for v in needs(step)))
        if f is None:
            sources.update(dict.fromkeys(gives(step), inputs))
        elif f.kind == "F":
            read |= inputs
    return read


def _stage(
    stage: int,
    shape: PipelineShape,
    program: Program,
    modules: tuple[str, ...],
    times: StageTimes,
    table: Timetable,
    parameters: set[Value],
) -> StageView:
    read = _read_in_forward(program, shape)
    own = [v for v in program.inputs if v in read and v.value in parameters]
    has_backward = any(f.kind != "F" for f in table.orders[stage])
    return StageView(
        stage,
        modules,
        sum(math.prod(v.value.shape) for v in own if v.value is not None),
        sum(v.nbytes for v in own),
        flops.flops(program),
        table.busy(stage),
        table.idle(stage),
        times.before,
        times.after,
        times.peak,
        table.live(stage) if has_backward else 0,
    )


def _crossings(messages: Sequence[Message], tied: Mapping[int, Value]) -> Iterator[CrossingView]:
    pairs = defaultdict[tuple[int, int], list[Message]](list)
    for m in messages:
        pairs[m.sender, m.receiver].append(m)
    for (sender, receiver), some in sorted(pairs.items()):
        once = [m for m in some if m.source is None or m.target is None or m.number in tied]
        first = [m for m in some if m not in once and m.source is not None and m.source.microbatch == 0]
        names = tuple(m.var.name for m in first)
        yield CrossingView(sender, receiver, names, *map(_count, (first, once, some)))


def _count(messages: Collection[Message]) -> tuple[int, int]:
    return len(messages), sum(m.bytes for m in messages)


def _messages_of_parameters(staged: Staged, parameters: Set[Value]) -> dict[int, Value]:
    """Returns the numbers of messages that carry nothing but a parameter: itself, a view, a cast, a gathered one."""
    result = {}
    for program in staged.programs:
        origin = {v: v.value for v in program.inputs if v.value in parameters}
        for step in program.steps:
            values = {origin.get(v) for v in reads(step)}
            value = values.pop() if len(values) == 1 else None
            if value is None:
                continue
            if isinstance(step, Compute) and step.target is SEND:
                result[step.args[2]] = value
            origin |= dict.fromkeys(step.outs if isinstance(step, Start) else makes(step), value)
    return result


def _tied(staged: Staged, tied: Mapping[int, Value], naming: Naming) -> Iterator[TiedView]:
    sent = defaultdict[tuple[Value, int], list[Message]](list)
    for number, value in tied.items():
        m = staged.by_number[number]
        sent[value, m.sender].append(m)
    names = dict(zip(naming.compiled.graph.inputs, naming.inputs, strict=True))
    for (value, owner), some in sent.items():
        yield TiedView(names[value], owner, tuple(sorted({m.receiver for m in some})), *_count(some))
