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

from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, makes, reads
from shardlib.compiler.stages.fragments import PipelineShape
from shardlib.core.errors import ShardingError
from shardlib.core.fragment_tag import NO_TAG, FragmentTag
from shardlib.core.source_lines import Line, format_path_line


@dataclass(frozen=True, eq=False)
class Unit:
    """A call, or a message with its wait."""

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


def units(program: Program) -> list[Unit]:
    """Returns the steps of a lowered program, each message together with its wait."""
    result = []
    for step in program.steps:
        if isinstance(step, Start):
            wait = Wait(step.outs)
            result.append(Unit((step, wait), reads(step), makes(wait), step.first.line, step.first.backward, True))
        elif isinstance(step, Compute):
            result.append(Unit((step,), step.operands, step.out_vars, step.line, step.backward, step.is_pure))
        else:
            assert isinstance(step, Wait), "a lowered program only calls and communicates"
    return result


class Assignment(NamedTuple):
    """The stage of every unit (None: each stage that needs it has its own), of those that are named, and of values.

    `users` has the stages whose forward pass reads a parameter.
    """

    named: Mapping[Unit, int]
    units: Mapping[Unit, int | None]
    values: Mapping[Var, int]
    gradients: Set[Var]  # values of the backward pass, and those that depend on them
    users: Mapping[Var, Set[int]]


class Boundary(NamedTuple):
    """The inputs and outputs of a program, as its stages see them.

    `homes` are the stages of inputs that live on one, and `parameters` the inputs that are no arguments of the call.
    `cotangents` map inputs to the results whose gradients they are; they come to the same stage.
    """

    inputs: Collection[Var]
    outputs: Collection[Any]
    homes: Mapping[Var, int]
    parameters: Collection[Var]
    cotangents: Mapping[Var, Var]


def assign(parts: Sequence[Unit], named: Mapping[Unit, int], boundary: Boundary, shape: PipelineShape) -> Assignment:
    """Assigns units to stages, numbered along the chain: `named` ones as given.

    If none is named, each unit follows the parameters to the stages where they live.

    Raises `ShardingError` for values that flow backwards: all of them are named.
    """
    return _Assigner(named, boundary, shape).run(parts)


class _Assigner:
    def __init__(self, named: Mapping[Unit, int], boundary: Boundary, shape: PipelineShape) -> None:
        self.named, self.boundary, self.shape = named, boundary, shape
        self.units: dict[Unit, int | None] = {}
        parameters = set(boundary.parameters)
        self.sources = {v: frozenset({v}) for v in parameters}  # parameters of values that depend on nothing else
        self.stage = {v: at for v, at in boundary.homes.items() if v not in parameters}
        self.has = defaultdict[Var, set[int]](set)  # the stages that have a value, or read a parameter, in forward
        self.has.update({v: {at} for v, at in self.stage.items()})
        self.data = {*boundary.inputs} - parameters - {*boundary.cotangents}  # the batch, and what only it decides
        self.outputs = {v for v in boundary.outputs if isinstance(v, Var)}
        self.maker: dict[Var, Unit] = {}
        self.readers = defaultdict[Var, list[Unit]](list)
        self.gradients: set[Var] = set(boundary.cotangents)
        self.bound: set[Unit] = set()  # units of the backward pass whose saved values or parameters decide

    def run(self, parts: Sequence[Unit]) -> Assignment:
        for u in parts:
            self.maker.update(dict.fromkeys(u.makes, u))
            for v in dict.fromkeys(u.reads):
                self.readers[v].append(u)
        forward, late = self._divide(parts)
        first = [u for u in forward if self._assign(u, self._forward_stage(u)) is None and self._reads_both(u)]
        for u in reversed(first):
            self._assign(u, min(self._stages_of_readers(u), default=0))
        self._check_flow(forward)
        for v, result in self.boundary.cotangents.items():
            if result in self.stage:
                self.stage[v] = self.stage[result]
        for u in late:
            self._assign(u, self._late_stage(u))
        pulled = self._pull(late)
        for u in late if pulled else ():
            self._assign(u, pulled.get(u, self._late_stage(u)))
        users = {v: self.has[v] for v in self.boundary.parameters}
        return Assignment(self.named, self.units, {**self.boundary.homes, **self.stage}, self.gradients, users)

    def _divide(self, parts: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Returns the units of the forward pass, and those behind it: gradients and what depends on them."""
        forward, late = [], []
        for u in parts:
            if u.backward or not self.gradients.isdisjoint(u.reads):
                self.gradients.update(u.makes)
                late.append(u)
            else:
                forward.append(u)
        return forward, late

    def _assign(self, u: Unit, stage: int | None) -> int | None:
        inner = [self.stage[v] for v in u.reads if v.layout is None and v in self.stage]  # halves of a reshard
        stage = self.units[u] = inner[0] if inner else stage
        own = None if stage is not None or self._reads_both(u) else self._parameters(u)
        for v in u.makes:
            if stage is not None:
                self.stage[v], self.has[v] = stage, {stage}
            elif own:
                self.sources[v] = own
            elif not self.data.isdisjoint(u.reads):
                self.data.add(v)
        return stage

    def _parameters(self, u: Unit) -> frozenset[Var]:
        return frozenset[Var]().union(*(self.sources.get(v, ()) for v in u.reads))

    def _reads_both(self, u: Unit) -> bool:
        """Returns whether a unit reads parameters, and the batch or what is computed from it."""
        return not self.data.isdisjoint(u.reads) and not self.sources.keys().isdisjoint(u.reads)

    def _check_flow(self, forward: Sequence[Unit]) -> None:
        """Notes which stages read a value; raises `ShardingError` for readers in front of the stage that makes it."""
        faults = []
        for u in forward:
            if (stage := self.units[u]) is None:
                continue
            for v in u.reads:
                for x in self.sources.get(v, (v,)):
                    self.has[x].add(stage)
                if v in self.maker and self.stage.get(v, stage) > stage:
                    faults.append(f"{u} of stage {stage} reads {self.maker[v]} of stage {self.stage[v]}")
        if faults:
            raise ShardingError(
                "values flow backwards through the stages",
                faults,
                rule="a forward pass reads values of its own stage and of earlier ones",
                remedy="number the stages in the order in which the model runs",
            )

    def _stages_of_readers(self, u: Unit) -> set[int]:
        stages = (self.units.get(r) for v in u.makes for r in self.readers[v])
        return {stage for stage in stages if stage is not None}

    def _forward_stage(self, u: Unit) -> int | None:
        if (stage := self.named.get(u)) is not None:
            return stage
        staged = [self.stage[v] for v in u.reads if v in self.stage]
        homes = [at for v in self._parameters(u) if (at := self.boundary.homes.get(v)) is not None]
        if not staged and homes and not self.outputs.isdisjoint(u.makes):
            return max(homes)
        if not self.named and homes and (staged or self._reads_both(u)):
            return self._next_part(max(staged, default=0), max(homes))
        if not staged:
            return None if u.is_pure else max(homes, default=0)
        return max(staged)

    def _next_part(self, part: int, stage: int) -> int:
        """Returns the first part of the model, from `part` on, that a stage of the mesh runs; without one, `part`."""
        parts = range(part, self.shape.chain_length)
        return next((i for i in parts if self.shape.stage_and_chunk(i)[0] == stage), part)

    def _late_stage(self, u: Unit) -> int | None:
        if (stage := self.named.get(u)) is not None:
            return stage
        staged = [v for v in u.reads if v in self.stage]
        parameters = self._parameters(u)
        if not u.backward:
            homed = [v for v in parameters if v in self.boundary.homes]
            is_written = bool(homed) and not self.outputs.isdisjoint(u.makes)
            return self._most([*staged, *homed]) if staged or is_written else None if u.is_pure else 0
        saved = [self.has[v] for v in staged if v not in self.gradients]
        gradients = [v for v in staged if v in self.gradients]
        if not staged and u.is_pure and (not parameters or all(self._is_common(v) for v in u.reads)):
            return None
        options = [*saved, *(self.has[v] for v in parameters if self.has[v])]
        if not options:
            return self._most(gradients) if gradients else 0
        self.bound.add(u)
        common = set.intersection(*options) or set.intersection(*(saved or options)) or set.union(*options)
        last = max((self.stage[v] for v in gradients), default=self.shape.chain_length)
        return max((s for s in common if s <= last), default=min(common))

    def _is_common(self, v: Var) -> bool:
        """Returns whether a value is no gradient: it depends on parameters alone, or on the batch."""
        return v not in self.gradients or v in self.sources or v in self.data

    def _pull(self, late: Iterable[Unit]) -> dict[Unit, int]:
        """Returns units that only view or sum up a gradient which other stages alone read, with the stage to run on."""
        roots: dict[Var, Var] = {}
        readers = defaultdict[Var, set[int]](set)
        groups = defaultdict[Var, list[Unit]](list)
        for u in late:
            staged = [v for v in u.reads if v in self.stage]
            if u in self.bound:
                for v in staged:
                    readers[roots.get(v, v)].add(self.stage[u.makes[0]] if u.makes else 0)
            elif u.backward and u not in self.named and len(staged) == 1:
                root = roots.get(staged[0], staged[0])
                roots.update(dict.fromkeys(u.makes, root))
                groups[root].append(u)
        return {
            u: stage
            for root, group in groups.items()
            if readers[root] and (stage := max(readers[root])) < self.stage[root]
            for u in group
        }

    def _most(self, values: Iterable[Var]) -> int:
        """Returns the stage of most bytes, the first of equal ones; a parameter counts where it lives."""
        counts = Counter[int]()
        for v in values:
            counts[self.stage[v] if v in self.stage else self.boundary.homes[v]] += v.nbytes
        return min(counts, key=lambda stage: (-counts[stage], stage))


def list_weight_units(parts: Sequence[Unit], parameters: Collection[Var]) -> Set[Unit]:
    """Returns units that read parameters alone (gathers, casts): microbatches and stages share them."""
    values = set(parameters)
    result = set()
    for u in parts:
        if u.reads and u.is_pure and values.issuperset(u.reads):
            values.update(u.makes)
            result.add(u)
    return result
