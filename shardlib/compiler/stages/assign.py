"""Assigns every step of a lowered program to a stage.

A step for which the user's code names a stage runs there, and so do its gradients. Others follow their operands:

* in the forward pass, to the last of their stages;
* in the backward pass, to a stage that has the saved values, if possible the one that has the incoming gradient;
* behind the backward pass (clipping, optimizers), to the stage of most bytes.

A step that reads only values which all stages have is computed on each stage that needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, makes, reads
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
    """The stage of every unit (None: each stage that needs it has its own), of those that are named, and of values."""

    named: Mapping[Unit, int]
    units: Mapping[Unit, int | None]
    values: Mapping[Var, int]
    gradients: Set[Var]  # values of the backward pass, and what follows from them


def assign(
    parts: Sequence[Unit], named: Mapping[Unit, int], inputs: Mapping[Var, int], cotangents: Mapping[Var, Var]
) -> Assignment:
    """Assigns units to stages: `named` ones as given; `inputs` are the stages of tensors that live on one.

    `cotangents` maps inputs to the results whose gradients they are; they come to the same stage.

    Raises `ShardingError` for values that flow backwards: all of them are named.
    """
    return _Assigner(named, inputs, cotangents).run(parts)


class _Assigner:
    def __init__(self, named: Mapping[Unit, int], inputs: Mapping[Var, int], cotangents: Mapping[Var, Var]) -> None:
        self.named, self.cotangents = named, cotangents
        self.units: dict[Unit, int | None] = {}
        self.stage = dict(inputs)  # of each value that is not on all stages
        self.has = {v: {stage} for v, stage in inputs.items()}  # the stages that have a value of the forward pass
        self.maker: dict[Var, Unit] = {}
        self.gradients: set[Var] = set(cotangents)  # values of the backward pass, and what follows from them
        self.faults: list[str] = []

    def run(self, parts: Iterable[Unit]) -> Assignment:
        for unit in parts:
            stage = self.units[unit] = self._stage(unit)
            late = unit.backward or not self.gradients.isdisjoint(unit.reads)
            for v in unit.makes:
                self.maker[v] = unit
                if stage is not None:
                    self.stage[v], self.has[v] = stage, {stage}
            if late:
                self.gradients.update(unit.makes)
            elif stage is not None:
                self._flow(unit, stage)
        if self.faults:
            raise ShardingError(
                "values flow backwards through the stages",
                self.faults,
                rule="a forward pass reads values of its own stage and of earlier ones",
                remedy="number the stages in the order in which the model runs",
            )
        return Assignment(self.named, self.units, self.stage, self.gradients)

    def _flow(self, unit: Unit, stage: int) -> None:
        for v in unit.reads:
            if v in self.has:
                self.has[v].add(stage)
            if v in self.maker and self.stage.get(v, stage) > stage and v not in self.gradients:
                self.faults.append(f"{unit} of stage {stage} reads {self.maker[v]} of stage {self.stage[v]}")

    def _stage(self, unit: Unit) -> int | None:
        if (stage := self.named.get(unit)) is not None:
            return stage
        for v in unit.reads:
            if (result := self.cotangents.get(v)) in self.stage:
                self.stage[v] = self.stage[result]
        staged = [v for v in unit.reads if v in self.stage]
        if not staged:
            return None if unit.is_pure else 0
        gradients = [v for v in staged if v in self.gradients]
        saved = [v for v in staged if v not in self.gradients]
        if unit.backward and saved:
            common = set.intersection(*(self.has[v] for v in saved)) or self.has[max(saved, key=_bytes)]
            near = [v for v in gradients if self.stage[v] in common]
            return self._most(near) if near else max(common)
        if unit.backward or gradients:
            return self._most(staged)
        return max(self.stage[v] for v in staged)

    def _most(self, values: Iterable[Var]) -> int:
        """Returns the stage of most bytes, the first of equal ones."""
        counts = Counter[int]()
        for v in values:
            counts[self.stage[v]] += _bytes(v)
        return min(counts, key=lambda stage: (-counts[stage], stage))


def _bytes(v: Var) -> int:
    return v.nbytes
