"""Walks a program step by step on the clock of a machine.

One device represents all, the fullest and the slowest. Its calls run in order on one stream. Messages run in order on a
stream per link (inside the node, between nodes, to the host's memory). A message begins at its `Start`; its `Wait`
blocks the calls until it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shardlib.compiler.program.buffers import alive
from shardlib.compiler.program.steps import TIERS, Collective, Compute, Copy, Program, Start, Step, Var, Wait
from shardlib.compiler.simulate import rooflines
from shardlib.compiler.simulate.collectives import transfer
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Line
from shardlib.sharding.mesh.machine import Machine

COMPUTE, NEAR, FAR, HOST = "compute", "inside the node", "between nodes", "copies to and from the host"
STREAMS = COMPUTE, NEAR, FAR, HOST


@dataclass(frozen=True, eq=False)
class Event:
    """One call or message on a stream, from `start` to `end` (seconds), that began when event `after` had ended."""

    stream: str
    name: str
    start: float
    end: float
    step: Step
    after: Event | None = field(default=None, repr=False)  # a chain back to the first event

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def line(self) -> Line | None:
        """The user's line."""
        step = self.step.first if isinstance(self.step, Start) else self.step
        return step.line if isinstance(step, Compute | Collective) else None


@dataclass(frozen=True, eq=False)
class Timeline:
    """Events in program order; `memory` pairs a time with the bytes in use from then on; `waits` are seconds that calls
    waited for each message."""

    events: tuple[Event, ...]
    waits: Mapping[Start, float]
    memory: tuple[tuple[float, int], ...]

    @property
    def exposed(self) -> float:
        """Seconds that calls waited for messages."""
        return sum(self.waits.values())

    @property
    def seconds(self) -> float:
        return max((e.end for e in self.events), default=0.0)

    @cached_property
    def message_seconds(self) -> Mapping[Start, float]:
        """Seconds that each message takes."""
        return {e.step: e.seconds for e in self.events if isinstance(e.step, Start)}

    def busy(self, stream: str) -> float:
        """Returns the seconds in which a stream is busy."""
        return sum(e.seconds for e in self.events if e.stream == stream)

    def critical(self) -> tuple[Event, ...]:
        """Returns the chain of events that ends last; each waited for the one before."""
        chain: list[Event] = []
        event = max(self.events, key=lambda e: e.end, default=None)
        while event is not None:
            chain.append(event)
            event = event.after
        return tuple(reversed(chain))


def refuse_other_axes(program: Program, machine: Machine) -> None:
    """Raises `ShardingError` if the machine has links for axes that the program's mesh does not have."""
    if faults := machine.faults(program.mesh.shape):
        remedy = "name axes of the mesh in Machine(links={...})"
        raise ShardingError(f"{program.mesh} cannot be simulated on this machine", faults, remedy=remedy)


def timeline(program: Program, machine: Machine, *, fused: bool = False) -> Timeline:
    """Runs a program on the clock of a machine; `fused` treats successive pointwise calls as one kernel."""
    return _Clock(program, machine, fused).run()


class _Clock:
    def __init__(self, program: Program, machine: Machine, fused: bool) -> None:
        self.program, self.machine = program, rooflines.slowest(machine, program.mesh.size)
        self.costs = rooflines.fused(program) if fused else rooflines.plain(program)
        self.last: dict[str, Event] = {}  # of each stream
        self.flying: dict[Var, Event] = {}
        self.waited: Event | None = None  # what the next call waits for
        self.events: list[Event] = []
        self.waits: dict[Start, float] = {}

    def run(self) -> Timeline:
        memory = []
        for step, held in zip(self.program.steps, alive(self.program), strict=True):
            self._take(step)
            memory.append((self.now, held))
        return Timeline(tuple(self.events), self.waits, tuple(memory))

    def _take(self, step: Step) -> None:
        device = self.machine.device
        if isinstance(step, Compute):
            if seconds := rooflines.seconds(step, self.costs[step], device):
                self._add(COMPUTE, called(step), step, seconds)
        elif isinstance(step, Copy):
            self._add(COMPUTE, "copy", step, max(2 * step.source.nbytes / device.bandwidth, device.launch))
        elif isinstance(step, Start):
            self._start(step)
        elif isinstance(step, Wait):
            message = max((self.flying.pop(out) for out in step.outs), key=lambda e: e.end)
            if message.end > self.now:
                assert isinstance(message.step, Start)
                self.waits[message.step] = message.end - self.now
                self.waited = message

    def _start(self, step: Start) -> None:
        first, device = step.first, self.machine.device
        if first.kind in TIERS:
            self._fly(step, HOST, first.kind, device.launch + sum(c.source.nbytes for c in step.moves) / device.host)
            return
        span = self.machine.span(first.axes, self.program.mesh.shape)
        how = transfer(first.kind, sum(c.bytes for c in step.moves), span)
        name = f"{first.kind}[{' '.join(map(str, first.axes))}] by {how.algorithm}"
        self._fly(step, FAR if how.far else NEAR, name, how.seconds)

    def _fly(self, step: Start, stream: str, name: str, seconds: float) -> None:
        if not self.machine.device.overlaps:
            stream = COMPUTE
            self.waits[step] = seconds
        event = self._add(stream, name, step, seconds)
        self.flying |= dict.fromkeys(step.outs, event)

    def _add(self, stream: str, name: str, step: Step, seconds: float) -> Event:
        """Adds an event to a stream, after its last one and after the messages that calls have waited for."""
        before = [e for e in (self.last.get(stream), self.last.get(COMPUTE), self.waited) if e is not None]
        after = max(before, key=lambda e: e.end, default=None)
        start = 0.0 if after is None else after.end
        event = self.last[stream] = Event(stream, name, start, start + seconds, step, after)
        self.events.append(event)
        return event

    @property
    def now(self) -> float:
        """The time at which the next call can run."""
        return max((e.end for e in (self.last.get(COMPUTE), self.waited) if e is not None), default=0.0)


def called(step: Compute) -> str:
    """Returns the name of a step's op."""
    return str(getattr(step.target, "__name__", step.target)).split(".")[0].strip("_")
