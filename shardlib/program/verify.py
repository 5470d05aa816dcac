"""Checks a program, and sizes what it holds: every step, on tensors without values, as some devices would run it.

A value that a layout describes has to have its local shape on each device, and its dtype; one that only the local form
of a rule knows gets its size here. What a collective is told of the members' sizes is what they hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardlib.aten.traits import has, is_view
from shardlib.internals import without_modes
from shardlib.meshes.axis import Coords
from shardlib.program.check import ProgramError, refuse, said
from shardlib.program.check import faults as order_faults
from shardlib.program.device import REFUSALS, Device, Local
from shardlib.program.steps import Collective, Compute, Copy, Program, Start, Step, Var, makes, syms

_DEVICES = 8  # that are looked at, of those that hold different pieces
STRICT = False  # whether what torch says of tensors without values is law: it is not always what a kernel makes


def verify(program: Program) -> Program:
    """The program, with the size of every value; raises `ProgramError`, with all faults, where it cannot run."""
    faults = list(order_faults(program))
    found = _Found()
    if not faults:
        with without_modes():  # which are to see what runs, and nothing of this
            for coords in _devices(program):
                faults += _Run(program, coords, found).run()
    refuse(faults)
    return found.said(program)


def _devices(program: Program) -> list[Coords]:
    """Devices at the ends of every axis along which pieces may differ: one where all are alike."""
    layouts = [v.layout for v in _values(program) if v.layout is not None]
    uneven = {a.name for x in layouts for f in x.factors if not f.even for a in f.axes}
    uneven |= {a.name for step in program.steps for s in syms(step) for a in s.axes}
    names = [name for name, n in program.mesh.axes.items() if n > 1]
    ends = [sorted({0, program.mesh.axes[name] - 1}) if name in uneven else [0] for name in names]
    return [dict(zip(names, at, strict=True)) for at in itertools.islice(itertools.product(*ends), _DEVICES)] or [{}]


def _values(program: Program) -> Iterator[Var]:
    yield from program.inputs
    for step in program.steps:
        yield from makes(step)


class _Found:
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
        return program.with_vars({v: replace(v, shape=x.shape, dtype=x.dtype) for v, x in self.sizes.items()})

    def _copied(self, step: Step) -> Step:
        return replace(step, copies=True) if isinstance(step, Compute) and step in self.copies else step


class _Run(Device):
    """A program on one device, and what is wrong with it there."""

    def __init__(self, program: Program, coords: Coords, found: _Found) -> None:
        super().__init__(program.mesh, coords)
        self.program, self.found = program, found
        self.faults: list[str] = []

    def run(self) -> list[str]:
        for var, tensor in self.program.captured:
            self.hold(var, Local.dense(tensor.shape, var.dtype))
        for step in self.program.steps:
            if isinstance(step, Start):
                for c in step.moves:
                    self.keep(c, c.out, self.moved(c))
            elif isinstance(step, Copy):
                self.hold(step.out, self.held(step.source))
            elif isinstance(step, Compute):
                made = self.called(step)
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
            x = want if x is None or x.shape != want.shape else Local(x.shape, x.stride, want.dtype)
        elif x is not None:
            self.found.note(var, x)
        self.hold(var, x)

    def called(self, step: Compute) -> Sequence[Local | None]:
        try:
            made = self.compute(step)
        except REFUSALS as error:
            if STRICT:
                self.faults.append(f"{said(step)} on {self}: {str(error).partition(chr(10))[0]}")
            return [None] * len(step.outs)
        if made and made[0] is not None and made[0].own and step.over is None and is_view(step.target):
            self.found.copies.add(step)
        return made

    def moved(self, step: Collective) -> Local | None:
        try:
            return self.collective(step)
        except ProgramError as error:
            self.faults.append(f"{said(step)} on {self}: {error}")
            return None


def _differs(step: Compute | Collective) -> bool:
    """Whether the dtypes of its results are others on other kinds of devices."""
    return isinstance(step, Compute) and has(step.target, "other dtypes")
