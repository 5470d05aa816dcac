"""What is made again, and what waits in the host's memory, so that a program fits into a budget of memory and takes as
little longer as possible.

Whether it fits, and what it takes, is asked of the program that all later passes make, and of its simulation on the
machine of its mesh. Values are given up one after the other, those first that free most bytes for a second: of what
makes them again, or of a copy that nothing hides. Of equal layers, those of the first layers, which come last on the
way back. As many as are needed is found by bisection; then values are taken back as far as there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from typing import NamedTuple, NoReturn

from shardlib.compiler.passes.memory import remat_policies
from shardlib.compiler.passes.memory.layer_bounds import boundaries, frontier, key
from shardlib.compiler.passes.memory.remat import remade
from shardlib.compiler.passes.memory.saved_values import Crossing
from shardlib.compiler.program.buffers import largest, peak_bytes
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, reads
from shardlib.compiler.simulate import rooflines
from shardlib.compiler.simulate.collectives import transfer
from shardlib.compiler.simulate.simulated import Simulated
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Line, place
from shardlib.sharding.mesh.machine import Machine

_STEPS, _TIMES = 120_000, 600  # of programs that are tried, and how many of them; more are in the bisection only
_FEW = 40  # of a long program no more can be tried
_PARTS = 64  # of an order
_SHOWN = 5
_LEAST = 1e-9  # seconds
_WORTH = 0.05  # of the seconds forward: what a long program has to win before more is tried
_SHARE = 1e-4  # of a step's seconds: what takes less is free

Finish = Callable[[Program, float | None, Collection[Var]], Program]  # a program after all later passes, within so many
# bytes, with such values in the host's memory meanwhile


class Choice(NamedTuple):
    """The memory that is given up and made again, and what waits in the host's memory; all else is kept."""

    dropped: frozenset[Var] = frozenset()
    moved: frozenset[Var] = frozenset()

    def put(self, values: Collection[Var], way: str) -> Choice:
        """The same, in which these values are `"kept"`, `"dropped"` or `"moved"`."""
        dropped, moved = self.dropped.difference(values), self.moved.difference(values)
        if way == _KEPT:
            return Choice(dropped, moved)
        return Choice(dropped.union(values), moved) if way == _DROPPED else Choice(dropped, moved.union(values))


_KEPT, _DROPPED, _MOVED = "kept", "dropped", "moved"


class _Tried(NamedTuple):
    peak: int
    seconds: float  # infinite where nobody asked


def within(
    crossing: Crossing,
    budget: int,
    finish: Finish,
    machine: Machine,
    fixed: Collection[Var] = frozenset(),
    movable: Collection[Var] = (),
    trial: Finish | None = None,
) -> Choice:
    """What to give up, none of it `fixed`, for a program whose peak is at most `budget` bytes; `movable` are values
    that may wait in the host's memory. A `trial` is a quick `finish`, which leaves out what only makes it faster.

    Raises `ShardingError` where none was found, with the least peak that was.
    """
    search = _Search(crossing, budget, trial or finish, machine, frozenset(fixed), movable)
    if search.fits(Choice()) and peak_bytes(finish(crossing.program, math.inf, ())) <= budget:
        return Choice()  # and nothing has to move less for that
    return search.run()


class _Search:
    def __init__(
        self,
        crossing: Crossing,
        budget: int,
        finish: Finish,
        machine: Machine,
        fixed: frozenset[Var],
        movable: Collection[Var] = (),
    ) -> None:
        self.c, self.budget, self.finish = crossing, budget, finish
        self.machine = rooflines.slowest(machine, crossing.program.mesh.size)
        at = boundaries(crossing)
        held = {*crossing.held} | {o for i in at for o in frontier(crossing, i)}
        ways: dict[Var, tuple[str, ...]] = {o: (_DROPPED,) for o in crossing.droppable if o in held and o not in fixed}
        for o in movable:
            if o not in fixed and o in crossing.maker:
                ways[o] = (*ways.get(o, ()), _MOVED)
        self.ways = ways  # what is decided, and how it may be given up
        self.free = [o for o in ways if _DROPPED in ways[o]]
        self.base = Choice(frozenset(o for o in crossing.droppable if o not in held and o not in fixed))
        self.tried: dict[Choice, _Tried] = {}
        self.left = _STEPS
        self.is_long = _FEW * len(crossing.program.steps) > _STEPS
        self.layers = at

    def run(self) -> Choice:
        full = remat_policies.full(self.c)
        by_layer = [(o, _DROPPED) for o in self.free if o in full]
        if mixed := self._by_either():
            self._bisect(mixed)
        for order in (_all_dropped(self._by_estimate()), by_layer, _all_dropped(self._by_trial())):
            self._bisect(order)
        if not self._is_met():  # nothing but what layers need at once stays
            rest = [(o, _MOVED) for o in self.ways if o not in full and _MOVED in self.ways[o]]
            self._bisect([*by_layer, *rest])
        if not self._is_met():
            self._improve(lambda choice: (self.of(choice).peak,))
        if not self._is_met():
            self._refuse()
        self._improve(lambda choice: (self.of(choice).seconds if self.fits(choice) else math.inf, *_given_up(choice)))
        return self.best

    # Trying ---------------------------------------------------------------------------------------------------------

    def fits(self, choice: Choice) -> bool:
        return self.of(choice).peak <= self.budget

    def of(self, choice: Choice, *, timed: bool = False) -> _Tried:
        """Its peak; how long it takes where it fits, or where that is asked."""
        known = self.tried.get(choice)
        if known is None or (timed and known.seconds == math.inf):
            program = self.program(choice)
            self.left -= len(program.steps)
            peak = peak_bytes(program)
            is_timed = timed or peak <= self.budget
            seconds = Simulated(program, "", self.machine).seconds if is_timed else math.inf
            known = self.tried[choice] = _Tried(peak, seconds)
        return known

    def program(self, choice: Choice) -> Program:
        return self.finish(remade(self.c, choice.dropped), self.budget, choice.moved)

    @property
    def best(self) -> Choice:
        """The fastest that fits, and of equal ones that which copies and makes again least."""
        return min((d for d in self.tried if self.fits(d)), key=lambda d: (self.tried[d].seconds, *_given_up(d)))

    def _is_met(self) -> bool:
        return min(one.peak for one in self.tried.values()) <= self.budget

    def _bisect(self, order: Sequence[tuple[Var, str]]) -> None:
        """Try beginnings of an order, for the shortest that fits and is no slower than longer ones: what just fits
        leaves no room for messages that run ahead. Of a short program, also for the shortest that fits."""

        def given_up(n: int) -> Choice:
            found = self.base
            for way in (_DROPPED, _MOVED):
                found = found.put([o for o, how in order[:n] if how == way], way)
            return found

        def search(fitting: int, is_good: Callable[[Choice, Choice], bool]) -> None:
            least = 0
            while fitting - least > (1 if self.left > 0 else 1 + len(order) // _PARTS):
                middle = (least + fitting) // 2
                if self.fits(given_up(middle)) and is_good(given_up(middle), given_up(fitting)):
                    fitting = middle
                else:
                    least = middle

        first = next((k for k in _far_first(len(order)) if self.fits(given_up(k))), 0)
        search(first, lambda shorter, longer: self.of(shorter).seconds <= self.of(longer).seconds)
        if self.left > 0:
            search(first, lambda shorter, longer: True)

    def _improve(self, worse: Callable[[Choice], tuple[float, ...]]) -> None:
        """Change what equal layers share, then single values, then two of them, as long as that is better; of what does
        not fit, until it does."""
        ones = [[o] for o in self.ways]
        alike = list(self._groups(self.ways).values())
        best, changed = min(self.tried, key=worse), True
        is_done = self.fits(best)
        while changed:
            changed = False
            for groups in chain(zip(alike), zip(ones), combinations(ones, 2)):
                if self.left <= 0 or len(self.tried) >= _TIMES or self.fits(best) is not is_done:
                    return
                for other in self._others(best, groups):
                    if worse(other) < worse(best):
                        best, changed = other, True

    def _others(self, choice: Choice, groups: Sequence[Sequence[Var]]) -> Iterator[Choice]:
        """Choices that differ in groups of values: each of them kept, or given up in one way; or those made again that
        are not."""
        found = [choice.put(groups[0], _KEPT).put([o for o in groups[0] if o not in choice.dropped], _DROPPED)]
        for ways in product(*((_KEPT, *self.ways[group[0]]) for group in groups)):
            other = choice
            for group, way in zip(groups, ways, strict=True):
                other = other.put(group, way)
            found.append(other)
        yield from dict.fromkeys(found)

    # What to give up first ------------------------------------------------------------------------------------------

    def _groups(self, values: Iterable[Var]) -> dict[Hashable, list[Var]]:
        """Equal values of equal layers."""
        groups: dict[Hashable, list[Var]] = {}
        count: dict[Hashable, int] = {}
        ends, layer = iter([*self.layers, len(self.c.program.steps)]), 0
        end = next(ends)
        for o in sorted(values, key=self.c.maker.__getitem__):
            at = self.c.maker[o]
            while at >= end:
                end, layer = next(ends), layer + 1
            alike = key(self.c.program.steps[at]), o.dtype, o.nbytes, self.ways[o]
            n = count[layer, alike] = count.get((layer, alike), 0) + 1
            groups.setdefault((alike, n), []).append(o)
        return groups

    def _by_trial(self) -> list[Var]:
        """Those first that alone lower the peak most for what they cost, as long as there is time to try."""
        before, rest = self.of(Choice(), timed=True), self._by_estimate()
        tried: list[tuple[float, list[Var]]] = []
        for members in sorted(self._groups(self.free).values(), key=lambda members: rest.index(members[0])):
            if self.left > _STEPS / 2:
                alone = self.of(self.base.put(members, _DROPPED), timed=True)
                if (less := before.peak - alone.peak) > 0:
                    tried.append((less / max(alone.seconds - before.seconds, _SHARE * before.seconds), members))
        order = [o for _, members in sorted(tried, key=lambda one: -one[0]) for o in members]
        known = set(order)
        return order + [o for o in rest if o not in known]

    def _by_estimate(self) -> list[Var]:
        """Those first that are most bytes for the seconds of what makes them, if what stands before them is gone."""
        groups, order = self._groups(self.free), list[Var]()
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

    def _by_either(self) -> list[tuple[Var, str]]:
        """Those first that are most bytes for their seconds, made again or copied, whichever takes less; a copy takes
        none as long as the steps forward hide it. Empty where nothing is to be copied, or nothing much won by it."""
        device, steps = self.machine.device, enumerate(self.c.program.steps)
        forward = sum(self._seconds(i) for i, s in steps if not self.c.back[i] and isinstance(s, Compute))
        hidden = forward * device.host * device.overlaps
        found: list[tuple[float, list[Var], str]] = []
        again = {o: self._alone(o) for o in self.ways}
        groups = self._groups(self.ways).values()
        for members in sorted(groups, key=lambda members: -again[members[0]] / members[0].nbytes):
            each, way = again[members[0]] / members[0].nbytes, _DROPPED
            if _MOVED in self.ways[members[0]]:
                size = sum(o.nbytes for o in members)
                copied = 0.0 if size <= hidden else 2 / device.host
                if copied < each:
                    each, way, hidden = copied, _MOVED, hidden - size
            found.append((each, members, way))
        if all(way == _DROPPED for *_, way in found):
            return []
        alone = self._spent((again[members[0]] / members[0].nbytes, members) for _, members, _ in found)
        if self.is_long and alone - self._spent((each, members) for each, members, _ in found) < _WORTH * forward:
            return []
        return [(o, way) for _, members, way in sorted(found, key=lambda one: one[0]) for o in members]

    def _spent(self, prices: Iterable[tuple[float, Sequence[Var]]]) -> float:
        """Seconds, by that estimate, for as many bytes as are too many: those first that take least."""
        missing, spent = self.of(Choice()).peak - self.budget, 0.0
        for each, members in sorted(prices, key=lambda one: one[0]):
            if missing <= 0:
                break
            size = min(missing, sum(o.nbytes for o in members))
            missing, spent = missing - size, spent + each * size
        return spent

    def _alone(self, o: Var) -> float:
        """Seconds of what makes it, where all else is kept."""
        return sum(map(self._seconds, self._steps(o, (), ()))) if _DROPPED in self.ways[o] else math.inf

    def _steps(self, owner: Var, gone: Collection[Var], again: Collection[int]) -> set[int]:
        """The steps that run once more if this is given up, too."""
        found, todo = set[int](), [owner]
        while todo:
            i = self.c.maker[todo.pop()]
            if i in again or i in found:
                continue
            found.add(i)
            owners = (self.c.owner.get(v, v) for v in reads(self.c.program.steps[i]))
            todo += [o for o in owners if o in gone or (o in self.base.dropped and o not in self.c.weights)]
        return found

    def _seconds(self, i: int) -> float:
        return _seconds(self.c.program.steps[i], self.c.program, self.machine)

    # Refusal --------------------------------------------------------------------------------------------------------

    def _refuse(self) -> NoReturn:
        least = min(self.tried, key=lambda d: self.tried[d].peak)
        program, peak = self.program(least), self.tried[least].peak
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


def _given_up(choice: Choice) -> tuple[int, int]:
    return sum(v.nbytes for v in choice.moved), sum(v.nbytes for v in choice.dropped)


def _all_dropped(order: Iterable[Var]) -> list[tuple[Var, str]]:
    return [(o, _DROPPED) for o in order]


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
