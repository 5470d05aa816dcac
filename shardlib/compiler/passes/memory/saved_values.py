"""What the forward passes of a program make and its backward passes read: memory that is held in between.

A program goes back and forth (micro-batches, penalties on gradients): a *turn* is a stretch of steps in one direction.
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
    """Whose memory a value has (`owner`), which step makes it (`maker`; a message, where it starts), and for every step
    its turn and whether that goes back."""

    program: Program
    owner: Mapping[Var, Var]
    maker: Mapping[Var, int]
    turn: Sequence[int]
    back: Sequence[bool]

    @staticmethod
    def of(program: Program) -> Crossing:
        maker: dict[Var, int] = {}
        turn: list[int] = []
        back: list[bool] = []
        constant = {v for v, _ in program.captured}
        now, n = False, 0
        for i, step in enumerate(program.steps):
            if isinstance(step, Compute) and constant.issuperset(step.operands):
                constant.update(step.made)  # belongs to no direction
            elif isinstance(step, Compute | Start):
                is_back = step.backward if isinstance(step, Compute) else step.first.backward
                now, n = is_back, n + (is_back is not now)
            maker |= dict.fromkeys(() if isinstance(step, Wait) else gives(step), i)
            turn.append(n)
            back.append(now)
        return Crossing(program, owners(program.steps, exact=True), maker, tuple(turn), tuple(back))

    @cached_property
    def first(self) -> Mapping[Var, Var]:
        """For each value the first that is the same."""
        return firsts(self.program)

    @cached_property
    def shown(self) -> Mapping[Var, Sequence[Var]]:
        """For each memory that a step makes, the values that show it, in order."""
        found: dict[Var, list[Var]] = defaultdict(list)
        for v in self.maker:
            found[self.owner[v]].append(v)
        return found

    @cached_property
    def readers(self) -> Mapping[Var, Sequence[int]]:
        """For each memory, the steps that read it."""
        found: dict[Var, list[int]] = defaultdict(list)
        for i, step in enumerate(self.program.steps):
            for owner in dict.fromkeys(self.owner.get(v, v) for v in reads(step)):
                found[owner].append(i)
        return found

    @cached_property
    def held(self) -> tuple[Var, ...]:
        """The memory that steps back read, of what was made going forward, as it is made."""
        return tuple(o for o in self.droppable if any(self.back[i] for i in self.readers[o]))

    @cached_property
    def droppable(self) -> Mapping[Var, None]:
        """The memory of what is made going forward that may be given up at the end of that turn, and made again."""
        results = {self.owner.get(v, v) for v in self.program.results}
        return dict.fromkeys(o for o in self.shown if o not in results and self._may_go(o))

    @cached_property
    def weights(self) -> frozenset[Var]:
        """Of what may go, what is gathered of one input, as it is or element by element."""
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
    """Returns whether a step may be done again."""
    return step.is_pure and not step.over if isinstance(step, Compute) else isinstance(step, Start)
