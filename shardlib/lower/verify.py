"""Checks a program, and sizes what it holds: every step, on tensors without values, as some devices would run it.

A value that a layout describes has to have its local shape on each device, and its dtype; one that only the local form
of a rule knows gets its size here. Each value is made once, before it is read; what a collective is told of the
members' sizes is what they hold; a reduction settles what was pending over its axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardlib.aten.traits import has
from shardlib.bounded import Bounded
from shardlib.lower.program import Collective, Instr, Program, Step, Var, reads, rebuild, syms
from shardlib.lower.sym import Sym
from shardlib.meshes.axis import Axis, Coords, position
from shardlib.rules.rule import Meta
from shardlib.scalar import Scalar

Shape = tuple[int, ...]
_DEVICES = 8  # that are looked at, of those that hold different pieces
STRICT = False  # whether what torch says of tensors without values is law: it is not always what a kernel makes


class ProgramError(AssertionError):
    """A program that a stage should not have made."""


def verify(program: Program) -> Program:
    """The program, with the size of every value; raises `ProgramError`, with all faults, where it cannot run."""
    faults = list(_order(program))
    if not faults:
        with _disable_current_modes():  # which are to see what runs, and nothing of this
            for coords in _devices(program):
                faults += _Device(program, coords).run()
    if faults:
        raise ProgramError("\n  * ".join(["a program is wrong:", *dict.fromkeys(faults)]))
    return program


def _order(program: Program) -> Iterator[str]:
    """What is read before it is made, or made twice; who is in a group, and what it is told."""
    made = {*program.inputs, *(v for v, _ in program.captured)}
    if len(made) < len(program.inputs) + len(program.captured):
        yield "an input stands twice"
    for step in program.steps:
        yield from (f"{_said(step)} reads {v}, which is not made yet" for v in reads(step) if v not in made)
        for out in step.outs:
            if out in made:
                yield f"{_said(step)} makes {out}, which is there"
            if out is not None:
                made.add(out)
        if isinstance(step, Collective):
            yield from (f"{_said(step)} {fault}" for fault in _group(program, step))
    yield from (
        f"{v} is a result, and nothing makes it" for v in program.outputs if isinstance(v, Var) and v not in made
    )


def _group(program: Program, step: Collective) -> Iterator[str]:
    """Faults of a collective's group: parts of mesh axes that do not overlap; and of what it does to a pending sum."""
    sizes = program.mesh.axes
    primes = [p for a in step.axes for p in a.primes()]
    if any(sizes.get(a.name) != a.of for a in step.axes) or len(set(primes)) < len(primes):
        yield "goes over axes that are none of the mesh's, or over one twice"
    source, out = step.source.layout, step.out.layout
    if source is None or out is None:
        return
    owed, left = ({p for a in x.pending_axes for p in a.primes()} for x in (source, out))
    settles = set(primes) if step.kind in ("all_reduce", "reduce_scatter") else set()
    if owed - settles != left:
        yield f"leaves pending over {_axes(left)} what was pending over {_axes(owed)}"


def _axes(axes: set[Axis]) -> str:
    return " ".join(sorted(map(str, axes))) or "nothing"


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
        yield from (v for v in step.outs if v is not None)


class _Device:
    """One device, on which the program runs without values."""

    def __init__(self, program: Program, coords: Coords) -> None:
        self.program = program
        self.coords = dict.fromkeys(program.mesh.axes, 0) | dict(coords)
        self.there: dict[Var, Meta | None] = {}  # None: nobody knows its shape
        self.faults: list[str] = []

    def run(self) -> list[str]:
        for var in self.program.inputs:
            assert var.layout is not None, f"{var} is an input"
            self.there[var] = Meta(tuple(var.layout.local_shape(self.coords)), var.dtype)
        for var, tensor in self.program.captured:
            self.there[var] = Meta(tuple(tensor.shape), var.dtype)
        for step in self.program.steps:
            made = self.collective(step) if isinstance(step, Collective) else self.instr(step)
            for i, out in enumerate(step.outs):
                if out is not None:
                    self.keep(step, out, made[i] if i < len(made) else None)
        return self.faults

    def keep(self, step: Step, var: Var, x: Meta | None) -> None:
        if isinstance(step, Collective) and "shapes" in step.params and x is not None:
            var.numel = max(var.numel, math.prod(x.shape))  # what goes round has the shape that it has at home
        elif var.layout is not None:
            said = Meta(tuple(var.layout.local_shape(self.coords)), var.dtype)
            if STRICT and x is not None and x.shape != said.shape:
                where = f"{_said(step)} makes {list(x.shape)} on {_device(self.coords)}"
                self.faults.append(f"{where}, {var} is [{var.layout}]: {list(said.shape)}")
            elif STRICT and x is not None and x.dtype != said.dtype and not _differs(step):
                self.faults.append(f"{_said(step)} makes {x.dtype}, {var} is {var.dtype}")
            x = said
        elif x is not None:
            var.numel, var.dtype = max(var.numel, math.prod(x.shape)), x.dtype
        self.there[var] = x

    def instr(self, step: Instr) -> Sequence[Meta | None]:
        operands = [self.there[v] for v in reads(step)]
        if None in operands or (not operands and _acts(step.target)):
            return [None] * len(step.outs)
        args, kwargs = self.here(step.args), self.here(step.kwargs)
        key = (step.target, args, kwargs, torch.get_default_dtype())
        try:
            if (made := _MADE.get(key)) is None:
                made = _MADE[key] = _made(*key[:3])
        except _REFUSALS as error:
            if STRICT:
                self.faults.append(f"{_said(step)} on {_device(self.coords)}: {str(error).partition(chr(10))[0]}")
            made = ()
        return made or [None] * len(step.outs)

    def here(self, x: Any) -> Any:
        """Arguments as they are on this device, as a key: numbers with their types, lists and dicts as tuples."""
        if isinstance(x, Var):
            return self.there[x]
        if isinstance(x, tuple | list):
            return tuple(map(self.here, x))
        if isinstance(x, dict):
            return tuple((k, self.here(y)) for k, y in x.items())
        if isinstance(x, Sym):
            return self.here(x.at(self.coords))
        if isinstance(x, Scalar):
            return _Number(x.hint, type(x.hint))
        return _Number(x, type(x)) if isinstance(x, bool | float) else x

    def collective(self, step: Collective) -> Sequence[Meta | None]:
        source = self.there[step.source]
        if source is None:
            return [None]
        told = rebuild(step.params, lambda x: x.at(self.coords) if isinstance(x, Sym) else x)
        at, n = position(self.coords, step.axes), math.prod(a.size for a in step.axes)
        try:
            return [Meta(tuple(_RESULT[step.kind](source.shape, told, at, n)), source.dtype)]
        except ProgramError as error:
            self.faults.append(f"{_said(step)} on {_device(self.coords)}: {error}")
            return [None]


class _Number(NamedTuple):
    value: Any
    kind: type  # 1, 1.0 and True are equal


_MADE: Bounded[Any, tuple[Meta | None, ...]] = Bounded(1 << 12)


def _made(target: Any, args: Any, kwargs: Any) -> tuple[Meta | None, ...]:
    """What an op makes of tensors without values; nothing where torch cannot say."""

    def given(x: Any) -> Any:
        if isinstance(x, Meta):
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        if isinstance(x, _Number):
            return x.value
        if isinstance(x, tuple):
            return [given(y) for y in x]
        return torch.device("meta") if isinstance(x, torch.device) else x

    try:
        out = target(*map(given, args), **{k: given(x) for k, x in kwargs})
    except NotImplementedError:  # no kernel for tensors without values: nothing is known of its results
        return ()
    if has(target, "other shapes"):
        return ()
    every = out if isinstance(out, tuple | list) else (out,)
    return tuple(Meta(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in every)


def _acts(target: Any) -> bool:
    """Whether an op may do something though it gets no tensor: draw a number, print a text."""
    known = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return not known or torch.Tag.nondeterministic_seeded in target.tags


def _differs(step: Step) -> bool:
    """Whether the dtypes of its results are others on other kinds of devices."""
    return isinstance(step, Instr) and has(step.target, "other dtypes")


# What each kind of collective makes on one member: of its shape, what it is told, its position, and their number.


def _expect(what: str, have: object, said: object) -> None:
    if have != said:
        raise ProgramError(f"{what} {have}, and it is told {said}")


def _with(shape: Shape, dim: int, n: int) -> Shape:
    return (*shape[:dim], n, *shape[dim + 1 :])


def _all_gather(shape: Shape, told: Mapping[str, Any], at: int, n: int) -> Shape:
    dim, sizes = told["dim"], told["sizes"]
    _expect("it has so many members:", n, len(sizes))
    _expect("a piece has the length", shape[dim], sizes[at])
    return _with(shape, dim, sum(sizes))


def _reduce_scatter(shape: Shape, told: Mapping[str, Any], at: int, n: int) -> Shape:
    dim, sizes = told["dim"], told["sizes"]
    _expect("it has so many members:", n, len(sizes))
    _expect("the whole has the length", shape[dim], sum(sizes))
    return _with(shape, dim, sizes[at])


def _all_to_all(shape: Shape, told: Mapping[str, Any], at: int, n: int) -> Shape:
    split, splits, concat, concats = (told[f"{x}_{y}"] for x in ("split", "concat") for y in ("dim", "sizes"))
    _expect("it has so many members:", n, len(splits))
    if not concats:  # who sends how much to whom
        _expect("a piece has the length", shape[split], sum(splits[at]))
        return _with(shape, split, sum(row[at] for row in splits))
    _expect("a piece has the length", shape[split], sum(splits))
    _expect("a piece has the length", shape[concat], concats[at])
    return _with(_with(shape, split, splits[at]), concat, sum(concats))


def _ppermute(shape: Shape, told: Mapping[str, Any], at: int, n: int) -> Shape:
    source = {dst: src for src, dst in told["pairs"]}
    if any(not 0 <= i < n for pair in told["pairs"] for i in pair) or len(source) < len(told["pairs"]):
        raise ProgramError(f"it is told to send by {told['pairs']} among {n} members")
    if "shapes" not in told:
        return shape
    _expect("a piece has the shape", list(shape), list(told["shapes"][at]))
    return tuple(told["shapes"][source.get(at, at)])


# What ops raise of arguments: a kernel for tensors without values may be stricter than the one that will run.
_REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, AssertionError, ArithmeticError)
_RESULT: Mapping[str, Callable[[Shape, Mapping[str, Any], int, int], Shape]] = {
    "all_reduce": lambda shape, told, at, n: shape,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
}


def _said(step: Step) -> str:
    outs = ", ".join("_" if v is None else str(v) for v in step.outs)
    return f"{outs} = {step.kind if isinstance(step, Collective) else step.target}"


def _device(coords: Coords) -> str:
    return " ".join(f"{name}={i}" for name, i in coords.items()) or "the one device"
