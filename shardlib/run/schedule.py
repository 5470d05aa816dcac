"""When each collective starts: early, and together with others of its kind.

The program says what must be communicated; here only the order changes. Reductions start as soon as their source is
there, gathers a little before they are read. Collectives of one kind over one group travel in one message as long as
nobody waits for it. Where a result in flight is needed, independent matmuls that stand a little later are done first.

Every rank schedules the same program the same way, so the ranks meet in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardlib.lower.memory import local_bytes
from shardlib.lower.program import Collective, Instr, Program, Step, Var, reads

MESSAGE_BYTES = 4 << 20  # past this size a message gains nothing from growing
PREFETCH = 64  # steps ahead of its first reader that a gather may start
HOIST = 32  # steps behind a wait among which work is looked for
FLIGHT = 8  # steps that a collective is given before another one builds on it

Bundle = tuple[Collective, ...]
Event = Instr | Bundle
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass
class _Open:
    members: list[Collective] = field(default_factory=list)
    nbytes: float = 0.0
    start: int = 0
    deadline: int = 1 << 60


def schedule(program: Program) -> list[Event]:
    """The program's steps as instructions and bundles of collectives that start together."""
    return _Scheduler(program).run()


class _Scheduler:
    def __init__(self, program: Program) -> None:
        self.steps: Sequence[Step] = program.steps
        self.producer = {out: i for i, s in enumerate(self.steps) for out in s.outs if out is not None}
        self.first_use: dict[Var, int] = {}
        for i, step in enumerate(self.steps):
            for var in reads(step):
                self.first_use.setdefault(var, i)
        self.start: dict[Collective, int] = {}
        self.done: set[int] = set()
        self.flying: set[Var] = set()
        self.started: set[Collective] = set()
        self.events: list[Event] = []

    def run(self) -> list[Event]:
        due = self._bundles()
        for i, step in enumerate(self.steps):
            for bundle in due.get(i, ()):
                self._start(bundle)
            if isinstance(step, Collective):
                assert step in self.started, f"{step} is due after its reader"
            elif i not in self.done:
                self._work_while_waiting(step, i)
                self._emit(i)
        return self.events

    # Bundles --------------------------------------------------------------------------------------------------------

    def _bundles(self) -> dict[int, list[Bundle]]:
        """Bundles by the step before which they start."""
        levels: dict[int, list[int]] = defaultdict(list)
        depth: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            if isinstance(step, Collective):
                below = self._below(step.source)
                depth[i] = 0 if below is None else depth[below] + 1
                levels[depth[i]].append(i)
        due: dict[int, list[Bundle]] = defaultdict(list)
        for level in sorted(levels):
            for start, bundle in self._bundle(levels[level]):
                due[start].append(bundle)
                self.start |= dict.fromkeys(bundle, start)
        return due

    def _below(self, var: Var) -> int | None:
        """The collective that `var` comes from by one-operand instructions, if there is one."""
        i = self.producer.get(var)
        if i is None or isinstance(self.steps[i], Collective):
            return i
        sources = list(reads(self.steps[i]))
        return self._below(sources[0]) if len(sources) == 1 else None

    def _bundle(self, where: Sequence[int]) -> list[tuple[int, Bundle]]:
        bundles: list[_Open] = []
        opened: dict[object, _Open] = {}
        for start, i in sorted((self._wanted(i), i) for i in where):
            step = self.steps[i]
            assert isinstance(step, Collective)
            key = (step.kind, step.axes, step.reduce) if step.kind in _TOGETHER else step
            bundle = opened.get(key)
            nbytes = local_bytes(step.out)
            if bundle is None or start > bundle.deadline or bundle.nbytes + nbytes > MESSAGE_BYTES:
                bundle = opened[key] = _Open()
                bundles.append(bundle)
            bundle.members.append(step)
            bundle.nbytes += nbytes
            bundle.start = max(bundle.start, start)
            bundle.deadline = min(bundle.deadline, i)
        return [(bundle.start, tuple(bundle.members)) for bundle in bundles]

    def _wanted(self, i: int) -> int:
        """The earliest step before which collective i should start."""
        step = self.steps[i]
        assert isinstance(step, Collective)
        if step.kind == "ppermute":
            return i  # what goes round stands where it runs under the arithmetic; two hops early, it would wait for one
        ready = self._ready(step.source)
        if step.kind == "all_gather":
            ready = max(ready, self.first_use.get(step.out, i) - PREFETCH)
        return min(ready, i)

    def _ready(self, var: Var) -> int:
        """The step after which `var` can be there: one-operand instructions are brought forward to their operand."""
        i = self.producer.get(var)
        if i is None:
            return 0
        step = self.steps[i]
        if isinstance(step, Collective):
            return min(self.start[step] + FLIGHT, i + 1)
        sources = list(reads(step))
        return self._ready(sources[0]) if len(sources) == 1 else i + 1

    # Order ----------------------------------------------------------------------------------------------------------

    def _start(self, bundle: Bundle) -> None:
        for collective in bundle:
            self._bring(collective.source)
        self.events.append(bundle)
        self.started.update(bundle)
        self.flying.update(c.out for c in bundle)

    def _bring(self, var: Var) -> None:
        """Emit what makes `var`, if it has not been emitted."""
        i = self.producer.get(var)
        if i is None or i in self.done or isinstance(self.steps[i], Collective):
            self.flying.discard(var)
            return
        for source in reads(self.steps[i]):
            self._bring(source)
        self._emit(i)

    def _emit(self, i: int) -> None:
        step = self.steps[i]
        assert isinstance(step, Instr)
        self.events.append(step)
        self.done.add(i)
        self.flying.difference_update(reads(step))

    def _work_while_waiting(self, step: Step, i: int) -> None:
        if not any(v in self.flying for v in reads(step)):
            return
        for j in range(i + 1, min(i + 1 + HOIST, len(self.steps))):
            other = self.steps[j]
            if isinstance(other, Instr) and j not in self.done and other.flops and all(map(self._there, reads(other))):
                self._emit(j)

    def _there(self, var: Var) -> bool:
        i = self.producer.get(var)
        step = None if i is None else self.steps[i]
        made = i is None or i in self.done or (isinstance(step, Collective) and step in self.started)
        return made and var not in self.flying
