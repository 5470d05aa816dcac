"""The results of a simulation: seconds, exposed communication, memory, utilization, critical path; text and plots."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from shardlib.compiler.program.steps import Compute, Program
from shardlib.compiler.program.value_numbering import firsts
from shardlib.compiler.simulate import rooflines
from shardlib.compiler.simulate.perfetto import Span, write_trace
from shardlib.compiler.simulate.timeline import COMPUTE, STREAMS, Event, Timeline, refuse_other_axes, timeline
from shardlib.core.plots import new_figure
from shardlib.core.source_lines import format_path_line
from shardlib.sharding.mesh.machine import Machine


@dataclass(frozen=True)
class Utilization:
    """Shares of the time that a device would need for the FLOPs at its peak rate.

    `model` counts the model's FLOPs (6 per parameter and token, and attention), `hardware` also recomputed ones (8 per
    parameter and token under full recomputation). Source: Chowdhery et al., "PaLM" (2022).
    """

    model: float
    hardware: float


class Simulated:
    """An estimate of one call of a program on a machine; nothing ran or was measured.

    The program of a stage waits `idle` seconds for other stages; `peak` are the bytes in use on the fullest of them.
    """

    def __init__(
        self, program: Program, name: str, machine: Machine, *, fused: bool = False, idle: float = 0.0, peak: int = 0
    ) -> None:
        refuse_other_axes(program, machine)
        self.program, self.name, self.machine, self.fused = program, name, machine, fused
        self.idle, self.peak = idle, peak

    @cached_property
    def timeline(self) -> Timeline:
        """All events, and the memory in use."""
        return timeline(self.program, self.machine, fused=self.fused)

    @property
    def seconds(self) -> float:
        """Seconds of the call."""
        return self.timeline.seconds + self.idle

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return self.timeline.exposed

    @cached_property
    def peak_memory(self) -> int:
        """The most bytes in use at once on the fullest device."""
        levels = [held for _, held in self.timeline.memory] or [sum(v.nbytes for v in self.program.entry_values)]
        return max(self.peak, *levels)

    @cached_property
    def utilization(self) -> Utilization:
        """Shares of the device's peak rate, in both conventions."""
        again = _find_recomputed(self.program)
        peak = self.machine.device.efficiency
        work = {s: rooflines.arithmetic(s, self.machine.device) for s in self.program.steps if isinstance(s, Compute)}
        total = sum(work.values()) * peak
        once = total - sum(work[s] for s in again) * peak
        return Utilization(once / self.seconds, total / self.seconds) if self.seconds else Utilization(0.0, 0.0)

    @property
    def critical_path(self) -> tuple[Event, ...]:
        """The events that wait for each other up to the end, in order."""
        return self.timeline.critical()

    def __str__(self) -> str:
        line = self.timeline
        streams = [(s, line.busy(s)) for s in STREAMS]
        rows = [("step", f"{clock(self.seconds)}, of which communication is exposed for {clock(self.exposed)}")]
        rows += [(stream, f"{clock(seconds)} busy") for stream, seconds in streams if seconds]
        rows += [("other stages", f"{clock(self.idle)} waited for")] if self.idle else []
        use, memory = self.utilization, self.machine.device.memory
        rows.append(("utilization", f"{use.model:.1%} of the peak rate, {use.hardware:.1%} with what is done again"))
        rows.append(("peak memory", f"{self.peak_memory / 2**30:.3g} GiB of {memory / 2**30:.3g} GiB"))
        ways: defaultdict[str, float] = defaultdict(float)
        for event in self.critical_path:
            ways[f"{event.name} at {format_path_line(event.line)}" if event.stream != COMPUTE else COMPUTE] += (
                event.seconds
            )
        longest = sorted(ways.items(), key=lambda way: -way[1])[:_SHOWN]
        rows += [("critical path" if i == 0 else "", f"{clock(s)} {label}") for i, (label, s) in enumerate(longest)]
        width = max(len(head) for head, _ in rows)
        head = f"{self.name} on {self.program.mesh}, machine {self.machine}: simulated, not measured"
        return "\n".join([head, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    __repr__ = __str__

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write a timeline that Perfetto opens (JSON of trace events): a track a stream, memory in use as a counter."""
        name = f"{self.name} on {self.program.mesh} ({self.machine}), simulated"
        spans = (
            Span(e.stream, e.name, e.start, e.seconds, {"line": format_path_line(e.line)}) for e in self.timeline.events
        )
        write_trace(path, name, STREAMS, spans, self.timeline.memory)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw streams and memory over time into a file that matplotlib knows by its ending (`.png`, `.svg`)."""
        figure = new_figure(10, 4)
        above, below = figure.subplots(2, 1, sharex=True)
        streams = [s for s in STREAMS if self.timeline.busy(s)]
        for row, stream in enumerate(streams):
            bars = [(1e3 * e.start, 1e3 * e.seconds) for e in self.timeline.events if e.stream == stream]
            above.broken_barh(bars, (row - 0.4, 0.8), color=f"C{row}")
        above.set_yticks(range(len(streams)), streams)
        above.set_title(f"{self.name} on {self.program.mesh} ({self.machine}), simulated")
        below.step(
            [1e3 * t for t, _ in self.timeline.memory], [m / 2**30 for _, m in self.timeline.memory], where="post"
        )
        below.set_xlabel("ms")
        below.set_ylabel("GiB in use")
        figure.savefig(os.fspath(path))


_SHOWN = 4  # lines of the critical path


def _find_recomputed(program: Program) -> set[Compute]:
    """Returns the calls of the backward pass that repeat one of the forward pass, in a checkpoint or by `remat`."""
    first = firsts(program)
    calls = (s for s in program.steps if isinstance(s, Compute) and s.backward and s.flops)
    return {s for s in calls if s.out_vars and all(first[v] is not v for v in s.out_vars)}


def clock(seconds: float) -> str:
    """Formats a duration: `1.23 ms`, `65.4 s`."""
    seconds = float(f"{seconds:.3g}")  # 0.99999 ms is 1 ms
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
