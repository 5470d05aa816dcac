"""Builds and simulates the programs that a memory budget chooses among."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, Protocol

from shardlib.compiler.passes.memory.layer_bounds import boundaries, frontier, key
from shardlib.compiler.passes.memory.memory_levels import Levels, Trip, original, trips
from shardlib.compiler.passes.memory.remat import remade
from shardlib.compiler.passes.memory.saved_values import Crossing
from shardlib.compiler.program.buffers import alive, largest, peak_bytes
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, reads
from shardlib.compiler.schedule_options import AHEAD
from shardlib.compiler.simulate import rooflines
from shardlib.compiler.simulate.collectives import transfer
from shardlib.compiler.simulate.timeline import COMPUTE, Timeline, timeline
from shardlib.sharding.mesh.machine import Machine

WAYS = AHEAD[1:]  # distances of messages that are tried; rows in parts are too slow to plan
KEPT, DROPPED, MOVED = "kept", "dropped", "moved"
_HIDDEN = 0.02  # fraction of the time of messages and copies that counts even if they are hidden


class Finish(Protocol):
    """Runs all later passes with a memory limit, offloaded values, and messages `ahead` so far."""

    def __call__(
        self, program: Program, memory: float | None, moved: Collection[Var], ahead: str | None = None, /
    ) -> Program: ...


class Choice(NamedTuple):
    """The memory that is recomputed, and the memory that is offloaded; all other is kept."""

    dropped: frozenset[Var] = frozenset()
    moved: frozenset[Var] = frozenset()

    def put(self, values: Collection[Var], way: str) -> Choice:
        """Returns the choice in which these values are `"kept"`, `"dropped"` or `"moved"`."""
        dropped, moved = self.dropped.difference(values), self.moved.difference(values)
        if way == KEPT:
            return Choice(dropped, moved)
        return Choice(dropped.union(values), moved) if way == DROPPED else Choice(dropped, moved.union(values))

    def way(self, value: Var) -> str:
        """Returns the way a value is treated."""
        return DROPPED if value in self.dropped else MOVED if value in self.moved else KEPT

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that are copied, and bytes that are recomputed."""
        return sum(v.nbytes for v in self.moved), sum(v.nbytes for v in self.dropped)


class Trial(NamedTuple):
    """The peak of a program in bytes, and its seconds."""

    peak: int
    seconds: float


class Candidates:
    """The values that may be dropped or offloaded (`ways`), and the finished programs of choices with their trials."""

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
        self.owner: dict[str, Var | None] = {v.name: o for o, values in crossing.shown.items() for v in values}
        self._levels: dict[tuple[Choice, str], Levels] = {}
        self._copies: dict[str, tuple[Mapping[Var, Trip], Mapping[Var, float]]] = {}
        self._last: tuple[frozenset[Var], Program] | None = None
        self.tried: dict[tuple[Choice, str], Trial] = {}
        self.programs: dict[tuple[Choice, str], tuple[Program, Timeline]] = {}

    # Programs -------------------------------------------------------------------------------------------------------

    def program(self, choice: Choice, ahead: str) -> tuple[Program, Timeline]:
        """Returns the program of a choice and its simulation."""
        if (choice, ahead) not in self.programs:
            program = self.finish(self._remade(choice.dropped), self.budget, choice.moved, ahead)
            self.programs[choice, ahead] = program, timeline(program, self.machine)
        return self.programs[choice, ahead]

    def _remade(self, dropped: frozenset[Var]) -> Program:
        if self._last is None or self._last[0] != dropped:
            self._last = dropped, remade(self.crossing, dropped)
        return self._last[1]

    def trial(self, choice: Choice, ahead: str) -> Trial:
        """Returns the peak and the seconds of a choice's program."""
        if (choice, ahead) not in self.tried:
            program, line = self.program(choice, ahead)
            sent = sum(event.seconds for event in line.events if event.stream != COMPUTE)
            self.tried[choice, ahead] = Trial(peak_bytes(program), line.seconds + _HIDDEN * sent)
        return self.tried[choice, ahead]

    def furthest_trial(self, choice: Choice) -> Trial:
        """Returns the trial of a choice with messages as far ahead as the budget allows."""
        least = self.trial(choice, WAYS[-1])
        if least.peak > self.budget:
            return least
        fitting = (trial for ahead in WAYS if (trial := self.trial(choice, ahead)).peak <= self.budget)
        return next(fitting)

    @property
    def best(self) -> tuple[Choice, str] | None:
        """The choice and distance of the fastest program that fits; equal ones by fewer copied and recomputed bytes."""
        fitting = [key for key, trial in self.tried.items() if trial.peak <= self.budget]
        cost = lambda key: (self.tried[key].seconds, *key[0].nbytes)
        return min(fitting, key=cost, default=None)

    def excess(self, choice: Choice) -> int:
        """Returns the bytes above the budget, summed over the steps of the program without messages ahead."""
        peak = self.trial(choice, WAYS[-1]).peak
        levels = alive(self.programs[choice, WAYS[-1]][0])
        return sum(size - self.budget for size in levels if size > self.budget) if peak > self.budget else 0

    def in_use(self, choice: Choice, ahead: str) -> dict[Var, None]:
        """Returns the memory in use at the fullest step, itself or a copy of it, the largest first."""
        program, _ = self.program(choice, ahead)
        return {o: None for v in largest(program) if (o := original(v.name, self.owner)) is not None}

    def is_worth(self, choice: Choice, ahead: str) -> bool:
        """Returns whether a program is faster than the best, even if it does not fit."""
        return self.best is None or self.trial(choice, ahead).seconds < self.tried[self.best].seconds

    @cached_property
    def all_moved(self) -> Choice:
        """The choice that offloads every value that it may."""
        return self.base.put([o for o, ways in self.ways.items() if MOVED in ways], MOVED)

    def copies(self, ahead: str) -> tuple[Mapping[Var, Trip], Mapping[Var, float]]:
        """Returns the trip of each value, and the seconds of waits for it, in the program that offloads all it may."""
        if ahead not in self._copies:
            program, line = self.program(self.all_moved, ahead)
            levels = Levels.analyze(program, line, self.owner, {})
            self._copies[ahead] = trips(program, self.crossing, self.owner), levels.waits
        return self._copies[ahead]

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

    def levels(self, choice: Choice, ahead: str) -> Levels:
        """Returns the bytes in use at each step of the program of a choice."""
        if (choice, ahead) not in self._levels:
            trips, waits = self.copies(ahead) if self.all_moved.moved else ({}, {})
            levels = Levels.analyze(*self.program(choice, ahead), self.owner, trips)
            self._levels[choice, ahead] = replace(levels, copies={**waits, **levels.waits})
        return self._levels[choice, ahead]

    def estimate(self, choice: Choice, copies: Mapping[Var, float]) -> float:
        """Returns the seconds of repeated steps, and of waits for copies."""
        waits = (copies.get(o, 0.0) for o in choice.moved)
        return math.fsum([*(self.seconds[i] for i in self.again(choice)), *waits])  # exact in any order

    def again(self, choice: Choice) -> set[int]:
        """Returns the steps that run again."""
        again = set[int]()
        for o in choice.dropped - self.base.dropped:
            self.repeat(o, choice, again)
        return again

    def repeat(self, owner: Var, choice: Choice, again: set[int]) -> float:
        """Adds the steps that a dropped value repeats to `again`; returns the seconds of the new ones."""
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
        span = machine.span(step.first.axes, program.mesh.shape)
        return transfer(step.first.kind, sum(c.bytes for c in step.moves), span).seconds
    return 0.0
