"""Keeps inputs and outputs in the host's memory: state between calls, and values saved for a separate backward program.

An input is copied in `prefetch` groups of values before its reader, and freed behind its last reader. If other groups
are read for long before it is read again, it is copied in a second time. Groups are the values of a layer. An output is
copied out as soon as it is computed; the copy is waited for `prefetch` groups later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shardlib.compiler.passes.comm.gather_units import units
from shardlib.compiler.program.steps import (
    Collective,
    Compute,
    Program,
    Start,
    Step,
    Var,
    Wait,
    makes,
    reads,
    swapped,
    together,
)
from shardlib.compiler.schedule_options import DEFAULT, Schedule
from shardlib.core.aten.op_traits import is_view


def offload_state(
    program: Program, away: Collection[int] = (), sent: Collection[int] = (), how: Schedule = DEFAULT
) -> Program:
    """Puts the inputs `away`, their replacements, and the outputs `sent` (all by position) into the host's memory."""
    if not away and not sent:
        return program
    return _Away(program, away, sent, 1 if how.prefetch is None else how.prefetch).run()


@dataclass(eq=False)
class _Visit:
    """The `number`-th stay of an input on the device; `copies` maps it and its views to their copies."""

    root: Var
    first: int
    number: int
    copies: dict[Var, Var] = field(default_factory=dict)
    flying: Var | None = None


class _Away:
    """Writes the steps with copies in and out; readers of the results are at position `end`."""

    def __init__(self, program: Program, away: Collection[int], sent: Collection[int], ahead: int) -> None:
        self.fate = {at: program.inputs[i] for i, at in program.replaced.items() if i in away} | dict.fromkeys(sent)
        self.program, self.away, self.ahead, self.end = program, away, ahead, len(program.steps)
        self.home = {(v := program.inputs[i]): replace(v, host=True) for i in sorted(away)}
        self.root = {v: v for v in self.home}  # of each of its views, too
        self.views: dict[Var, Compute] = {}
        for step in program.steps:
            if not isinstance(step, Compute) or not is_view(step.target) or step.copies:
                continue
            if (root := self.root.get(step.operands[0])) is not None:
                self.root |= dict.fromkeys(step.out_vars, root)
                self.views |= dict.fromkeys(step.out_vars, step)
        self.visits = self._visits()

    def _reads(self) -> Iterator[tuple[int, Var]]:
        """Yields the readers of inputs and of their views, in order; an output that returns its input reads nothing."""
        for i, step in enumerate(self.program.steps):
            if not self._is_view(step):
                yield from ((i, self.root[v]) for v in dict.fromkeys(reads(step)) if v in self.root)
        kept = {at for i, at in self.program.replaced.items() if self.program.outputs[at] is self.program.inputs[i]}
        for at, v in enumerate(self.program.outputs):
            if isinstance(v, Var) and v in self.root and at not in kept:
                yield self.end, self.root[v]

    def _is_view(self, step: Step) -> bool:
        return isinstance(step, Compute) and any(self.views.get(v) is step for v in step.out_vars)

    def _visits(self) -> dict[tuple[int, Var], _Visit]:
        """Maps each reader to the visit that it needs."""
        visits: dict[tuple[int, Var], _Visit] = {}
        every = list(self._reads())
        roots = [*dict.fromkeys(root for _, root in every)]
        layer = dict(zip(roots, units([_form(v) for v in roots], [v.nbytes for v in roots], 0), strict=True))
        last: dict[Var, tuple[int, _Visit]] = {}
        for k, (i, root) in enumerate(every):
            at, visit = last.get(root, (k, None))
            between = {layer[other] for _, other in every[at:k]} - {layer[root]}
            if visit is None or len(between) > self.ahead:
                visit = _Visit(root, i, 1 if visit is None else visit.number + 1)
            visits[i, root] = visit
            last[root] = k, visit
        return visits

    def run(self) -> Program:
        steps = self.program.steps
        visits = [*dict.fromkeys(self.visits.values())]
        group = units([_form(one.root) for one in visits], [one.root.nbytes for one in visits], 0)
        begins = [min(v.first for v, g in zip(visits, group, strict=True) if g == k) for k in range(len({*group}))]
        due: dict[int, list[_Visit]] = defaultdict(list)
        for one, g in zip(visits, group, strict=True):
            due[begins[max(g - self.ahead, 0)]].append(one)
        out: list[Step] = []
        sent: dict[Var, Var] = {}
        waits: dict[int, list[Step]] = defaultdict(list)
        outputs = list(self.program.outputs)
        leaves = self._leaves({v for at in self.fate if isinstance(v := outputs[at], Var) and v not in self.root})
        for i, step in enumerate((*steps, None)):
            out += waits.pop(i, ())
            out += [self._fetch(one) for one in due.get(i, ())]
            if step is None:
                break
            if not self._is_view(step):
                out += self._taken(i, reads(step))
                copies = {v: self.visits[i, self.root[v]].copies[v] for v in reads(step) if v in self.root}
                out.append(swapped(step, copies) if copies else step)
            for v in makes(step):
                if v in leaves:
                    start, wait = _copied(v, sent)
                    out.append(start)
                    waits[leaves[v]].append(wait)
        out += [step for late in sorted(waits) for step in waits[late]]
        out += self._taken(self.end, [v for _, v in self._last()])
        for at, v in self._last():
            outputs[at] = self.visits[self.end, self.root[v]].copies[v]
        for at, was in self.fate.items():
            if outputs[at] is was:
                outputs[at] = self.home[was]
                continue
            if outputs[at] not in sent:
                out += _copied(outputs[at], sent)
            outputs[at] = sent[outputs[at]]
        return replace(
            self.program,
            steps=tuple(out),
            inputs=tuple(self.home.get(v, v) for v in self.program.inputs),
            outputs=tuple(outputs),
            donated=self.program.donated.difference(self.away),
            replaced={i: at for i, at in self.program.replaced.items() if i not in self.away},
            varies={self.home.get(v, v): axes for v, axes in self.program.varies.items()},
        )

    def _leaves(self, new: Collection[Var]) -> dict[Var, int]:
        """Maps values that are copied out to the position of the wait."""
        positions = {v: i for i, step in enumerate(self.program.steps) for v in makes(step) if v in new}
        group = units([_form(v) for v in positions], [v.nbytes for v in positions], 0)
        begins = [
            next(i for i, g in zip(positions.values(), group, strict=True) if g == k) for k in range(len({*group}))
        ]
        begins += [self.end] * (self.ahead + 1)
        return {v: begins[g + self.ahead + 1] for v, g in zip(positions, group, strict=True)}

    def _last(self) -> list[tuple[int, Var]]:
        """Returns the outputs that view an input, with their positions."""
        shown = enumerate(self.program.outputs)
        return [(at, v) for at, v in shown if isinstance(v, Var) and (self.end, self.root.get(v)) in self.visits]

    def _fetch(self, one: _Visit) -> Start:
        one.flying = self._brought(one, one.root)
        return together(_copy("to_device", self.home[one.root], one.flying))[0]

    def _taken(self, i: int, wanted: Collection[Var]) -> list[Step]:
        """Returns the steps that bring inputs, and views of them, to step `i`."""
        steps: list[Step] = []
        for v in wanted:
            if v not in self.root:
                continue
            one = self.visits[i, self.root[v]]
            if one.flying is not None:
                steps.append(Wait((one.flying,)))
                one.copies[one.root], one.flying = one.flying, None
            steps += self._viewed(one, v)
        return steps

    def _viewed(self, one: _Visit, v: Var) -> list[Step]:
        if v in one.copies:
            return []
        view = self.views[v]
        steps = self._viewed(one, view.operands[0])
        for w in view.out_vars:
            one.copies[w] = self._brought(one, w)
        return [*steps, swapped(view, one.copies)]

    def _brought(self, one: _Visit, v: Var) -> Var:
        return replace(v, name=f"{v.name}.here{one.number}")


def _copied(v: Var, sent: dict[Var, Var]) -> tuple[Start, Wait]:
    sent[v] = replace(v, name=f"{v.name}.host", host=True)
    return together(_copy("to_host", v, sent[v]))


def _copy(kind: str, source: Var, out: Var) -> Collective:
    return Collective(kind, (), source, out, {}, 0.0)


def _form(v: Var) -> tuple[Any, ...]:
    return v.layout, v.dtype
