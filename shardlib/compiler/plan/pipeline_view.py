"""The pipeline of a plan: the work, the memory and the messages of its stages, and their timetable, as text."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardlib.compiler.simulate.simulated import clock
from shardlib.compiler.stages.explain_cut import Partition
from shardlib.compiler.stages.timetable import Timetable
from shardlib.core.text_tables import format_si, format_table


@dataclass(frozen=True)
class StageView:
    """One stage: figures of its fullest device for one step.

    `modules` run there in the forward pass, `parameters` counts elements of whole tensors, and `parameter_bytes` those
    of one device. `seconds` are the work of all fragments, `idle` the waiting between the first and the last fragment
    of all stages, `before` and `after` the seconds of what belongs to no fragment, such as the optimizer. `live` is the
    largest number of microbatches (of chunks) that wait for their backward pass at once.
    """

    stage: int
    modules: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    flops: float
    seconds: float
    idle: float
    before: float
    after: float
    peak_memory: int
    live: int


@dataclass(frozen=True)
class CrossingView:
    """The values that one stage sends to another: messages, and bytes that each of its devices sends.

    A value that is sent once per step (`per_step`) belongs to no microbatch: a tied parameter, the sum of its
    gradients, a norm.
    """

    sender: int
    receiver: int
    values: tuple[str, ...]  # of one microbatch
    per_microbatch: tuple[int, int]  # messages, bytes
    per_step: tuple[int, int]
    total: tuple[int, int]


@dataclass(frozen=True)
class TiedView:
    """A parameter that stages read which do not own it: `owner` sends its value, `messages` times per step."""

    name: str
    owner: int
    readers: tuple[int, ...]
    messages: int
    bytes: int

    def __str__(self) -> str:
        others = ", ".join(map(str, self.readers))
        return (
            f"{self.name} lives on stage {self.owner} and travels to stage{'s' * (len(self.readers) > 1)} {others}: "
            f"{_messages(self.messages, self.bytes)} per step"
        )


@dataclass(frozen=True)
class PipelineView:
    """The stages of a plan, the messages between them, and the timetable of their fragments.

    `seconds` are those of a step: what runs in front of all fragments, the timetable, and what runs behind them.
    `partition` has the reasons of an automatic cut. Without one, the code names the stages (`is_named`), or each module
    runs on the stage where its parameters live.

    Example:
        >>> import torch, shardlib as sl
        >>> def f(x, v, w):
        ...     with sl.stage(0):
        ...         x = torch.relu(x @ v)
        ...     with sl.stage(1):
        ...         return (x @ w).sum()
        >>> with sl.Mesh.abstract(stage=2, stages="stage"):
        ...     plan = sl.jit(f).plan(torch.empty(4, 2), torch.empty(2, 3), torch.empty(3, 1))
        >>> [(x.sender, x.receiver, x.total) for x in plan.pipeline.crossings]
        [(0, 1, (1, 48))]
    """

    schedule: str
    microbatches: int
    chunks: int
    stages: tuple[StageView, ...]
    crossings: tuple[CrossingView, ...]
    tied: tuple[TiedView, ...]
    seconds: float
    timetable: Timetable
    partition: Partition | None
    is_named: bool

    @property
    def bubble(self) -> float:
        """The part of all stages' time, from the first fragment to the last, in which they wait."""
        return self.timetable.bubble

    @property
    def slowest(self) -> StageView:
        """The stage with most work."""
        return max(self.stages, key=lambda s: s.before + s.seconds + s.after)

    @property
    def fullest(self) -> StageView:
        """The stage with the highest peak of memory."""
        return max(self.stages, key=lambda s: s.peak_memory)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws stages against time into a file, in the format of its suffix; see `Timetable.plot`."""
        self.timetable.plot(path)

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace that Perfetto opens, with a track per stage (JSON of trace events)."""
        self.timetable.to_perfetto(path)

    @property
    def heading(self) -> str:
        """`2 stages, 4 microbatches, schedule 1f1b: 3.2 ms per step, bubble 20.0%`, as simulated."""
        parts = f" with {self.chunks} parts of the model each" * (self.chunks > 1)
        cut = (
            f"{self.microbatches} microbatches, schedule {self.schedule}"
            if self.microbatches > 1
            else "no microbatches"
        )
        return (
            f"{len(self.stages)} stages{parts}, {cut}: {clock(self.seconds)} per step, bubble {self.bubble:.1%} "
            "(simulated)"
        )

    def brief(self) -> list[str]:
        """Returns the lines that the text of a plan has on its pipeline."""
        slowest, fullest = self.slowest, self.fullest
        each = [sum(x.per_microbatch[i] for x in self.crossings) for i in (0, 1)]
        once = [sum(x.per_step[i] for x in self.crossings) for i in (0, 1)]
        return [
            self.heading,
            f"slowest: stage {slowest.stage}, {clock(slowest.seconds)} of work, {clock(slowest.idle)} idle",
            f"fullest: stage {fullest.stage}, peak memory {format_si(fullest.peak_memory, 'B')}, "
            f"{fullest.live} live microbatch{'es' * (fullest.live != 1)}",
            f"between stages: {_messages(*each)} per microbatch, {_messages(*once)} per step",
            *(f"tied: {x}" for x in self.tied[:2]),
            f"cut: {self._reason.splitlines()[0]}",
        ]

    @property
    def _reason(self) -> str:
        if self.partition is not None:
            return f"automatic: {self.partition}"
        return "named by the code" if self.is_named else "follows the stages where parameters live"

    def __str__(self) -> str:
        head = ("stage", "modules", "parameters", "", "FLOPs", "work", "idle", "otherwise", "peak memory", "live")
        rows = [head, *(_row(s) for s in self.stages)]
        sent = [_crossing(x) for x in self.crossings]
        tied = [f"tied: {x}" for x in self.tied]
        return "\n".join(
            [self.heading, *format_table(rows), *format_table(sent), *tied, f"cut: {self._reason}", str(self.timetable)]
        )

    __repr__ = __str__


def _row(s: StageView) -> tuple[str, ...]:
    return (
        str(s.stage),
        ", ".join(s.modules),
        format_si(s.parameters, "").rstrip(),
        format_si(s.parameter_bytes, "B"),
        format_si(s.flops, "FLOP"),
        clock(s.seconds),
        clock(s.idle),
        clock(s.before + s.after),
        format_si(s.peak_memory, "B"),
        str(s.live),
    )


def _crossing(x: CrossingView) -> tuple[str, ...]:
    names = ", ".join(x.values[:_SHOWN]) + (f" and {len(x.values) - _SHOWN} more" if len(x.values) > _SHOWN else "")
    each = f"{_messages(*x.per_microbatch)} per microbatch ({names})" if x.values else ""
    once = f"{_messages(*x.per_step)} per step" if x.per_step[0] else ""
    return f"stage {x.sender} -> {x.receiver}", ", ".join(filter(None, (each, once))), f"in all {_messages(*x.total)}"


def _messages(count: int, nbytes: int) -> str:
    return f"{count} message{'s' * (count != 1)} ({format_si(nbytes, 'B')})"


_SHOWN = 3  # names of values
