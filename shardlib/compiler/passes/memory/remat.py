"""Recomputes values in the backward pass instead of keeping them from the forward one (Griewank and Walther 2000,
doi:10.1145/347837.347846; Chen et al. 2016, arXiv:1604.06174).

The calls that made a dropped value run again before the first backward step that reads it, from the kept values on. If
the backward pass computes the same value itself (a gathered weight, a user's checkpoint), that computation moves up
instead, so that no weight is gathered a third time. Random numbers are functions of a key, so they repeat.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from shardlib.compiler.passes.memory.saved_values import Crossing, is_repeatable
from shardlib.compiler.passes.split_backward import gives, needs
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, makes, reads, swapped


def remade(crossing: Crossing, dropped: Collection[Var]) -> Program:
    """Returns the program that drops memory at the end of the turn that made it, and recomputes it."""
    if not dropped:
        return crossing.program
    return replace(crossing.program, steps=_read(_Again(crossing, dropped).run(), crossing.program.results))


def _read(steps: Sequence[Step], results: Iterable[Var]) -> tuple[Step, ...]:
    """Returns the steps without those whose results are only recomputed."""
    wanted, kept = set(results), list[Step]()
    for step in reversed(steps):
        is_pure = is_repeatable(step) or isinstance(step, Wait)
        if not is_pure or not wanted.isdisjoint(gives(step)):
            wanted.update(needs(step))
            kept.append(step)
    return tuple(reversed(kept))


class _Again:
    """Rewrites one backward turn after the other; `again` maps values to their replacements in the current turn."""

    def __init__(self, crossing: Crossing, dropped: Collection[Var]) -> None:
        self.c, self.dropped = crossing, dropped
        self.old = crossing.program.steps
        self.waits = {step.outs[0]: i for i, step in enumerate(self.old) if isinstance(step, Wait)}
        self.steps: list[Step] = []
        self.done: set[int] = set()
        self.again: dict[Var, Var] = {}
        self.same: dict[Var, Var] = {}  # maps a first value to the equal one that this turn computes itself
        self.times: dict[Var, int] = {}

    def run(self) -> list[Step]:
        turn = -1
        for i, step in enumerate(self.old):
            if self.c.turn[i] != turn:
                turn = self.c.turn[i]
                self.again, self.same = {}, self._own(i) if self.c.back[i] else {}
            if i not in self.done:
                self._write(i, step)
        return self.steps

    def _own(self, i: int) -> dict[Var, Var]:
        """Maps earlier values to the equal ones that the turn from step i on computes itself."""
        own: dict[Var, Var] = {}
        for j in range(i, len(self.old)):
            if self.c.turn[j] != self.c.turn[i]:
                break
            for v in makes(self.old[j]):
                if (first := self.c.first.get(v, v)) is not v:
                    own.setdefault(first, v)
        return own

    def _write(self, i: int, step: Step) -> None:
        self.done.add(i)
        if self.c.back[i]:
            self._make(reads(step))
            step = swapped(step, {v: self.again[v] for v in reads(step) if v in self.again})
        self.steps.append(step)

    def _gone(self, v: Var) -> bool:
        """Returns whether a value was dropped and is not replaced in this turn."""
        return v not in self.again and self.c.owner.get(v, v) in self.dropped and not self.c.back[self.c.maker[v]]

    def _make(self, wanted: Collection[Var]) -> None:
        """Writes the steps that recompute these values, in their original order."""
        todo, missing = [v for v in wanted if self._gone(v)], dict[Var, None]()  # a dict, for a reproducible order
        while todo:
            if (v := todo.pop()) in missing:
                continue
            missing[v] = None
            own = self.same.get(self.c.first[v])
            todo += [w for w in reads(self.old[self.c.maker[v if own is None else own]]) if self._gone(w)]
            if own is not None:
                todo += self._behind(own)
        for v in sorted(missing, key=self.c.maker.__getitem__):
            if v in self.again:
                continue
            if (own := self.same.get(self.c.first[v])) is not None:
                self._bring(own)
                self.again[v] = own
            else:
                self._repeat(self.c.maker[v])

    def _behind(self, own: Var) -> list[Var]:
        """Returns the dropped values among the ancestors of a value of this turn."""
        dropped, todo, seen = [], [own], set[Var]()
        while todo:
            if (v := todo.pop()) in seen or self.c.maker.get(v, -1) in self.done:
                continue
            seen.add(v)
            for w in reads(self.old[self.c.maker[v]]) if v in self.c.maker else ():
                if self._gone(w):
                    dropped.append(w)
                elif w in self.c.maker and self.c.back[self.c.maker[w]]:
                    todo.append(w)
        return dropped

    def _bring(self, own: Var) -> None:
        """Writes a value of this turn now, with its ancestors."""
        todo, steps = [own], set[int]()
        while todo:
            i = self.c.maker.get(todo.pop(), -1)
            if i < 0 or i in self.done or i in steps or not self.c.back[i]:
                continue
            steps.add(i)
            todo += reads(self.old[i])
        for i in sorted(steps):
            step = self.old[i]
            self._write(i, step)
            if isinstance(step, Start):
                self._write(self.waits[step.outs[0]], self.old[self.waits[step.outs[0]]])

    def _repeat(self, i: int) -> None:
        step = self.old[i]
        new = {v: self._other(v) for v in gives(step)}
        step = swapped(step, new | {v: self.again[v] for v in reads(step) if v in self.again})
        self.again |= new
        if isinstance(step, Compute):
            self.steps.append(replace(step, backward=True))
        elif isinstance(step, Start):
            self.steps += [Start(tuple(replace(c, backward=True) for c in step.moves)), Wait(step.outs)]

    def _other(self, v: Var) -> Var:
        n = self.times[v] = self.times.get(v, 0) + 1
        return replace(v, name=f"{v.name}.again{n if n > 1 else ''}")
