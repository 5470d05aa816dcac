"""When collectives start, and which of them together.

Reductions start as soon as their source is there, gathers a little before they are read. Collectives of one kind over
one group travel in one message as long as nobody waits for it. Each message is waited for in front of the first step
that reads one of its results. Every rank bundles the same program the same way, so the ranks meet in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardlib.program.steps import Collective, Compute, Copy, Free, Program, Start, Step, Var, Wait, makes, reads

MESSAGE_BYTES = 4 << 20  # past this size a message gains nothing from growing
PREFETCH = 64  # steps ahead of its first reader that a gather may start,
AHEAD = 2 * MESSAGE_BYTES  # and of how many bytes others may be there, or on their way, that are read before
_SUMS = ("all_reduce", "reduce_scatter")
_FLYING = 2  # sums that may be on their way, however many bytes they have
FLIGHT = 8  # steps that a collective is given before another one builds on it

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter")


def bundle(program: Program) -> Program:
    """The program with collectives that start early, and together."""
    if not program.collectives:
        return program
    return replace(program, steps=tuple(_Bundler(program).run()))


@dataclass
class _Open:
    members: list[Collective] = field(default_factory=list)
    nbytes: float = 0.0
    start: int = 0
    deadline: int = 1 << 60


_Item = Compute | Copy | Free | Collective


class _Bundler:
    """Goes through the collectives, each for itself, and all other steps, by their places."""

    def __init__(self, program: Program) -> None:
        self.items: list[_Item] = []
        for step in program.steps:
            if not isinstance(step, Wait):
                self.items += step.moves if isinstance(step, Start) else [step]
        self.producer = {out: i for i, item in enumerate(self.items) for out in makes(item)}
        self.first_use: dict[Var, int] = {}
        for i, item in enumerate(self.items):
            for var in reads(item):
                self.first_use.setdefault(var, i)
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
        """Bundles by the place in front of which they start."""
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
        """Where `var` comes from by one-operand steps, which are brought forward to it; None: from an input."""
        while (i := self.producer.get(var)) is not None and not isinstance(self.items[i], Collective):
            sources = reads(self.items[i])
            if len(sources) != 1:
                return i
            (var,) = sources
        return i

    def _below(self, var: Var) -> int | None:
        """The collective that `var` comes from by one-operand steps, if there is one."""
        i = self._root(var)
        return i if i is None or isinstance(self.items[i], Collective) else None

    def _bundle(self, where: Sequence[int]) -> list[tuple[int, Sequence[Collective]]]:
        bundles: list[_Open] = []
        opened: dict[object, _Open] = {}
        for start, i in sorted((self._wanted(self._collective(i), i), i) for i in where):
            c = self._collective(i)
            nbytes = max(c.source.nbytes, c.out.nbytes)
            key = (c.kind, c.axes, c.reduce) if c.kind in _TOGETHER else c
            bundle = opened.get(key)
            if bundle is None or start > bundle.deadline or bundle.nbytes + nbytes > MESSAGE_BYTES:
                bundle = opened[key] = _Open()
                bundles.append(bundle)
            bundle.members.append(c)
            bundle.nbytes += nbytes
            bundle.start = max(bundle.start, start)
            bundle.deadline = min(bundle.deadline, i)
        return [(bundle.start, bundle.members) for bundle in bundles]

    def _collective(self, i: int) -> Collective:
        found = self.items[i]
        assert isinstance(found, Collective)
        return found

    def _wanted(self, c: Collective, i: int) -> int:
        """The earliest place in front of which collective c, at i, should start."""
        if c.kind == "ppermute":
            return i  # what goes round stands where it runs under the arithmetic; two hops early, it would wait for one
        ready = self._ready(c.source)
        if c.kind == "all_gather":
            ready = max(ready, self.first_use.get(c.out, i) - PREFETCH, self.earliest[c])
        return min(ready, i)

    def _ready(self, var: Var) -> int:
        """The place behind which `var` can be there."""
        if (i := self._root(var)) is None:
            return 0
        item = self.items[i]
        return min(self.start[item] + FLIGHT, i + 1) if isinstance(item, Collective) else i + 1

    def _earliest(self) -> dict[Collective, int]:
        """For each gather, the place in front of which it does not start: what is gathered too early is held longer.

        That is where an earlier one is read first: one with up to `AHEAD` bytes in between, or the second before.
        """
        found = [(self.first_use.get(c.out, i), c) for i, c in enumerate(self.items) if isinstance(c, Collective)]
        gathers = sorted(((use, c) for use, c in found if c.kind == "all_gather"), key=lambda pair: pair[0])
        earliest, first, between = {}, -1, 0
        for k, (_, c) in enumerate(gathers):
            while first < k - 2 and between > AHEAD:
                first += 1
                between -= gathers[first][1].out.nbytes
            earliest[c] = gathers[first][0] if first >= 0 else 0
            between += c.out.nbytes
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
        """What is sent stays in memory until its message has landed: of sums that nobody waits for, a few may fly."""
        sums = [start for start in dict.fromkeys(self.flying.values()) if start.moves[0].kind in _SUMS]
        held = [sum(c.source.nbytes for c in start.moves) for start in sums]
        for k, start in enumerate(sums[:-_FLYING]):
            if sum(held[k:]) > AHEAD:
                self._land(start.outs[:1])

    def _bring(self, var: Var) -> None:
        """Write what makes `var`, if it has not been written."""
        todo, found = [var], dict[int, Compute | Copy | Free]()
        while todo:
            i = self.producer.get(todo.pop())
            if i is None or i in self.done or i in found or isinstance(item := self.items[i], Collective):
                continue
            found[i] = item
            todo += reads(item)
        for i in sorted(found):
            self._write(i, found[i])

    def _write(self, i: int, step: Compute | Copy | Free) -> None:
        self._land(reads(step))
        self.steps.append(step)
        self.done.add(i)

    def _land(self, variables: Sequence[Var]) -> None:
        """Wait for these."""
        for var in variables:
            if (start := self.flying.get(var)) is not None:
                self.steps.append(Wait(start.outs))
                for out in start.outs:
                    del self.flying[out]
