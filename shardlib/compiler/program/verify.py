"""Checks a program, and measures its values, by running every step on tensors without values for some devices.

A value with a layout must have its local shape and dtype on each device. An intermediate of a local form gets its size
here. The sizes in a collective's parameters must be those that the members hold.
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
from shardlib.compiler.program.check_order import ProgramError, describe, refuse
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
from shardlib.core.torch_internals.torch_private import without_modes
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Coords

STRICT = False  # True: meta kernels decide; their results sometimes differ from those of real kernels


def verify(program: Program) -> Program:
    """Returns the program with the size of every value; raises `ProgramError`, with all faults, if it cannot run."""
    faults = [*order_faults(program), *_calls(program)]
    measured = Measured()
    if not faults:
        with without_modes():  # users' modes see only the ops that run
            differing = _Differing.between_devices(program)
            coords, *others = differing.devices(program)
            first = Run(program, coords, measured)
            faults += first.run(program.steps)
            alike = {v: x for v, x in first.known.items() if v not in differing.vars}
            for coords in others:
                faults += Run(program, coords, measured, alike).run(differing.steps)
    refuse(faults)
    return measured.applied_to(program)


def _calls(program: Program) -> Iterator[str]:
    """Yields faults in what calls do to layouts, and names of several values."""
    values = set(program.entry_values)
    for step in program.steps:
        if isinstance(step, Compute):
            values.update(step.out_vars)
            if step.over or step.has_partial_sums or len(step.arg_leaves) > len(step.operands):
                yield from (f"{describe(step)} {fault}" for fault in call_faults(program.mesh, step))
        elif not isinstance(step, Free):
            values.update(makes(step))
    if len({v.name for v in values}) < len(values):
        names = Counter(
            v.name for v in dict.fromkeys((*program.entry_values, *chain.from_iterable(map(makes, program.steps))))
        )
        yield from (f"%{name} is several values" for name, n in names.items() if n > 1)


@dataclass
class _Differing:
    """Axes along which devices differ, values that differ, and the steps that touch these."""

    axes: set[str] = field(default_factory=set)
    vars: set[Var] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)

    @staticmethod
    def between_devices(program: Program) -> _Differing:
        uneven: dict[int, set[str]] = {}  # id of a layout -> axes along which its shards differ in size
        differing = _Differing()

        def differs(x: Layout) -> bool:
            if (axes := uneven.get(id(x))) is None:
                axes = uneven[id(x)] = {a.name for f in x.factors if not f.is_even for a in f.axes}
                differing.axes |= axes
            return bool(axes)

        differing.vars.update(v for v in program.inputs if v.layout is not None and differs(v.layout))
        for step in program.steps:
            if isinstance(step, Start):
                outs, axes = step.outs, _uneven_axes(step)
            elif isinstance(step, Compute):
                outs = step.out_vars
                axes = (
                    {a.name for s in syms(step) for a in s.axes} if len(step.arg_leaves) > len(step.operands) else _NONE
                )
            elif isinstance(step, Copy):
                outs, axes = (step.out,), _NONE
            else:
                continue
            uneven_made = [v for v in outs if v.layout is not None and differs(v.layout)]
            if axes or uneven_made or not differing.vars.isdisjoint(reads(step)):
                differing.axes |= axes
                differing.vars.update(uneven_made)
                differing.vars.update(v for v in outs if v.layout is None)  # even layouts have equal shards everywhere
                differing.steps.append(step)
        return differing

    def devices(self, program: Program) -> list[Coords]:
        """Returns devices at the ends of the differing axes: of all, of each alone, and of all but each."""
        last = {name: n - 1 for name, n in program.mesh.axes.items() if n > 1 and name in self.axes}
        first = dict.fromkeys(last, 0)
        ends = [first, last, *(first | {k: n} for k, n in last.items()), *(last | {k: 0} for k in last)]
        return [dict(at) for at in dict.fromkeys(tuple(at.items()) for at in ends)]


def _uneven_axes(start: Start) -> set[str]:
    """Returns the axes along which a message's parameters differ between members."""
    axes = {a.name for s in syms(start) for a in s.axes}
    for c in start.moves:
        if not all(_alike(x) for key, x in c.params.items() if key != "pairs"):
            axes.update(a.name for a in c.axes)
    return axes


def _alike(x: Any) -> bool:
    return not isinstance(x, list | tuple) or not x or (x.count(x[0]) == len(x) and _alike(x[0]))


_NONE: set[str] = set()


class Measured:
    """Shape and dtype of values without a layout, on the fullest device so far, and the views that are copies."""

    def __init__(self) -> None:
        self.sizes: dict[Var, Local] = {}
        self.copies: set[Step] = set()

    def note(self, var: Var, x: Local) -> None:
        largest = self.sizes.get(var)
        if largest is None or math.prod(largest.shape) < math.prod(x.shape):
            self.sizes[var] = x

    def applied_to(self, program: Program) -> Program:
        program = replace(program, steps=tuple(map(self._copied, program.steps))) if self.copies else program
        new = {v: x for v, x in self.sizes.items() if (v.shape, v.dtype) != (x.shape, x.dtype)}
        return program.with_vars({v: replace(v, shape=x.shape, dtype=x.dtype) for v, x in new.items()})

    def _copied(self, step: Step) -> Step:
        return replace(step, copies=True) if isinstance(step, Compute) and step in self.copies else step


class Run(Device):
    """Runs a program on one device, and collects its faults there."""

    def __init__(
        self,
        program: Program,
        coords: Coords,
        measured: Measured,
        alike: Mapping[Var, Local | None] = MappingProxyType({}),
    ) -> None:
        super().__init__(program.mesh, coords)
        self.known |= alike
        self.program, self.measured = program, measured
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
                results = self.called(step)
                if len(step.outs) > len(results):
                    self.faults.append(f"{describe(step)} makes {len(results)} values")
                for i, out in enumerate(step.outs):
                    if out is not None:
                        self.keep(step, out, results[i] if i < len(results) else None)
        return self.faults

    def keep(self, step: Compute | Collective, var: Var, x: Local | None) -> None:
        if isinstance(step, Collective) and "shapes" in step.params and x is not None:
            self.measured.note(var, x)  # a shard that is passed round keeps the shape of its sender's
        elif var.layout is not None:
            want = self.shard(var)
            if STRICT and x is not None and x.shape != want.shape:
                where = f"{describe(step)} makes {list(x.shape)} on {self}"
                self.faults.append(f"{where}, {var} is [{var.layout}]: {list(want.shape)}")
            elif STRICT and x is not None and x.dtype != want.dtype and not _differs(step):
                self.faults.append(f"{describe(step)} makes {x.dtype}, {var} is {var.dtype}")
            if x is None or x.shape != want.shape:
                x = want
            elif x.dtype != want.dtype or not x.own:
                x = Local(x.shape, x.stride, want.dtype)
        elif x is not None:
            self.measured.note(var, x)
        self.hold(var, x)

    def called(self, step: Compute) -> Sequence[Local | None]:
        try:
            results = self.compute(step)
        except REFUSALS as error:
            if STRICT or step.note == "reshard":  # shardlib's own op: torch's check of its sizes holds
                self.faults.append(f"{describe(step)} on {self}: {str(error).partition(chr(10))[0]}")
            return [None] * len(step.outs)
        if (
            results
            and results[0] is not None
            and results[0].own
            and not (step.over or step.copies)
            and is_view(step.target)
        ):
            self.measured.copies.add(step)
        return results

    def moved(self, step: Collective) -> Local | None:
        try:
            return self.collective(step)
        except (ProgramError, LookupError) as error:  # LookupError: a missing dim or parameter
            fault = f"{type(error).__name__} of {error}" if isinstance(error, LookupError) else error
            self.faults.append(f"{describe(step)} on {self}: {fault}")
            return None


def _differs(step: Compute | Collective) -> bool:
    """True if the dtypes of an op's results depend on the kind of device."""
    return isinstance(step, Compute) and has_trait(step.target, "device_dtypes")
