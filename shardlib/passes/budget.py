"""What is made again so that a program fits into a budget of memory, and takes as little longer as possible.

Whether it fits, and what it takes, is asked of the program that all later passes make, and of its simulation on the
machine of its mesh. Values are given up one after the other, those first that free most bytes for a second of work; of
equal layers, those of the first layers, which come last on the way back. As many as are needed is found by bisection;
then values are taken back as far as there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

from shardlib.errors import ShardingError
from shardlib.lines import place
from shardlib.machine import Machine
from shardlib.passes import policies
from shardlib.passes.crossing import Crossing
from shardlib.passes.layers import boundaries, frontier, key
from shardlib.passes.remat import remade
from shardlib.program.steps import Compute, Program, Start, Step, Var, reads
from shardlib.program.storage import largest, peak_bytes
from shardlib.simulate import rooflines
from shardlib.simulate.collectives import transfer
from shardlib.simulate.timeline import timeline

_STEPS = 100_000  # of programs that are tried after the bisection
_SHOWN = 5
_LEAST = 1e-9  # seconds

Dropped = frozenset[Var]


class _Tried(NamedTuple):
    peak: int
    seconds: float


def within(
    crossing: Crossing,
    budget: int,
    finish: Callable[[Program], Program],
    machine: Machine,
    fixed: Collection[Var] = frozenset(),
) -> Dropped:
    """The memory to give up, none of it `fixed`, for a program whose peak is at most `budget` bytes.

    Raises `ShardingError` where none was found, with the least peak that was.
    """
    return _Search(crossing, budget, finish, machine, frozenset(fixed)).run()


class _Search:
    def __init__(
        self,
        crossing: Crossing,
        budget: int,
        finish: Callable[[Program], Program],
        machine: Machine,
        fixed: Dropped,
    ) -> None:
        self.c, self.budget, self.finish, self.machine = crossing, budget, finish, machine
        at = boundaries(crossing)
        held = {*crossing.held} | {o for i in at for o in frontier(crossing, i)}
        self.free = {o for o in crossing.droppable if o in held and o not in fixed}  # what is decided
        self.base = frozenset(o for o in crossing.droppable if o not in held and o not in fixed)
        self.tried: dict[Dropped, _Tried] = {}
        self.left = _STEPS
        self.layers = at

    def run(self) -> Dropped:
        nothing: Dropped = frozenset()
        if self.fits(nothing):
            return nothing
        best: list[Dropped] = []
        full = self.base | (policies.full(self.c) & self.free)
        by_layer = sorted(full - self.base, key=lambda o: self.c.maker[o])
        by_ratio = list(self._order())
        for order in (by_ratio, by_layer):
            best += self._least(order)
        if not best:
            self._refuse()
        found = min(best, key=lambda d: self.tried[d].seconds)
        return self._better(found)

    # Trying ---------------------------------------------------------------------------------------------------------

    def fits(self, dropped: Dropped) -> bool:
        return self.of(dropped).peak <= self.budget

    def of(self, dropped: Dropped) -> _Tried:
        if (known := self.tried.get(dropped)) is None:
            program = self.finish(remade(self.c, dropped))
            self.left -= len(program.steps)
            known = self.tried[dropped] = _Tried(peak_bytes(program), timeline(program, self.machine).seconds)
        return known

    def _least(self, order: Sequence[Var]) -> Iterator[Dropped]:
        """The shortest beginning of an order that fits, if one is found."""
        fitting = next((k for k in _far_first(len(order)) if self.fits(self._first(order, k))), None)
        if fitting is None:
            return
        least, k = 0, fitting
        while k - least > 1:
            middle = (least + k) // 2
            if self.fits(self._first(order, middle)):
                k = middle
            else:
                least = middle
        yield self._first(order, k)

    def _first(self, order: Sequence[Var], k: int) -> Dropped:
        return self.base | frozenset(order[:k])

    def _better(self, best: Dropped) -> Dropped:
        """Change single groups of values, and single values, as long as that is faster and fits."""
        moves = [*self._groups().values(), *([o] for o in sorted(self.free, key=lambda o: self.c.maker[o]))]
        changed = True
        while changed and self.left > 0:
            changed = False
            for members in moves:
                if self.left <= 0:
                    break
                group = frozenset(members)
                for other in (best - group, best | group):
                    if other != best and self.fits(other) and self.of(other).seconds < self.of(best).seconds:
                        best, changed = other, True
        return best

    # What to give up first ------------------------------------------------------------------------------------------

    def _groups(self) -> dict[Hashable, list[Var]]:
        """Equal values of equal layers."""
        groups: dict[Hashable, list[Var]] = {}
        count: dict[Hashable, int] = {}
        ends, layer = iter([*self.layers, len(self.c.program.steps)]), 0
        end = next(ends)
        for o in sorted(self.free, key=lambda o: self.c.maker[o]):
            at = self.c.maker[o]
            while at >= end:
                end, layer = next(ends), layer + 1
            alike = key(self.c.program.steps[at]), o.dtype, o.nbytes
            n = count[layer, alike] = count.get((layer, alike), 0) + 1
            groups.setdefault((alike, n), []).append(o)
        return groups

    def _order(self) -> Iterator[Var]:
        groups = self._groups()
        gone, again = set[Var](), set[int]()
        while groups:

            def worth(name: Hashable) -> float:
                one = groups[name][len(groups[name]) // 2]
                return one.nbytes / max(sum(map(self._seconds, self._steps(one, gone, again))), _LEAST)

            members = groups.pop(max(groups, key=worth))
            again.update(self._steps(members[len(members) // 2], gone, again))
            gone.update(members)
            yield from members

    def _steps(self, owner: Var, gone: Collection[Var], again: Collection[int]) -> set[int]:
        """The steps that run once more if this is given up, too."""
        found, todo = set[int](), [owner]
        while todo:
            i = self.c.maker[todo.pop()]
            if i in again or i in found:
                continue
            found.add(i)
            owners = (self.c.owner.get(v, v) for v in reads(self.c.program.steps[i]))
            todo += [o for o in owners if o in gone or (o in self.base and o not in self.c.weights)]
        return found

    def _seconds(self, i: int) -> float:
        return _seconds(self.c.program.steps[i], self.c.program, self.machine)

    # Refusal --------------------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        least = min(self.tried, key=lambda d: self.tried[d].peak)
        program, peak = self.finish(remade(self.c, least)), self.tried[least].peak
        lines = {v: step.line for step in program.steps if isinstance(step, Compute) for v in step.made}
        lines |= {c.out: c.line for c in program.collectives}
        held = [f"{v.nbytes:,} bytes: {v.name}, {_whence(program, v, lines)}" for v in largest(program)[:_SHOWN]]
        raise ShardingError(
            f"the program does not fit into memory={self.budget:,} bytes: the least peak that was found is {peak:,}",
            held,
            rule="the peak is that of the program that runs, arguments, results and messages included; at its step the "
            "largest values are these",
            remedy=f'memory="{peak} B", more devices, or smaller pieces of what is listed',
        )


def _far_first(n: int) -> Iterator[int]:
    """How many to give up, in the order in which it is tried whether that fits: all, then fewer."""
    yield from dict.fromkeys(n - n * k // 8 for k in range(8) if n)


def _whence(program: Program, v: Var, lines: object) -> str:
    if v in program.given:
        return "an input"
    return f"made at {place(lines.get(v))}"  # type: ignore[attr-defined]


def _seconds(step: Step, program: Program, machine: Machine) -> float:
    if isinstance(step, Compute):
        touched = rooflines.touched(step)
        return rooflines.seconds(step, rooflines.Cost(touched, bool(touched or step.flops)), machine.device)
    if isinstance(step, Start):
        span = machine.span(step.first.axes, program.mesh.axes)
        return transfer(step.first.kind, sum(c.bytes for c in step.moves), span).seconds
    return 0.0
