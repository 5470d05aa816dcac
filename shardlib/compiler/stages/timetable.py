"""The timetable of a pipeline: when each fragment runs, and with it bubbles, live microbatches and deadlocks.

A stage runs its fragments one after the other, in its order. A fragment starts when its stage is free and all fragments
that it needs have finished. Messages between stages never block their sender, so an order is free of deadlocks exactly
if this simulation runs to its end: it is the model check of a schedule.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardlib.compiler.stages.fragments import Fragment, Kind, PipelineShape
from shardlib.compiler.stages.pictures import draw_figure, draw_text, write_perfetto
from shardlib.core.errors import ShardingError

Orders = Sequence[Sequence[Fragment]]  # one per stage
Needs = Callable[[Fragment], Iterable[Fragment]]


@dataclass(frozen=True)
class Timetable:
    """When the fragments of each stage start and finish, in seconds, in the order of the stage.

    As text it has a row per stage. Of microbatch 0, `0` is F, `a` is B, and `A` is W.

    Example:
        >>> orders = [[Fragment.parse(x, i) for x in ("F0", "F1", "B0", "B1")] for i in range(2)]
        >>> print(make_timetable(orders, PipelineShape(2, 2).needs, lambda f: 2.0 if f.kind == "B" else 1.0))
        9 s, bubble 33.3%, a column is 1 s
        stage 0  01   aabb
        stage 1   01aabb
    """

    orders: Orders
    spans: Mapping[Fragment, tuple[float, float]]

    @cached_property
    def first(self) -> float:
        """The first start of all stages, in seconds."""
        return min(start for start, _ in self.spans.values())

    @cached_property
    def seconds(self) -> float:
        """The time from the first start to the last finish of all stages."""
        return max(finish for _, finish in self.spans.values()) - self.first

    def busy(self, stage: int) -> float:
        """Returns the seconds in which a stage works."""
        return sum(finish - start for start, finish in map(self.spans.__getitem__, self.orders[stage]))

    def idle(self, stage: int) -> float:
        """Returns the seconds in which a stage waits while any stage works: its bubble."""
        return self.seconds - self.busy(stage)

    @cached_property
    def bubble(self) -> float:
        """The part of all stages' time in which they wait."""
        stages = range(len(self.orders))
        return sum(map(self.idle, stages)) / (len(self.orders) * self.seconds)

    def live(self, stage: int) -> int:
        """Returns the largest number of chunks' microbatches whose saved values a stage holds at once.

        Values saved for a backward pass are held from `F` until `B`, or until `W` where weights are apart.
        """
        last = "W" if any(f.kind == "W" for f in self.orders[stage]) else "B"
        held = most = 0
        for fragment in self.orders[stage]:
            held += (fragment.kind == "F") - (fragment.kind == last)
            most = max(most, held)
        return most

    def __str__(self) -> str:
        return draw_text(self)

    __repr__ = __str__

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws stages against time into a file, in the format of its suffix (`.png`, `.svg`).

        Bars are colored by kind and labeled with their microbatch. Raises `ShardingError` without matplotlib.
        """
        draw_figure(self).savefig(os.fspath(path))

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace that Perfetto opens, with a track per stage (JSON of trace events)."""
        write_perfetto(self, path)


def make_timetable(
    orders: Orders,
    needs: Needs,
    seconds: Callable[[Fragment], float],
    transfer: Callable[[Fragment, Fragment], float] = lambda source, target: 0.0,
) -> Timetable:
    """Simulates orders; `transfer` gives the seconds of the message between two fragments of different stages.

    Raises `ShardingError` if stages wait for each other, and names their fragments.
    """
    spans: dict[Fragment, tuple[float, float]] = {}
    clocks, done = [0.0] * len(orders), [0] * len(orders)
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                fragment = order[done[stage]]
                sources = list(needs(fragment))
                if not all(f in spans for f in sources):
                    break
                arrivals = (spans[f][1] + (transfer(f, fragment) if f.stage != stage else 0.0) for f in sources)
                start = max((clocks[stage], *arrivals))
                clocks[stage] = start + seconds(fragment)
                spans[fragment] = start, clocks[stage]
                done[stage] += 1
                progress = True
    if any(done[stage] < len(order) for stage, order in enumerate(orders)):
        raise _deadlock([list(order[at:]) for order, at in zip(orders, done, strict=True)], needs, spans)
    return Timetable(orders, spans)


def _deadlock(
    left: Sequence[Sequence[Fragment]], needs: Needs, spans: Mapping[Fragment, tuple[float, float]]
) -> ShardingError:
    """Returns the error that names, for every stage that waits, its next fragment and the fragment that it needs."""
    faults = []
    for order in filter(None, left):
        first = order[0]
        for f in needs(first):
            if f not in spans:
                behind = left[f.stage].index(f)
                place = f", which comes behind {left[f.stage][0]!r}" if behind else ", which waits, too"
                faults.append(f"{first!r} needs {f!r}{place}")
    return ShardingError(
        "the schedule is a deadlock: its stages wait for each other",
        faults,
        rule="each stage runs its fragments in order, and a fragment runs after all fragments that it needs",
        remedy="run a needed fragment earlier on its stage",
    )


def refuse_incomplete(orders: Orders, shape: PipelineShape) -> None:
    """Raises `ShardingError` unless every stage runs each of its fragments once; the error lists all offenders."""
    faults = []
    if len(orders) != shape.stages:
        faults.append(f"it orders {len(orders)} stages, where there are {shape.stages}")
    for stage, order in enumerate(orders[: shape.stages]):
        counts = Counter(order)
        all_of_stage = set(shape.fragments(stage))
        faults += [f"{f!r} is left out" for f in sorted(all_of_stage - counts.keys(), key=_by_kind)]
        faults += [f"{f!r} does not exist" for f in sorted(counts.keys() - all_of_stage, key=_by_kind)]
        faults += [f"{f!r} runs {n} times" for f, n in counts.items() if n > 1]
    if faults:
        kinds = ", ".join(shape.kinds)
        raise ShardingError(
            "the schedule does not run every fragment once",
            faults,
            rule=f"there is a fragment for each stage, microbatch (0 to {shape.microbatches - 1}), chunk "
            f"(0 to {shape.chunks - 1}) and kind ({kinds})",
        )


def _by_kind(f: Fragment) -> tuple[int, int, int]:
    kinds: tuple[Kind, ...] = ("F", "B", "W")
    return kinds.index(f.kind), f.microbatch, f.chunk
