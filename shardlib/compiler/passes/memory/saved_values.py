"""Analyzes the memory that forward passes make and backward passes read.

A program may alternate between forward and backward (microbatches, gradient penalties). A *turn* is a run of steps in
one direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardlib.compiler.passes.split_backward import gives
from shardlib.compiler.program.buffers import owners
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, reads
from shardlib.compiler.program.value_numbering import firsts


@dataclass(frozen=True)
class Crossing:
    """The owner of each value's memory, the step that makes it (for a message, its start), and each step's direction.

    `turn` has the number of each step's turn; `back` is True for the steps of backward turns.
    """

    program: Program
    owner: Mapping[Var, Var]
    maker: Mapping[Var, int]
    turn: Sequence[int]
    back: Sequence[bool]

    @staticmethod
    def analyze(program: Program) -> Crossing:
        maker: dict[Var, int] = {}
        turn: list[int] = []
        back: list[bool] = []
        constant = {v for v, _ in program.captured}
        now, n = False, 0
        for i, step in enumerate(program.steps):
            if isinstance(step, Compute) and constant.issuperset(step.operands):
                constant.update(step.out_vars)  # belongs to no direction
            elif isinstance(step, Compute | Start):
                is_back = step.backward if isinstance(step, Compute) else step.first.backward
                now, n = is_back, n + (is_back is not now)
            maker |= dict.fromkeys(() if isinstance(step, Wait) else gives(step), i)
            turn.append(n)
            back.append(now)
        return Crossing(program, owners(program.steps, exact=True), maker, tuple(turn), tuple(back))

    @cached_property
    def first(self) -> Mapping[Var, Var]:
        """Maps each value to the first equal one."""
        return firsts(self.program)

    @cached_property
    def shown(self) -> Mapping[Var, Sequence[Var]]:
        """Maps each memory that a step makes to the values that have it, in order."""
        shown: dict[Var, list[Var]] = defaultdict(list)
        for v in self.maker:
            shown[self.owner[v]].append(v)
        return shown

    @cached_property
    def readers(self) -> Mapping[Var, Sequence[int]]:
        """Maps each memory to the steps that read it."""
        readers: dict[Var, list[int]] = defaultdict(list)
        for i, step in enumerate(self.program.steps):
            for owner in dict.fromkeys(self.owner.get(v, v) for v in reads(step)):
                readers[owner].append(i)
        return readers

    @cached_property
    def held(self) -> tuple[Var, ...]:
        """Memory made by forward steps and read by backward steps, in the order of its makers."""
        return tuple(o for o in self.droppable if any(self.back[i] for i in self.readers[o]))

    @cached_property
    def droppable(self) -> Mapping[Var, None]:
        """Memory made by forward steps that may be dropped at the end of the turn, and recomputed."""
        results = {self.owner.get(v, v) for v in self.program.results}
        return dict.fromkeys(o for o in self.shown if o not in results and self._may_go(o))

    @cached_property
    def weights(self) -> frozenset[Var]:
        """Droppable memory of gathered inputs, or of values computed from one gathered input."""
        gathered: dict[Var, bool] = dict.fromkeys(self.program.inputs, False)
        for step in self.program.steps:
            sources = set(reads(step))
            if len(sources) == 1 and sources <= gathered.keys():
                gathered |= dict.fromkeys(gives(step), isinstance(step, Start) or gathered[sources.pop()])
        return frozenset(o for o in self.droppable if gathered.get(o))

    def _may_go(self, owner: Var) -> bool:
        at = self.maker.get(owner, -1)
        if at < 0 or self.back[at] or not is_repeatable(self.program.steps[at]):
            return False
        return all(self.back[i] or self.turn[i] == self.turn[at] for i in self.readers[owner])


def is_repeatable(step: Step) -> bool:
    """Returns whether a step may run again."""
    return step.is_pure and not step.over if isinstance(step, Compute) else isinstance(step, Start)
