"""Checks a program, and sizes what it holds: every step, on tensors without values, as some devices would run it.

A value that a layout describes has to have its local shape on each device, and its dtype; one that only the local form
of a rule knows gets its size here. What a collective is told of the members' sizes is what they hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from shardlib.compiler.program.abstract_device import REFUSALS, Device, Local
from shardlib.compiler.program.check_order import ProgramError, refuse, said
from shardlib.compiler.program.check_order import faults as order_faults
from shardlib.compiler.program.layout_transfer import call_faults
from shardlib.compiler.program.steps import (
    Collective,
    Compute,
    Copy,
    Free,
    Program,
    Start,
    Step,
    Var,
    makes,
    reads,
    syms,
)
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.torch_private import without_modes
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Coords

STRICT = False  # whether what torch says of tensors without values is law: it is not always what a kernel makes


def verify(program: Program) -> Program:
    """The program, with the size of every value; raises `ProgramError`, with all faults, where it cannot run."""
    faults = [*order_faults(program), *_calls(program)]
    found = Found()
    if not faults:
        with without_modes():  # which are to see what runs, and nothing of this
            differing = _Differing.of(program)
            coords, *others = differing.devices(program)
            first = Run(program, coords, found)
            faults += first.run(program.steps)
            alike = {v: x for v, x in first.known.items() if v not in differing.vars}
            for coords in others:
                faults += Run(program, coords, found, alike).run(differing.steps)
    refuse(faults)
    return found.said(program)


def _calls(program: Program) -> Iterator[str]:
    """What calls do to layouts, and two values of one name."""
    values = set(program.given)
    for step in program.steps:
        if isinstance(step, Compute):
            values.update(step.made)
            if step.over or step.owes or len(step.told) > len(step.operands):
                yield from (f"{said(step)} {fault}" for fault in call_faults(program.mesh, step))
        elif not isinstance(step, Free):
            values.update(makes(step))
    if len({v.name for v in values}) < len(values):
        names = Counter(
            v.name for v in dict.fromkeys((*program.given, *chain.from_iterable(map(makes, program.steps))))
        )
        yield from (f"%{name} is several values" for name, n in names.items() if n > 1)


@dataclass
class _Differing:
    """What may be otherwise on other devices: axes, values, and the steps that read, make or are told such."""

    axes: set[str] = field(default_factory=set)
    vars: set[Var] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)

    @staticmethod
    def of(program: Program) -> _Differing:
        uneven: dict[int, set[str]] = {}  # by the id of a layout: over which axes its pieces differ
        found = _Differing()

        def differs(x: Layout) -> bool:
            if (axes := uneven.get(id(x))) is None:
                axes = uneven[id(x)] = {a.name for f in x.factors if not f.is_even for a in f.axes}
                found.axes |= axes
            return bool(axes)

        found.vars.update(v for v in program.inputs if v.layout is not None and differs(v.layout))
        for step in program.steps:
            if isinstance(step, Start):
                made, told = step.outs, _told(step)
            elif isinstance(step, Compute):
                made = step.made
                told = {a.name for s in syms(step) for a in s.axes} if len(step.told) > len(step.operands) else _NONE
            elif isinstance(step, Copy):
                made, told = (step.out,), _NONE
            else:
                continue
            uneven_made = [v for v in made if v.layout is not None and differs(v.layout)]
            if told or uneven_made or not found.vars.isdisjoint(reads(step)):
                found.axes |= told
                found.vars.update(uneven_made)
                found.vars.update(v for v in made if v.layout is None)  # an even layout is the same piece everywhere
                found.steps.append(step)
        return found

    def devices(self, program: Program) -> list[Coords]:
        """Those at the ends of the axes along which pieces may differ, of each alone and of all but each."""
        last = {name: n - 1 for name, n in program.mesh.axes.items() if n > 1 and name in self.axes}
        first = dict.fromkeys(last, 0)
        ends = [first, last, *(first | {k: n} for k, n in last.items()), *(last | {k: 0} for k in last)]
        return [dict(at) for at in dict.fromkeys(tuple(at.items()) for at in ends)]


def _told(start: Start) -> set[str]:
    """The axes over which a collective is told of sizes that are not those of all its members."""
    told = {a.name for s in syms(start) for a in s.axes}
    for c in start.moves:
        if not all(_alike(x) for key, x in c.params.items() if key != "pairs"):
            told.update(a.name for a in c.axes)
    return told


def _alike(told: Any) -> bool:
    return not isinstance(told, list | tuple) or not told or (told.count(told[0]) == len(told) and _alike(told[0]))


_NONE: set[str] = set()


class Found:
    """What devices told: shape and dtype of what no layout describes, on the fullest device so far, and which views are
    copies.
    """

    def __init__(self) -> None:
        self.sizes: dict[Var, Local] = {}
        self.copies: set[Step] = set()

    def note(self, var: Var, x: Local) -> None:
        known = self.sizes.get(var)
        if known is None or math.prod(known.shape) < math.prod(x.shape):
            self.sizes[var] = x

    def said(self, program: Program) -> Program:
        program = replace(program, steps=tuple(map(self._copied, program.steps))) if self.copies else program
        new = {v: x for v, x in self.sizes.items() if (v.shape, v.dtype) != (x.shape, x.dtype)}
        return program.with_vars({v: replace(v, shape=x.shape, dtype=x.dtype) for v, x in new.items()})

    def _copied(self, step: Step) -> Step:
        return replace(step, copies=True) if isinstance(step, Compute) and step in self.copies else step


class Run(Device):
    """A program on one device, and what is wrong with it there."""

    def __init__(
        self, program: Program, coords: Coords, found: Found, alike: Mapping[Var, Local | None] = MappingProxyType({})
    ) -> None:
        super().__init__(program.mesh, coords)
        self.known |= alike
        self.program, self.found = program, found
        self.faults: list[str] = []

    def run(self, steps: Iterable[Step]) -> list[str]:
        for var, tensor in self.program.captured:
            self.hold(var, Local.dense(tensor.shape, var.dtype))
        for step in steps:
            if isinstance(step, Start):
                for c in step.moves:
                    self.keep(c, c.out, self.moved(c))
            elif isinstance(step, Copy):
                self.hold(step.out, self.held(step.source))
            elif isinstance(step, Compute):
                made = self.called(step)
                if len(step.outs) > len(made):
                    self.faults.append(f"{said(step)} makes {len(made)} values")
                for i, out in enumerate(step.outs):
                    if out is not None:
                        self.keep(step, out, made[i] if i < len(made) else None)
        return self.faults

    def keep(self, step: Compute | Collective, var: Var, x: Local | None) -> None:
        if isinstance(step, Collective) and "shapes" in step.params and x is not None:
            self.found.note(var, x)  # what goes round has the shape that it has at home
        elif var.layout is not None:
            want = self.piece(var)
            if STRICT and x is not None and x.shape != want.shape:
                where = f"{said(step)} makes {list(x.shape)} on {self}"
                self.faults.append(f"{where}, {var} is [{var.layout}]: {list(want.shape)}")
            elif STRICT and x is not None and x.dtype != want.dtype and not _differs(step):
                self.faults.append(f"{said(step)} makes {x.dtype}, {var} is {var.dtype}")
            if x is None or x.shape != want.shape:
                x = want
            elif x.dtype != want.dtype or not x.own:
                x = Local(x.shape, x.stride, want.dtype)
        elif x is not None:
            self.found.note(var, x)
        self.hold(var, x)

    def called(self, step: Compute) -> Sequence[Local | None]:
        try:
            made = self.compute(step)
        except REFUSALS as error:
            if STRICT or step.note == "reshard":  # no user's op: what torch says of its sizes is law
                self.faults.append(f"{said(step)} on {self}: {str(error).partition(chr(10))[0]}")
            return [None] * len(step.outs)
        if made and made[0] is not None and made[0].own and not (step.over or step.copies) and is_view(step.target):
            self.found.copies.add(step)
        return made

    def moved(self, step: Collective) -> Local | None:
        try:
            return self.collective(step)
        except (ProgramError, LookupError) as error:  # or there is no such dim, or it is told nothing of it
            what = f"{type(error).__name__} of {error}" if isinstance(error, LookupError) else error
            self.faults.append(f"{said(step)} on {self}: {what}")
            return None


def _differs(step: Compute | Collective) -> bool:
    """Whether the dtypes of its results are others on other kinds of devices."""
    return isinstance(step, Compute) and has_trait(step.target, "device_dtypes")
