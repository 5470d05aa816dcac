"""Generates straight-line Python source over plain tensors from a program, for some devices of the mesh.

For one device the source is that device's program. For all devices of a virtual mesh it is one function that runs
segment by segment between collectives, device after device. A value that is provably equal on several devices is
computed once and shared, and not written over.
"""

from __future__ import annotations

import copy
import functools
import itertools
import keyword
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.compiler.codegen.op_callables import callable_of
from shardlib.compiler.codegen.profiler_ranges import op_label, ranged
from shardlib.compiler.program.buffers import owners_in, read_only
from shardlib.compiler.program.inplace_ops import written
from shardlib.compiler.program.replication import Primes, primes, varying
from shardlib.compiler.program.steps import Collective, Compute, Copy, Free, Program, Start, Step, Var, makes, reads
from shardlib.compiler.program.sym_int import Sym
from shardlib.core.aten.op_traits import returns_list
from shardlib.core.call_scalar import Scalar
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of
from shardlib.sharding.mesh.axis import Axis, Coords, first_replicas, group_size, member_coords
from shardlib.sharding.mesh.mesh import Mesh


@dataclass
class Source:
    """Generated code: `text` defines `program(pieces, leaves)`, run in `namespace`.

    `pieces` holds the shards of each input, `leaves` the leaves of the call, and the code reads those in `numbers`.
    """

    text: str
    namespace: dict[str, Any]
    numbers: tuple[int, ...] = ()

    def compile(self) -> Callable[..., tuple[Any, ...]]:
        exec(compile(self.text, "<shardlib program>", "exec"), self.namespace)
        function: Callable[..., tuple[Any, ...]] = self.namespace["program"]
        return function


@dataclass
class Generator:
    """Writes the source for `devices`."""

    program: Program
    devices: Sequence[Coords]
    share: bool = True
    ranges: bool = False  # wrap steps in ranges of the profiler
    namespace: dict[str, Any] = field(default_factory=lambda: {"math": math})

    def __post_init__(self) -> None:
        self.varies: dict[Var, Primes] = {}
        if len(self.devices) > 1:
            everything = None if self.share else primes(self._mesh_axes())
            self.varies = varying(self.program, everything)
        self._names: dict[tuple[Var, tuple[int, ...]], str] = {}
        self._names_on = {id(coords): dict[Var, str]() for coords in self.devices}  # by the id of coords
        self._places: dict[Primes, tuple[frozenset[int], frozenset[int]]] = {}  # see `_places_along`
        self._taken: dict[str, int] = {"pieces": 1, "leaves": 1, "program": 1, "float": 1, "math": 1}
        self._numbers: dict[int, str] = {}  # leaf of the call -> its name
        self._bound: dict[Any, str] = {}
        self.lines: list[str] = []
        self.flying: dict[tuple[Var, ...], list[str]] = {}  # results of a message -> the lines that wait for it
        self._shared = self._shared_reads() if self.varies else {}
        self._owner = owners_in(self.program) if self._shared else {}
        self._segments = 0
        self.read_only = read_only(self.program)

    def _shared_reads(self) -> dict[Var, float]:
        """Maps memory that several devices share to the last segment that reads it; no step may write over it before.

        Within a segment devices run one after the other, so a later one may still read what an earlier one has read.
        """
        owner = owners_in(self.program)
        shared: dict[Var, float] = {} if self.share else dict.fromkeys(self.program.inputs, math.inf)
        segment = 0
        for step in self.program.steps:
            segment += isinstance(step, Start)
            for var in reads(step) if not isinstance(step, Start) else ():
                root = owner.get(var, var)
                if any(self.varies.get(out, ()) != self.varies.get(root, ()) for out in makes(step)):
                    shared[root] = max(segment, shared.get(root, 0))
        return shared

    def _over(self, step: Compute) -> tuple[int | None, ...]:
        """Returns the operands whose memory results can take on these devices."""
        if not self._shared or not step.over:
            return step.over
        roots = (None if k is None else self._owner.get(step.args[k], step.args[k]) for k in step.over)
        pairs = zip(step.over, roots, strict=True)
        over = tuple(k if x is not None and self._shared.get(x, -1) < self._segments else None for k, x in pairs)
        return over if any(k is not None for k in over) else ()

    def _mesh_axes(self) -> Iterable[Axis]:
        sizes: dict[str, int] = {}
        for c in self.devices:
            for name, i in c.items():
                sizes[name] = max(sizes.get(name, 0), i + 1)
        return (Axis(name, n) for name, n in sizes.items())

    # Names ----------------------------------------------------------------------------------------------------------

    def name(self, var: Var, coords: Coords) -> str:
        """Returns the identifier of `var` on the device at `coords`."""
        names = self._names_on.get(id(coords), {})
        if (name := names.get(var)) is not None:
            return name
        key = (var, tuple(a.coord(coords) for a in self.varies.get(var, ())))
        if (name := self._names.get(key)) is None:
            base = re.sub(r"\W", "_", var.name)
            if not base.isidentifier() or keyword.iskeyword(base):
                base = f"v_{base}"
            if key[1]:
                base += "_d" + "".join(map(str, key[1]))
            name = self._names[key] = self.fresh(base)
        names[var] = name
        return name

    def fresh(self, base: str) -> str:
        """Returns an unused identifier."""
        base = re.sub(r"\W", "_", base)
        n = self._taken.get(base, 0)
        self._taken[base] = n + 1
        return self.fresh(f"{base}_{n}") if n else base

    def bind(self, value: Any, hint: str) -> str:
        """Returns a global name for an object that has no literal."""
        key = id(value)
        if (name := self._bound.get(key)) is None:
            name = self._bound[key] = self.fresh(hint)
            self.namespace[name] = value
        return name

    # Steps ----------------------------------------------------------------------------------------------------------

    def generate(self, communicate: Callable[[Generator, Start], None]) -> Source:
        """Returns the source; `communicate` writes a message's start, and puts the lines that wait into `flying`."""
        segment: list[Step] = []
        for step in self.program.steps:
            if isinstance(step, Start):
                self._segment(segment)
                segment = []
                self._segments += 1
                communicate(self, step)
            else:
                segment.append(step)
        self._segment(segment)
        return Source(self._render(), self.namespace, tuple(self._numbers))

    def _segment(self, steps: Sequence[Step]) -> None:
        """Writes the steps between collectives, device after device; shared values are computed once, freed last."""
        units = [one for s in steps for one in ([Free((v,)) for v in s.vars] if isinstance(s, Free) else [s])]
        runs_on = [self._runs_on(unit) for unit in units]
        for d, coords in enumerate(self.devices):
            for unit, devices in zip(units, runs_on, strict=True):
                if d in devices:
                    self._step(unit, coords)

    def _runs_on(self, step: Step) -> frozenset[int]:
        """Returns the devices, by position, for which a step is written: the first of equal ones; for a `Free` the
        last."""
        places = self._places_along(self._axes(step))
        return places[1] if isinstance(step, Free) else places[0]

    def _places_along(self, axes: Primes) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the first and the last device at each place along these axes."""
        if (places := self._places.get(axes)) is None:
            at = [tuple(a.coord(coords) for a in axes) for coords in self.devices]
            last = {place: d for d, place in enumerate(at)}
            first = {place: d for d, place in reversed([*enumerate(at)])}
            places = self._places[axes] = frozenset(first.values()), frozenset(last.values())
        return places

    def _axes(self, step: Step) -> Primes:
        """Returns the axes along which devices run a step differently."""
        about = step.vars if isinstance(step, Free) else makes(step) or tuple(reads(step))
        different = {self.varies.get(v, ()) for v in about}
        return different.pop() if len(different) == 1 else primes(itertools.chain.from_iterable(different))

    def _step(self, step: Step, coords: Coords) -> None:
        if isinstance(step, Compute):
            self._call(step, coords)
        elif isinstance(step, Copy):
            self.lines.append(f"{self.name(step.out, coords)} = {self.name(step.source, coords)}.clone()")
        elif isinstance(step, Free):
            freed = ", ".join(self.name(v, coords) for v in step.vars)
            self.lines.append(f"del {freed}")
        elif (landing := self.flying.pop(step.outs, None)) is not None:
            self.lines += landing

    def _call(self, step: Compute, coords: Coords) -> None:
        over = self._over(step)
        target, operands = written(step, over) if over else (step.target, step.args)
        args = [self.literal(a, coords) for a in operands]
        args += [f"{k}={self.literal(v, coords)}" for k, v in step.kwargs.items()]
        left = ", ".join("_" if v is None else self.name(v, coords) for v in step.outs)
        function = callable_of(target)
        if self.ranges:
            function = ranged(function, op_label(_short(step.target), step))
        call = f"{self.bind(function, _short(target))}({', '.join(args)})"
        if len(step.outs) == 1 and isinstance(step.target, OpOverload):
            left += "," if returns_list(step.target) else ""
        self.lines.append(f"{left} = {call}" if step.outs else call)

    def literal(self, x: Any, coords: Coords) -> str:
        if isinstance(x, Var):
            return self.name(x, coords)
        if isinstance(x, Sym):
            return self.literal(x.at(coords), coords)
        if isinstance(x, Scalar):
            return x.text(self._number)
        if isinstance(x, tuple | list):
            return "[" + ", ".join(self.literal(y, coords) for y in x) + "]"
        if x is None or isinstance(x, bool | int | str) or (isinstance(x, float) and x - x == 0):
            return repr(x)
        return self.bind(x, "number" if isinstance(x, complex) else str(x).replace("torch.", ""))

    def _number(self, scalar: Scalar) -> str:
        if scalar.leaf not in self._numbers:
            base = re.sub(r"\W", "_", scalar.name)
            self._numbers[scalar.leaf] = self.fresh(base if base.isidentifier() else f"n_{base}")
        return self._numbers[scalar.leaf]

    def members(self, step: Collective) -> list[list[Coords]]:
        """Returns the groups of a collective among the devices, each as its members' coordinates in group order.

        Groups with equal sources and results are listed once.
        """
        n = group_size(step.axes)
        group = set(primes(step.axes))
        varying = dict.fromkeys((*self.varies.get(step.source, ()), *self.varies.get(step.out, ())))
        rest = tuple(a for a in varying if a not in group)
        firsts = dict.fromkeys(first_replicas(self.devices, rest))
        return [[member_coords(self.devices[d], step.axes, i) for i in range(n)] for d in firsts]

    # Text -----------------------------------------------------------------------------------------------------------

    def _render(self) -> str:
        lines = ["def program(pieces, leaves=()):"]
        for i, var in enumerate(self.program.inputs):
            first: dict[str, int] = {}  # name -> first device with that shard
            for d, coords in enumerate(self.devices):
                first.setdefault(self.name(var, coords), d)
            if len(first) == len(self.devices):
                lines.append(f"    {', '.join(first)}, = pieces[{i}]")
            else:
                lines += [f"    {name} = pieces[{i}][{d}]" for name, d in first.items()]
        for var, tensor in self.program.captured:
            placed = _place_captured(tensor, self.program.mesh)
            self.namespace |= {self.name(var, c): placed for c in self.devices}
        results = []
        for out in self.program.outputs:
            if isinstance(out, Var):
                results.append(f"({', '.join(self.name(out, c) for c in self.devices)},)")
            elif isinstance(out, Scalar):
                results.append(out.text(self._number))
            elif isinstance(out, set | bytearray):  # each call has its own
                results.append(f"{self.bind(copy.copy, 'copy')}({self.bind(out, 'constant')})")
            else:
                results.append(self.bind(out, "constant"))
        ending = f"    return ({', '.join(results)}{',' if results else ''})"
        lines += [f"    {name} = leaves[{leaf}]" for leaf, name in self._numbers.items()]
        return "\n".join([*lines, *(f"    {line}" for line in self.lines), ending, ""])


def _place_captured(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Copies a tensor of the function to the mesh's device, once and not at every call."""
    return tensor.to(mesh.device)


def _short(target: Any) -> str:
    target = getattr(target, "func", target)  # of a partial
    return _bare_name(target) if isinstance(target, OpOverload) else str(getattr(target, "__name__", "op"))


@functools.cache
def _bare_name(target: OpOverload) -> str:
    """Returns the name of an op without its namespace."""
    return str(schema_of(target).name).split("::")[-1]
