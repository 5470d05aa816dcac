"""The candidates under a budget of memory, and the programs that are made of choices among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import cached_property
from typing import NamedTuple

from shardlib.compiler.passes.memory.layer_bounds import boundaries, frontier, key
from shardlib.compiler.passes.memory.memory_levels import Levels, Trip, trips
from shardlib.compiler.passes.memory.remat import remade
from shardlib.compiler.passes.memory.saved_values import Crossing
from shardlib.compiler.program.buffers import peak_bytes
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, reads
from shardlib.compiler.simulate import rooflines
from shardlib.compiler.simulate.collectives import transfer
from shardlib.compiler.simulate.timeline import COMPUTE, Timeline, timeline
from shardlib.sharding.mesh.machine import Machine

KEPT, DROPPED, MOVED = "kept", "dropped", "moved"
_HIDDEN = 0.02  # of the time of messages and copies, which counts also where they are hidden

Finish = Callable[[Program, float | None, Collection[Var]], Program]  # a program after all later passes, within so many
# bytes, with such values in the host's memory meanwhile


class Choice(NamedTuple):
    """The memory that is dropped and recomputed, and what waits in the host's memory; all else is kept."""

    dropped: frozenset[Var] = frozenset()
    moved: frozenset[Var] = frozenset()

    def put(self, values: Collection[Var], way: str) -> Choice:
        """The same, in which these values are `"kept"`, `"dropped"` or `"moved"`."""
        dropped, moved = self.dropped.difference(values), self.moved.difference(values)
        if way == KEPT:
            return Choice(dropped, moved)
        return Choice(dropped.union(values), moved) if way == DROPPED else Choice(dropped, moved.union(values))

    def way(self, value: Var) -> str:
        """How it treats a value."""
        return DROPPED if value in self.dropped else MOVED if value in self.moved else KEPT

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that are copied, and that are recomputed."""
        return sum(v.nbytes for v in self.moved), sum(v.nbytes for v in self.dropped)


class Trial(NamedTuple):
    """The peak of a program, and its seconds."""

    peak: int
    seconds: float


class Candidates:
    """The values that may be given up, each in one or two `ways`, and the programs of choices among them, after all
    passes, with their peaks and seconds."""

    def __init__(
        self,
        crossing: Crossing,
        budget: int,
        finish: Finish,
        machine: Machine,
        fixed: Collection[Var] = (),
        movable: Collection[Var] = (),
    ) -> None:
        self.crossing, self.budget, self.finish = crossing, budget, finish
        self.machine = rooflines.slowest(machine, crossing.program.mesh.size)
        self.layers = boundaries(crossing)
        held = {*crossing.held} | {o for i in self.layers for o in frontier(crossing, i)}
        ways: dict[Var, tuple[str, ...]] = {o: (DROPPED,) for o in crossing.droppable if o in held and o not in fixed}
        for o in movable:
            if o not in fixed and o in crossing.maker:
                ways[o] = (*ways.get(o, ()), MOVED)
        self.ways = ways
        self.base = Choice(frozenset(o for o in crossing.droppable if o not in held and o not in fixed))
        self.seconds = [_seconds(step, crossing.program, self.machine) for step in crossing.program.steps]
        self.tried: dict[Choice, Trial] = {}
        self.programs: dict[tuple[Choice, float], tuple[Program, Timeline]] = {}

    # Programs -------------------------------------------------------------------------------------------------------

    def program(self, choice: Choice, room: float) -> tuple[Program, Timeline]:
        """The program of a choice, whose messages run ahead as far as so many bytes allow, and its simulation."""
        if self.is_free(choice):
            room = math.inf
        if (choice, room) not in self.programs:
            program = self.finish(remade(self.crossing, choice.dropped), room, choice.moved)
            self.programs[choice, room] = program, timeline(program, self.machine)
        return self.programs[choice, room]

    def is_free(self, choice: Choice) -> bool:
        """Whether a program fits, as far as is known, whose messages run ahead as far as they may."""
        free = self.programs.get((choice, math.inf))
        return free is not None and peak_bytes(free[0]) <= self.budget

    def of(self, choice: Choice) -> Trial:
        """What the program of a choice takes within the budget."""
        if choice not in self.tried:
            program, line = self.program(choice, self.budget)
            sent = sum(event.seconds for event in line.events if event.stream != COMPUTE)
            self.tried[choice] = Trial(peak_bytes(program), line.seconds + _HIDDEN * sent)
        return self.tried[choice]

    def fits(self, choice: Choice) -> bool:
        """Whether the program of a choice is within the budget."""
        return self.of(choice).peak <= self.budget

    @property
    def best(self) -> Choice | None:
        """The fastest that fits, and of equal ones that which copies and recomputes least; None if none fits."""
        cost = lambda choice: (self.of(choice).seconds, *choice.nbytes)
        return min(filter(self.fits, self.tried), key=cost, default=None)

    @cached_property
    def all_moved(self) -> Choice:
        """All values in the host's memory that may be there."""
        return self.base.put([o for o, ways in self.ways.items() if MOVED in ways], MOVED)

    @cached_property
    def trips(self) -> Mapping[Var, Trip]:
        """Where each value leaves, and returns, if all are in the host's memory that may be there."""
        return trips(self.program(self.all_moved, math.inf)[0], self.crossing)

    @cached_property
    def groups(self) -> list[list[Var]]:
        """Equal values of equal layers."""
        groups: dict[Hashable, list[Var]] = {}
        count: dict[Hashable, int] = {}
        ends, layer = iter([*self.layers, len(self.crossing.program.steps)]), 0
        end = next(ends)
        for o in sorted(self.ways, key=self.crossing.maker.__getitem__):
            at = self.crossing.maker[o]
            while at >= end:
                end, layer = next(ends), layer + 1
            alike = key(self.crossing.program.steps[at]), o.dtype, o.nbytes, self.ways[o]
            n = count[layer, alike] = count.get((layer, alike), 0) + 1
            groups.setdefault((alike, n), []).append(o)
        return [*groups.values()]

    # Estimates ------------------------------------------------------------------------------------------------------

    def levels(self, choice: Choice, room: float) -> Levels:
        """The bytes in use at each step of the program of a choice."""
        return Levels.of(*self.program(choice, room), self.crossing, self.trips)

    def estimate(self, choice: Choice, waits: Mapping[Var, float]) -> float:
        """Seconds of the steps that run again, and of the waits for copies."""
        again = set[int]()
        for o in choice.dropped - self.base.dropped:
            self.repeat(o, choice, again)
        return sum(self.seconds[i] for i in again) + sum(self.wait(o, waits) for o in choice.moved)

    def wait(self, o: Var, waits: Mapping[Var, float]) -> float:
        """Seconds that calls wait for copies of a value, in a program that moves it, else in the one that moves all."""
        return waits[o] if o in waits else self._waits.get(o, 0.0)

    @cached_property
    def _waits(self) -> Mapping[Var, float]:
        return self.levels(self.all_moved, math.inf).waits

    def repeat(self, owner: Var, choice: Choice, again: set[int]) -> float:
        """Add the steps that run once more for a dropped value to those that do, and return their seconds."""
        todo, seconds = [owner], 0.0
        while todo:
            if (i := self.crossing.maker[todo.pop()]) not in again:
                again.add(i)
                seconds += self.seconds[i]
                owners = (self.crossing.owner.get(v, v) for v in reads(self.crossing.program.steps[i]))
                todo += [o for o in owners if o in choice.dropped]
        return seconds


def _seconds(step: Step, program: Program, machine: Machine) -> float:
    if isinstance(step, Compute):
        touched = rooflines.touched(step)
        return rooflines.seconds(step, rooflines.Cost(touched, bool(touched or step.flops)), machine.device)
    if isinstance(step, Start):
        span = machine.span(step.first.axes, program.mesh.axes)
        return transfer(step.first.kind, sum(c.bytes for c in step.moves), span).seconds
    return 0.0
