"""Moves calls so that they run while a message is in flight, on the simulated clock of the mesh's machine.

Calls that do not need a message move from behind its wait to the front of it. Calls that the message does not need move
from the front of its start to behind it. No message passes another of its group.
"""

from __future__ import annotations

from dataclasses import replace

from shardlib.compiler.passes.comm.bucket_collectives import GATHERS
from shardlib.compiler.passes.split_backward import gives, needs, stays
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, reads
from shardlib.compiler.simulate import rooflines
from shardlib.compiler.simulate.collectives import Transfer, transfer
from shardlib.core.cached import cache_weakly
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.machine import Machine

WINDOW = 32  # steps around a wait that are searched for work
_SURE = 2  # covers this multiple of a message's seconds, because they are estimates


@cache_weakly
def schedule(program: Program) -> Program:
    """Moves calls beside the messages that they can hide."""
    return replace(program, steps=tuple(_Clock(program).run())) if program.collectives else program


class _Clock:
    """Writes the steps in a new order, and simulates when each runs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.machine = rooflines.slowest(Machine.convert(program.mesh.machine), program.mesh.size)
        device = self.machine.device
        self.seconds = {s: rooflines.seconds(s, cost, device) for s, cost in rooflines.plain(program).items()}
        self.done: set[int] = set()
        self.steps: list[Step] = []
        self.now = 0.0
        self.free: dict[bool, float] = {}  # when each link is free
        self.ends: dict[tuple[Var, ...], float] = {}
        self.before: dict[Start, float] = {}  # when the link of a message was free before it
        self.waits = {step.outs: i for i, step in enumerate(program.steps) if isinstance(step, Wait)}
        self.gathered = {v for s in program.steps if isinstance(s, Start) and s.first.kind in GATHERS for v in s.outs}
        self.stalled = 0  # number of steps before the last wait that took time

    def run(self) -> list[Step]:
        for i in range(len(self.program.steps)):
            if i not in self.done:
                self._take(i)
        return self.steps

    def _take(self, i: int) -> None:
        """Writes a step, and the steps that hide a message."""
        step = self.program.steps[i]
        if isinstance(step, Wait):
            self._cover(i, step)
            if self.ends[step.outs] > self.now:
                self.now, self.stalled = self.ends[step.outs], len(self.steps)
        late = self._behind(i, step) if isinstance(step, Start) else []
        self._put(step)
        self.done.add(i)
        for other in late:
            self._put(other)

    def _put(self, step: Step) -> None:
        self.steps.append(step)
        self.now += self._seconds(step)
        if isinstance(step, Start):
            how = self._transfer(step)
            self.before[step] = self.free.get(how.far, 0.0)
            self.free[how.far] = self.ends[step.outs] = max(self.now, self.before[step]) + how.seconds

    def _transfer(self, step: Start) -> Transfer:
        span = self.machine.span(step.first.axes, self.program.mesh.shape)
        return transfer(step.first.kind, sum(c.bytes for c in step.moves), span)

    def _seconds(self, step: Step) -> float:
        return self.seconds[step] if isinstance(step, Compute) else 0.0

    def _cover(self, i: int, wait: Wait) -> None:
        """Writes steps behind a wait that do not need it, in order, until the message has arrived."""
        end = self.ends[wait.outs]
        until = self.now + _SURE * (end - self.now)
        needed, groups = set(wait.outs), set[tuple[Axis, ...]]()  # values and groups of messages that wait
        for j in range(i + 1, min(i + 1 + WINDOW, len(self.program.steps))):
            step = self.program.steps[j]
            if self.now >= until or stays(step):
                return
            if j in self.done:
                continue
            is_late = isinstance(step, Wait) and self.ends.get(step.outs, end) > self.now
            if isinstance(step, Start):  # an earlier pass decided when gathers start, since they hold memory
                is_late = step.first.axes in groups or step.first.kind in GATHERS
            if is_late or not needed.isdisjoint(needs(step)):
                needed.update(gives(step))
                groups |= {step.first.axes} if isinstance(step, Start) else set()
            else:
                self._take(j)

    def _behind(self, i: int, start: Start) -> list[Step]:
        """Removes written steps that do not lead to a message, to be written behind its start.

        They take about as long as the message. Starts of messages of other groups move along.
        """
        seconds = _SURE * self._transfer(start).seconds
        for k in range(i + 1, self.waits[start.outs]):
            if seconds <= 0:
                return []
            seconds -= 0.0 if k in self.done else self._seconds(self.program.steps[k])
        needed, kept, late = set(start.sources), [start.first.axes], list[Step]()
        held = self.gathered if start.first.kind in GATHERS else set()  # their last readers free them
        for k in range(len(self.steps) - 1, max(self.stalled, len(self.steps) - WINDOW) - 1, -1):
            if seconds <= 0 or stays(step := self.steps[k]):
                break
            may = needed.isdisjoint(gives(step)) and held.isdisjoint(reads(step))
            if may and isinstance(step, Compute):
                seconds -= self._seconds(step)
                self.now -= self._seconds(step)
            elif may and isinstance(step, Start) and step.first.axes not in kept:
                self.free[self._transfer(step).far] = self.before[step]
            else:
                needed.update(needs(step))
                kept += [step.first.axes] if isinstance(step, Start) else []
                continue
            late.append(step)
            del self.steps[k]
        return late[::-1]
