"""The seconds and the memory of each stage's program, after all passes, and the timetable of the fragments that run.

The simulator runs the program of each stage alone. The timetable adds the messages between stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.compiler.program.buffers import peak_bytes
from shardlib.compiler.program.steps import Program
from shardlib.compiler.simulate.collectives import transfer
from shardlib.compiler.simulate.simulated import Simulated
from shardlib.compiler.simulate.timeline import refuse_other_axes, timeline
from shardlib.compiler.stages.fragment_tags import fragment_order, fragments_of
from shardlib.compiler.stages.fragments import Fragment
from shardlib.compiler.stages.staged import Staged
from shardlib.compiler.stages.timetable import Timetable, make_timetable
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.machine import Machine


@dataclass(frozen=True)
class StageTimes:
    """The seconds of a stage's fragments, in the order in which they run, and of its steps `before` and `after` them.

    `peak` are the most bytes in use at once on its fullest device.
    """

    fragments: Mapping[Fragment, float]
    before: float
    after: float
    peak: int

    @property
    def seconds(self) -> float:
        """The seconds of all steps."""
        return self.before + sum(self.fragments.values()) + self.after


def stage_times(staged: Staged, machine: Machine, *, fused: bool = False) -> tuple[StageTimes, ...]:
    """Simulates the program of every stage on a machine; `fused` as in `Plan.simulate`.

    Raises `ShardingError` if the machine has links for axes that the mesh does not have.
    """
    refuse_other_axes(staged.programs[0], machine)
    return tuple(_stage_times(p, staged, machine, fused) for p in staged.programs)


def _stage_times(program: Program, staged: Staged, machine: Machine, fused: bool) -> StageTimes:
    seconds: dict[Fragment, float] = defaultdict(float)
    outside = [0.0, 0.0]  # before and after all fragments
    now = 0.0
    fragments = fragments_of(program.steps, staged.shape)
    order = fragment_order(program.steps, fragments)
    for fragment, (end, _) in zip(fragments, timeline(program, machine, fused=fused).memory, strict=True):
        if fragment is None:
            outside[bool(seconds)] += end - now
        else:
            seconds[fragment] += end - now
        now = end
    before, after = outside
    return StageTimes({f: seconds[f] for f in order}, before, after, peak_bytes(program))


def staged_timetable(staged: Staged, times: Sequence[StageTimes], machine: Machine) -> Timetable:
    """Returns when the fragments run that wait for the messages which the programs send.

    The messages between two fragments fly together: one latency, and the sum of their bytes.
    """
    sent: dict[tuple[Fragment, Fragment], int] = defaultdict(int)
    for m in staged.messages:
        if m.source is not None and m.target is not None:
            sent[m.source, m.target] += m.bytes
    sources: dict[Fragment, list[Fragment]] = defaultdict(list)
    for source, target in sent:
        sources[target].append(source)
    mesh = staged.programs[0].mesh
    span = machine.span([Axis(str(mesh.stage_axis), mesh.stages)], mesh.shape)
    flight = {ends: transfer("ppermute", nbytes, span).seconds for ends, nbytes in sent.items()}
    seconds = {f: s for stage in times for f, s in stage.fragments.items()}
    return make_timetable(
        [tuple(stage.fragments) for stage in times],
        lambda fragment: sources.get(fragment, ()),
        seconds.__getitem__,
        lambda *ends: flight[ends],
    )


def step_seconds(times: Sequence[StageTimes], table: Timetable) -> float:
    """Returns the seconds of a step: those in front of all fragments, the timetable, and those behind all fragments."""
    return max(t.before for t in times) + table.seconds + max(t.after for t in times)


def simulate_stages(staged: Staged, name: str, machine: Machine, *, fused: bool = False) -> Simulated:
    """Estimates a step as its stage with most work sees it: that one waits for the others for the rest of the step."""
    times = stage_times(staged, machine, fused=fused)
    slowest = max(range(len(times)), key=lambda stage: times[stage].seconds)
    idle = step_seconds(times, staged_timetable(staged, times, machine)) - times[slowest].seconds
    peak = max(t.peak for t in times)
    return Simulated(staged.programs[slowest], name, machine, fused=fused, idle=idle, peak=peak)
