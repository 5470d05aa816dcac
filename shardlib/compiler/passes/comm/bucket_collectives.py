"""Decides when collectives start, and which share a message.

Reductions start as soon as their source is computed. Weights are gathered when the layer before their reader begins
(`units`; the `Schedule` has the number of layers and the cap). Collectives of one kind over one group share a message
until a step reads a result, or until the message is so large that its latency is negligible. Weights share messages
only with weights of their layer. A message is waited for in front of the first step that reads one of its results.
All ranks bundle the same program in the same way, so their collectives match.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardlib.compiler.passes.comm.gather_units import units
from shardlib.compiler.program.steps import (
    Collective,
    Compute,
    Copy,
    Free,
    Program,
    Start,
    Step,
    Var,
    Wait,
    makes,
    reads,
)
from shardlib.compiler.schedule_options import DEFAULT, Schedule
from shardlib.compiler.simulate.collectives import transfer
from shardlib.core.cached import cache_weakly
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.machine import Machine
from shardlib.sharding.reshard.prices import Prices

MESSAGE_BYTES = 4 << 20  # a message may always have so many bytes,
_LATENCIES = 8  # and so many times the bytes that could be sent during its latency
AHEAD = 2 * MESSAGE_BYTES  # bytes of sums that may be in flight, in any number of messages
_SUMS = ("all_reduce", "reduce_scatter")
GATHERS = ("all_gather", "all_to_all")
_FLYING = 2  # sums that may be in flight, of any size
FLIGHT = 8  # assumed steps between a collective and another one that reads its result

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter")


@cache_weakly
def bundle(program: Program, how: Schedule = DEFAULT) -> Program:
    """Starts collectives early, and merges them into messages."""
    if not program.collectives:
        return program
    return replace(program, steps=tuple(_Bundler(program, how).run()))


@dataclass
class _Open:
    members: list[Collective] = field(default_factory=list)
    nbytes: float = 0.0
    start: int = 0
    deadline: int = 1 << 60


_Item = Compute | Copy | Free | Collective


class _Bundler:
    """Reorders single collectives and all other steps, which it addresses by position."""

    def __init__(self, program: Program, how: Schedule) -> None:
        self.program, self.how = program, how
        self.items: list[_Item] = []
        for step in program.steps:
            if not isinstance(step, Wait):
                self.items += step.moves if isinstance(step, Start) else [step]
        self.producer = {out: i for i, item in enumerate(self.items) for out in makes(item)}
        self.first_use: dict[Var, int] = {}
        self.last_use: dict[Var, int] = {}
        for i, item in enumerate(self.items):
            for var in reads(item):
                self.first_use.setdefault(var, i)
                self.last_use[var] = i
        self.rooms: dict[tuple[str, tuple[Axis, ...]], int] = {}
        self.unit: dict[Collective, int] = {}
        self.layer = 0  # bytes of the largest unit
        self.earliest = self._earliest()
        self.start: dict[Collective, int] = {}
        self.done: set[int] = set()
        self.flying: dict[Var, Start] = {}
        self.steps: list[Step] = []

    def run(self) -> list[Step]:
        due = self._bundles()
        for i, item in enumerate(self.items):
            for bundle in due.get(i, ()):
                self._start(bundle)
            if not isinstance(item, Collective) and i not in self.done:
                self._write(i, item)
        self._land(tuple(self.flying))
        return self.steps

    # Bundles --------------------------------------------------------------------------------------------------------

    def _bundles(self) -> dict[int, list[Sequence[Collective]]]:
        """Returns the bundles by the position of the step that follows their start."""
        levels: dict[int, list[int]] = defaultdict(list)
        depth: dict[int, int] = {}
        for i, item in enumerate(self.items):
            if isinstance(item, Collective):
                below = self._below(item.source)
                depth[i] = 0 if below is None else depth[below] + 1
                levels[depth[i]].append(i)
        due: dict[int, list[Sequence[Collective]]] = defaultdict(list)
        for level in sorted(levels):
            for start, bundle in self._bundle(levels[level]):
                due[start].append(bundle)
                self.start |= dict.fromkeys(bundle, start)
        return due

    def _root(self, var: Var) -> int | None:
        """Returns the origin of `var` before one-operand steps, which move along with it; None if it is an input."""
        while (i := self.producer.get(var)) is not None and not isinstance(self.items[i], Collective):
            sources = reads(self.items[i])
            if len(sources) != 1:
                return i
            (var,) = sources
        return i

    def _below(self, var: Var) -> int | None:
        """Returns the collective from which one-operand steps compute `var`, if there is one."""
        i = self._root(var)
        return i if i is None or isinstance(self.items[i], Collective) else None

    def _bundle(self, where: Sequence[int]) -> list[tuple[int, Sequence[Collective]]]:
        bundles: list[_Open] = []
        opened: dict[object, _Open] = {}
        for start, i in sorted((self._wanted(self._collective(i), i), i) for i in where):
            c = self._collective(i)
            nbytes = max(c.source.nbytes, c.out.nbytes)
            key = (c.kind, c.axes, c.reduce, self.unit.get(c)) if c.kind in _TOGETHER else c
            bundle = opened.get(key)
            if bundle is None or start > bundle.deadline or bundle.nbytes + nbytes > self._room(c):
                bundle = opened[key] = _Open()
                bundles.append(bundle)
            bundle.members.append(c)
            bundle.nbytes += nbytes
            bundle.start = max(bundle.start, start)
            bundle.deadline = min(bundle.deadline, i)
        return [(bundle.start, bundle.members) for bundle in bundles]

    def _collective(self, i: int) -> Collective:
        item = self.items[i]
        assert isinstance(item, Collective)
        return item

    def _wanted(self, c: Collective, i: int) -> int:
        """Returns the earliest position at which collective c, at i, should start."""
        if c.kind == "ppermute":
            return i  # a local form already placed its ring messages beside its arithmetic
        return min(max(self._ready(c.source), self.earliest.get(c, 0)), i)

    def _ready(self, var: Var) -> int:
        """Returns the position behind which `var` can exist."""
        if (i := self._root(var)) is None:
            return 0
        item = self.items[i]
        return min(self.start[item] + FLIGHT, i + 1) if isinstance(item, Collective) else i + 1

    def _room(self, c: Collective) -> int:
        """Returns the largest bytes of a message of this kind and group."""
        if (bucket := self.how.nbytes("bucket")) is not None:
            return bucket
        key = c.kind, c.axes
        if key not in self.rooms:
            mesh = self.program.mesh
            span = Machine.convert(mesh.machine).span(c.axes, mesh.shape)
            latency = transfer(c.kind, 0.0, span).seconds if span.size > 1 else 0.0
            self.rooms[key] = max(MESSAGE_BYTES, int(_LATENCIES * latency * span.ring))
        return self.rooms[key]

    def _earliest(self) -> dict[Collective, int]:
        """Returns the earliest start of each gather: gathered earlier, it would hold memory for longer.

        That is the first reader of the unit `prefetch` units earlier, or later if the cap requires it.
        """
        prices = Prices.for_mesh(self.program.mesh)
        uses = [(self.first_use.get(c.out, i), i, c) for i, c in enumerate(self.items) if isinstance(c, Collective)]
        gathers = sorted((use, i) for use, i, c in uses if c.kind in GATHERS)
        moved = [self._collective(i) for _, i in gathers]
        keys = [(c.kind, c.axes, c.line, c.backward, c.out.layout, c.out.dtype) for c in moved]
        ahead = self.how.prefetch
        least = max((prices.latency(c.axes) * prices.rate(c.axes) for c in moved), default=0) if ahead is None else 0
        numbers = units(keys, [c.out.nbytes for c in moved], least)
        begin: dict[int, int] = {}
        size = Counter[int]()
        for (use, _), unit, c in zip(gathers, numbers, moved, strict=True):
            begin.setdefault(unit, use)
            size[unit] += c.out.nbytes
        self.layer = max(size.values(), default=0)
        ahead = 1 if ahead is None else ahead
        room, held = self.how.nbytes("cap"), 0
        ends: list[tuple[int, int]] = []  # last readers of gathered values, and their bytes
        earliest = {}
        for (use, i), unit, c in zip(gathers, numbers, moved, strict=True):
            if self._root(c.source) is None:
                self.unit[c] = unit
            at, nbytes = begin[unit - ahead] if unit >= ahead else 0, c.out.nbytes
            while ends and (ends[0][0] <= at or (room is not None and held + nbytes > room and ends[0][0] < use)):
                end, freed = heapq.heappop(ends)
                at, held = max(at, end), held - freed
            earliest[c] = at if room is None or held + nbytes <= room else use
            heapq.heappush(ends, (self.last_use.get(c.out, i) + 1, nbytes))
            held += nbytes
        return earliest

    # Order ----------------------------------------------------------------------------------------------------------

    def _start(self, bundle: Sequence[Collective]) -> None:
        for c in bundle:
            self._bring(c.source)
        self._land([c.source for c in bundle])
        start = Start(tuple(bundle))
        self.steps.append(start)
        self.flying |= dict.fromkeys(start.outs, start)
        self._land_oldest()

    def _land_oldest(self) -> None:
        """Waits for the oldest sums if many are in flight, because messages hold their sources in memory."""
        sums = [start for start in dict.fromkeys(self.flying.values()) if start.moves[0].kind in _SUMS]
        held = [sum(c.source.nbytes for c in start.moves) for start in sums]
        for k, start in enumerate(sums[:-_FLYING]):
            if sum(held[k:]) > max(AHEAD, 2 * self.layer):
                self._land(start.outs[:1])

    def _bring(self, var: Var) -> None:
        """Writes the steps that compute `var`, if they are not written."""
        todo, missing = [var], dict[int, Compute | Copy | Free]()
        while todo:
            i = self.producer.get(todo.pop())
            if i is None or i in self.done or i in missing or isinstance(item := self.items[i], Collective):
                continue
            missing[i] = item
            todo += reads(item)
        for i in sorted(missing):
            self._write(i, missing[i])

    def _write(self, i: int, step: Compute | Copy | Free) -> None:
        self._land(reads(step))
        self.steps.append(step)
        self.done.add(i)

    def _land(self, variables: Sequence[Var]) -> None:
        """Waits for the messages that bring these."""
        for var in variables:
            if (start := self.flying.get(var)) is not None:
                self.steps.append(Wait(start.outs))
                for out in start.outs:
                    del self.flying[out]
