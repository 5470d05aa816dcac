"""Computes the bytes in use at each step, and the spans in which values wait for the backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardlib.compiler.passes.memory.saved_values import Crossing
from shardlib.compiler.passes.split_backward import gives, needs
from shardlib.compiler.program.steps import TIERS, Compute, Program, Start, Step, Var, Wait
from shardlib.compiler.simulate.timeline import Timeline

Span = tuple[int, int]  # the first step, and the step behind the last
Trip = tuple[Var, Var]  # the last value made before a value has left for the host, and the first after its return began
Owner = dict[str, Var | None]  # the memory of each value by name
NOWHERE = 0, 0


@dataclass(frozen=True)
class Levels:
    """The bytes in use while each step runs (`level`).

    For each memory, `gaps` has the span between its last forward and its first backward use, and `away` the span in
    which it is on the host if it is offloaded.
    """

    level: Sequence[int]
    gaps: Mapping[Var, Span]
    away: Mapping[Var, Span]
    waits: Mapping[Var, float]  # seconds of waits for the copies of each offloaded memory
    copies: Mapping[Var, float] = field(default_factory=dict)  # the same, for each memory that could be offloaded

    @staticmethod
    def analyze(program: Program, line: Timeline, owner: Owner, trips: Mapping[Var, Trip]) -> Levels:
        """Returns the levels of a program after all passes."""
        last: dict[Var, int] = {}
        first: dict[Var, int] = {}
        place: dict[Var, int] = {}
        leaves: dict[Var, list[int]] = {}
        returns: dict[Var, list[int]] = {}
        for i, (step, touched) in enumerate(_touched(program)):
            place |= dict.fromkeys(gives(step), i)
            is_back = step.backward if isinstance(step, Compute) else isinstance(step, Start) and step.first.backward
            for o in dict.fromkeys(original(v.name, owner) for v in touched):
                if o is not None and is_copy(step):
                    (leaves if isinstance(step, Wait) else returns).setdefault(o, []).append(i)
                elif o is not None and is_back:
                    first.setdefault(o, i)
                elif o is not None and o not in first:
                    last[o] = i
        gaps = {o: (last[o] + 1, i) for o, i in first.items() if o in last}
        away = {**gaps}
        for o, (gone, back) in trips.items():
            if o in gaps and gone in place and back in place:
                away[o] = max(place[gone] + 1, gaps[o][0]), min(place[back], gaps[o][1])
        away |= {o: (leaves[o][0] + 1, at[-1]) for o, at in returns.items() if o in gaps and o in leaves}
        waits: dict[Var, float] = defaultdict(float)
        for step in program.steps:
            if isinstance(step, Start) and is_copy(step) and (o := original(step.sources[0].name, owner)) is not None:
                waits[o] += line.waits.get(step, 0.0)
        return Levels([size for _, size in line.memory], gaps, away, waits)

    def with_span(self, span: Span, nbytes: int) -> Levels:
        """Returns the levels with `nbytes` more bytes in use during a span."""
        begin, end = span
        if begin >= end:
            return self
        between = [size + nbytes for size in self.level[begin:end]]
        return replace(self, level=[*self.level[:begin], *between, *self.level[end:]])

    @property
    def peak(self) -> int:
        """The most bytes in use at one step."""
        return max(self.level, default=0)


def trips(program: Program, crossing: Crossing, owner: Owner) -> dict[Var, Trip]:
    """Returns the trip of each value, in a program that offloads every value that it may."""
    leaves: dict[Var, Var] = {}
    returns: dict[Var, Var] = {}
    flying: list[Var] = []
    before: Var | None = None
    for step, touched in _touched(program):
        if is_copy(step):
            o = original(touched[0].name, owner)
            if o is not None and isinstance(step, Wait) and before is not None:
                leaves.setdefault(o, before)
            elif o is not None and o in leaves:
                flying.append(o)
        elif isinstance(step, Compute) and step.out_vars and step.out_vars[0] in crossing.maker:
            before = step.out_vars[0]
            if crossing.back[crossing.maker[before]]:
                returns = {**dict.fromkeys(flying, before), **returns}
                flying = []
    return {o: (gone, returns[o]) for o, gone in leaves.items() if o in returns}


def is_copy(step: Step) -> bool:
    """Returns whether a step copies a value to the host's memory, or back, or waits for that."""
    if isinstance(step, Start):
        return step.first.kind in TIERS
    return isinstance(step, Wait) and any(v.name.endswith((".host", ".back")) for v in step.outs)


def _touched(program: Program) -> Iterator[tuple[Step, tuple[Var, ...]]]:
    """Yields each step with the values that it makes and reads; a wait, with the sources of its message."""
    sent: dict[Var, tuple[Var, ...]] = {}
    for step in program.steps:
        if isinstance(step, Start):
            sent |= dict.fromkeys(step.outs, step.sources)
        carried = (v for out in step.outs for v in sent.get(out, ())) if isinstance(step, Wait) else ()
        yield step, (*gives(step), *needs(step), *carried)


def original(name: str, owner: Owner) -> Var | None:
    """Returns the memory of a value, or of a copy that passes made of it (`x.again`, `x.host`, `x.back`)."""
    if name not in owner:
        owner[name] = original(name.rpartition(".")[0], owner) if "." in name else None
    return owner[name]
