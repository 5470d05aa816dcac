"""Chooses stages for a lowered program whose code names none: its forward pass becomes a graph for `partition`.

One microbatch is cut; the others follow it. Units that read no parameter, and nothing computed from one, are left out:
all stages that need them compute them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardlib.compiler.program.steps import Collective, Compute, Program, Start, Var
from shardlib.compiler.simulate import rooflines
from shardlib.compiler.simulate.collectives import transfer
from shardlib.compiler.stages.assign import Unit
from shardlib.compiler.stages.explain_cut import Partition
from shardlib.compiler.stages.partition import CutNode, TiedParameter, partition
from shardlib.core.fragment_tag import NO_TAG
from shardlib.core.source_lines import Line
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.machine import Machine

_STATE = 4  # a trained parameter comes with a gradient and two moments


def choose_stages(
    program: Program,
    parts: Sequence[Unit],
    stages: int,
    parameters: Collection[Var],
    trained: Collection[Var],
    live: Sequence[int],
    memory: int | None = None,
) -> tuple[Mapping[Unit, int], Partition]:
    """Returns the stage of every forward unit that a stage runs, and the cut with its reasons.

    `live` are the microbatches that each stage holds at once. If possible, a stage keeps all saved values in `memory`
    bytes; else the fullest stage needs least, and its program recomputes or offloads values.
    """
    forward = _forward_units(parts, set(parameters))
    microbatch = next((u.tag.microbatch for u in forward if u.tag.microbatch is not None), None)
    first = [u for u in forward if u.tag.microbatch in (None, microbatch)]
    seconds = _seconds(program, parts, first)
    nodes, tied = _graph(first, seconds, set(parameters), set(trained))
    mesh = program.mesh
    link = Machine.convert(mesh.machine).span([Axis(str(mesh.stage_axis), mesh.stages)], mesh.shape)
    count = len({u.tag.microbatch for u in forward} - {None}) or 1
    latency = max(link.inner.latency, link.outer.latency) if link.far > 1 else link.inner.latency
    result = partition(
        nodes, stages, link_seconds_per_byte=1 / link.pairwise, latency=latency, memory=memory, tied=tied,
        microbatches=count, live=live, strict=False,
    )  # fmt: skip
    keys = _Keys(set(parameters))
    by_key = dict(zip(keys.number(first), result.stages, strict=True))
    chosen = dict(zip(first, result.stages, strict=True))
    for m in {u.tag.microbatch for u in forward} - {None, microbatch}:
        others = [u for u in forward if u.tag.microbatch in (None, m)]
        chosen = {u: by_key[key] for u, key in zip(others, keys.number(others), strict=True) if key in by_key} | chosen
    copied = _of_parameters_alone(program, forward, set(parameters))
    return {u: stage for u, stage in chosen.items() if u not in copied}, result


def _of_parameters_alone(program: Program, forward: Sequence[Unit], values: set[Var]) -> set[Unit]:
    """Returns units that any stage can compute from parameters alone, but for those that compute an output."""
    outputs = {v for v in program.outputs if isinstance(v, Var)}
    result: set[Unit] = set()
    for u in forward:
        if u.is_pure and values.issuperset(u.reads) and outputs.isdisjoint(u.makes):
            values.update(u.makes)
            result.add(u)
    return result


def _forward_units(parts: Sequence[Unit], parameters: set[Var]) -> list[Unit]:
    """Returns the units of the forward pass that depend on a parameter, in front of all that depends on gradients."""
    gradients: set[Var] = set()
    own = set(parameters)
    result = []
    for u in parts:
        if u.backward or not gradients.isdisjoint(u.reads):
            gradients.update(u.makes)
        elif not own.isdisjoint(u.reads):
            own.update(u.makes)
            result.append(u)
    backwards = {v for u in parts if u.backward for v in u.reads}
    if not backwards:
        return result
    return _model(result, backwards)


def _model(forward: Sequence[Unit], backwards: set[Var]) -> list[Unit]:
    """Returns the units that belong to the model: those of microbatches, and those that lead to gradients.

    The backward pass reads the values `backwards`.
    """
    needed: set[Var] = set()
    result = []
    for u in reversed(forward):
        shared = not backwards.isdisjoint((*u.makes, *u.reads))
        if u.tag.microbatch is not None or shared or not needed.isdisjoint(u.makes):
            needed.update(u.reads)
            result.append(u)
    return result[::-1]


class _Keys:
    """Numbers units by their line, their op and the numbers of their operands: alike in all microbatches.

    Microbatches may share units that read parameters alone: those of the first one.
    """

    def __init__(self, parameters: Collection[Var]) -> None:
        self.numbers: dict[Any, int] = {}
        self.values: dict[Var, Any] = {v: v for v in parameters}

    def number(self, units: Sequence[Unit]) -> list[int]:
        counts = Counter[Any]()
        result = []
        for u in units:
            step = u.steps[0]
            kind = str(step.target) if isinstance(step, Compute) else "message"
            key = _bare(u), kind, tuple(self.values.get(v) for v in u.reads)
            number = self.numbers.setdefault((key, counts[key]), len(self.numbers))
            counts[key] += 1
            self.values.update({v: (number, i) for i, v in enumerate(u.makes)})
            result.append(number)
        return result


def _seconds(program: Program, parts: Sequence[Unit], first: Sequence[Unit]) -> dict[Unit, float]:
    """Returns the seconds of each forward unit, and its share of those that the backward pass of its line takes."""
    machine = Machine.convert(program.mesh.machine)
    costs = rooflines.plain(program)

    def own(u: Unit) -> float:
        step = u.steps[0]
        if isinstance(step, Start):
            return sum(_message(c) for c in step.moves)
        return rooflines.seconds(step, costs[step], machine.device) if isinstance(step, Compute) else 0.0

    def _message(c: Collective) -> float:
        return transfer(c.kind, c.bytes, machine.span(c.axes, program.mesh.shape)).seconds

    forward = {u: own(u) for u in first}
    of_line = defaultdict[Line | None, float](float)
    microbatches = {u.tag.microbatch for u in first}
    back = defaultdict[Line | None, float](float)
    for u in first:
        of_line[_bare(u)] += forward[u]
    for u in parts:
        if u.backward and u.tag.microbatch in microbatches:
            back[_bare(u)] += own(u)
    return {u: s * (1 + back[_bare(u)] / of_line[_bare(u)]) if s else 0.0 for u, s in forward.items()}


def _bare(u: Unit) -> Line | None:
    return None if u.line is None else u.line._replace(tag=NO_TAG)


def _graph(
    units: Sequence[Unit], seconds: Mapping[Unit, float], parameters: set[Var], trained: set[Var]
) -> tuple[list[CutNode], list[TiedParameter]]:
    at = {v: i for i, u in enumerate(units) for v in u.makes}
    readers = defaultdict[Var, list[int]](list)
    for i, u in enumerate(units):
        for v in dict.fromkeys(u.reads):
            if v in parameters:
                readers[v].append(i)
    memory = {v: v.nbytes * (_STATE if v in trained else 1) for v in readers}
    own = defaultdict[int, int](int)
    for v, where in readers.items():
        if len(where) == 1:
            own[where[0]] += memory[v]
    nodes = []
    for i, u in enumerate(units):
        sizes = [v.nbytes for v in u.makes]
        floats = any(v.dtype.is_floating_point or v.dtype.is_complex for v in u.makes)
        inputs = tuple(dict.fromkeys(at[v] for v in u.reads if v in at))
        saved = sum(v.nbytes for v in u.makes)
        nodes.append(CutNode(_name(u), seconds[u], inputs, max(sizes, default=0), own[i], saved, floats))
    tied = [TiedParameter(v.name, tuple(w), v.nbytes, memory[v]) for v, w in readers.items() if len(w) > 1]
    return nodes, tied


def _name(u: Unit) -> str:
    step = u.steps[0]
    inside = step.inside[-1].path if isinstance(step, Compute) and step.inside else ""
    result = u.makes[0].name if u.makes else "a call"
    return f"{inside}:{result}" if inside else result
