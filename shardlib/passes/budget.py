"""What is made again so that a program fits into a budget of memory, and takes as little longer as possible.

Whether it fits, and what it takes, is asked of the program that all later passes make, and of its simulation on the
machine of its mesh. Values are given up one after the other, those first that free most bytes for a second of work; of
equal layers, those of the first layers, which come last on the way back. As many as are needed is found by bisection;
then values are taken back as far as there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import NamedTuple, NoReturn

from shardlib.errors import ShardingError
from shardlib.lines import Line, place
from shardlib.machine import Machine
from shardlib.passes import policies
from shardlib.passes.crossing import Crossing
from shardlib.passes.layers import boundaries, frontier, key
from shardlib.passes.remat import remade
from shardlib.program.steps import Compute, Program, Start, Step, Var, reads
from shardlib.program.storage import largest, peak_bytes
from shardlib.simulate import rooflines
from shardlib.simulate.collectives import transfer
from shardlib.simulate.simulated import Simulated

_STEPS, _TIMES = 40_000, 200  # of programs that are tried, and how many of them; more are in the bisection only
_PARTS = 64  # of an order
_SHOWN = 5
_LEAST = 1e-9  # seconds
_SHARE = 1e-4  # of a step's seconds: what takes less is free

Dropped = frozenset[Var]
Finish = Callable[[Program, float], Program]  # a program after all later passes, within so many bytes


class _Tried(NamedTuple):
    peak: int
    seconds: float  # infinite where nobody asked


def within(
    crossing: Crossing,
    budget: int,
    finish: Finish,
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
        finish: Finish,
        machine: Machine,
        fixed: Dropped,
    ) -> None:
        self.c, self.budget, self.finish, self.machine = crossing, budget, finish, machine
        at = boundaries(crossing)
        held = {*crossing.held} | {o for i in at for o in frontier(crossing, i)}
        self.free = dict.fromkeys(o for o in crossing.droppable if o in held and o not in fixed)  # what is decided
        self.base = frozenset(o for o in crossing.droppable if o not in held and o not in fixed)
        self.tried: dict[Dropped, _Tried] = {}
        self.left = _STEPS
        self.layers = at

    def run(self) -> Dropped:
        nothing: Dropped = frozenset()
        if self.fits(nothing) and peak_bytes(self.finish(self.c.program, math.inf)) <= self.budget:
            return nothing  # and nothing has to move less for that
        full = policies.full(self.c)
        by_layer = [o for o in self.free if o in full]
        for order in (self._by_estimate(), by_layer, self._by_trial()):
            self._bisect(order)
        if min(one.peak for one in self.tried.values()) > self.budget:
            self._improve(lambda one: one.peak)
        if min(one.peak for one in self.tried.values()) > self.budget:
            self._refuse()
        self._improve(lambda one: one.seconds if one.peak <= self.budget else math.inf)
        return self.best

    # Trying ---------------------------------------------------------------------------------------------------------

    def fits(self, dropped: Dropped) -> bool:
        return self.of(dropped).peak <= self.budget

    def of(self, dropped: Dropped, *, timed: bool = False) -> _Tried:
        """Its peak; how long it takes where it fits, or where that is asked."""
        known = self.tried.get(dropped)
        if known is None or (timed and known.seconds == math.inf):
            program = self.finish(remade(self.c, dropped), self.budget)
            self.left -= len(program.steps)
            peak = peak_bytes(program)
            is_timed = timed or peak <= self.budget
            seconds = Simulated(program, "", self.machine).seconds if is_timed else math.inf
            known = self.tried[dropped] = _Tried(peak, seconds)
        return known

    @property
    def best(self) -> Dropped:
        """The fastest that fits."""
        return min((d for d in self.tried if self.fits(d)), key=lambda d: self.tried[d].seconds)

    def _bisect(self, order: Sequence[Var]) -> None:
        """Try beginnings of an order, for the shortest that fits; of a long program, for about that one."""
        fitting = next((k for k in _far_first(len(order)) if self.fits(self.base | frozenset(order[:k]))), 0)
        least = 0
        while fitting - least > (1 if self.left > 0 else 1 + len(order) // _PARTS):
            middle = (least + fitting) // 2
            if self.fits(self.base | frozenset(order[:middle])):
                fitting = middle
            else:
                least = middle

    def _improve(self, worse: Callable[[_Tried], float]) -> None:
        """Change what equal layers share, then single values, then two of them, as long as that is better; of what does
        not fit, until it does."""
        ones = [frozenset([o]) for o in self.free]
        alike = list(map(frozenset, self._groups().values()))
        best, changed = min(self.tried, key=lambda d: worse(self.tried[d])), True
        is_done = self.fits(best)
        while changed:
            changed = False
            for group in chain(alike, ones, (a | b for a, b in combinations(ones, 2))):
                if self.left <= 0 or len(self.tried) >= _TIMES or self.fits(best) is not is_done:
                    return
                for other in dict.fromkeys((best - group, best ^ group, best | group)):
                    if worse(self.of(other)) < worse(self.of(best)):
                        best, changed = other, True

    # What to give up first ------------------------------------------------------------------------------------------

    def _groups(self) -> dict[Hashable, list[Var]]:
        """Equal values of equal layers."""
        groups: dict[Hashable, list[Var]] = {}
        count: dict[Hashable, int] = {}
        ends, layer = iter([*self.layers, len(self.c.program.steps)]), 0
        end = next(ends)
        for o in self.free:
            at = self.c.maker[o]
            while at >= end:
                end, layer = next(ends), layer + 1
            alike = key(self.c.program.steps[at]), o.dtype, o.nbytes
            n = count[layer, alike] = count.get((layer, alike), 0) + 1
            groups.setdefault((alike, n), []).append(o)
        return groups

    def _by_trial(self) -> list[Var]:
        """Those first that alone lower the peak most for what they cost, as long as there is time to try."""
        before, rest = self.of(frozenset(), timed=True), self._by_estimate()
        tried: list[tuple[float, list[Var]]] = []
        for members in sorted(self._groups().values(), key=lambda members: rest.index(members[0])):
            if self.left > _STEPS / 2:
                alone = self.of(self.base | frozenset(members), timed=True)
                if (less := before.peak - alone.peak) > 0:
                    tried.append((less / max(alone.seconds - before.seconds, _SHARE * before.seconds), members))
        order = [o for _, members in sorted(tried, key=lambda one: -one[0]) for o in members]
        known = set(order)
        return order + [o for o in rest if o not in known]

    def _by_estimate(self) -> list[Var]:
        """Those first that are most bytes for the seconds of what makes them, if what stands before them is gone."""
        groups, order = self._groups(), list[Var]()
        gone, again = set[Var](), set[int]()
        while groups:

            def worth(name: Hashable) -> float:
                one = groups[name][len(groups[name]) // 2]
                return one.nbytes / max(sum(map(self._seconds, self._steps(one, gone, again))), _LEAST)

            members = groups.pop(max(groups, key=worth))
            again.update(self._steps(members[len(members) // 2], gone, again))
            gone.update(members)
            order += members
        return order

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

    def _refuse(self) -> NoReturn:
        least = min(self.tried, key=lambda d: self.tried[d].peak)
        program, peak = self.finish(remade(self.c, least), self.budget), self.tried[least].peak
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


def _whence(program: Program, v: Var, lines: Mapping[Var, Line | None]) -> str:
    if v in program.given:
        return "an input"
    return f"made at {place(lines.get(v))}"


def _seconds(step: Step, program: Program, machine: Machine) -> float:
    if isinstance(step, Compute):
        touched = rooflines.touched(step)
        return rooflines.seconds(step, rooflines.Cost(touched, bool(touched or step.flops)), machine.device)
    if isinstance(step, Start):
        span = machine.span(step.first.axes, program.mesh.axes)
        return transfer(step.first.kind, sum(c.bytes for c in step.moves), span).seconds
    return 0.0
