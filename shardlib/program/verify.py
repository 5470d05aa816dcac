"""Checks a program, and sizes what it holds: every step, on tensors without values, as some devices would run it.

A value that a layout describes has to have its local shape on each device, and its dtype; one that only the local form
of a rule knows gets its size here. What a collective is told of the members' sizes is what they hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardlib.aten.traits import has, is_view
from shardlib.bounded import Bounded
from shardlib.meshes.axis import Coords, position
from shardlib.program.check import ProgramError, refuse, said
from shardlib.program.check import faults as order_faults
from shardlib.program.steps import (
    Collective,
    Compute,
    Copy,
    Program,
    Start,
    Step,
    Var,
    makes,
    reads,
    rebuild,
    syms,
)
from shardlib.program.sym import Sym
from shardlib.scalar import Scalar

Shape = tuple[int, ...]
_DEVICES = 8  # that are looked at, of those that hold different pieces
STRICT = False  # whether what torch says of tensors without values is law: it is not always what a kernel makes


def verify(program: Program) -> Program:
    """The program, with the size of every value; raises `ProgramError`, with all faults, where it cannot run."""
    faults = list(order_faults(program))
    found = _Found()
    if not faults:
        with _disable_current_modes():  # which are to see what runs, and nothing of this
            for coords in _devices(program):
                faults += _Device(program, coords, found).run()
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


class Local(NamedTuple):
    """A tensor as one device has it, without values; `own` is whether it shows no memory of an operand."""

    shape: Shape
    stride: tuple[int, ...]
    dtype: torch.dtype
    own: bool = True

    @staticmethod
    def dense(shape: Sequence[int], dtype: torch.dtype) -> Local:
        return Local(tuple(shape), tuple(math.prod(shape[d + 1 :]) for d in range(len(shape))), dtype)

    @staticmethod
    def of(x: Tensor, operands: Collection[int]) -> Local:
        return Local(tuple(x.shape), x.stride(), x.dtype, x.untyped_storage()._cdata not in operands)


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


class _Device:
    """One device, on which the program runs without values."""

    def __init__(self, program: Program, coords: Coords, found: _Found) -> None:
        self.program, self.found = program, found
        self.coords = dict.fromkeys(program.mesh.axes, 0) | dict(coords)
        self.there: dict[Var, Local | None] = {}  # None: nobody knows its shape
        self.faults: list[str] = []

    def run(self) -> list[str]:
        for var in self.program.inputs:
            assert var.layout is not None, f"{var} is an input"
            self.there[var] = Local.dense(var.layout.local_shape(self.coords), var.dtype)
        for var, tensor in self.program.captured:
            self.there[var] = Local.dense(tensor.shape, var.dtype)
        for step in self.program.steps:
            if isinstance(step, Start):
                for c in step.moves:
                    self.keep(c, c.out, self.collective(c))
            elif isinstance(step, Copy):
                self.there[step.out] = self.there[step.source]
            elif isinstance(step, Compute):
                made = self.compute(step)
                for i, out in enumerate(step.outs):
                    if out is not None:
                        self.keep(step, out, made[i] if i < len(made) else None)
        return self.faults

    def keep(self, step: Compute | Collective, var: Var, x: Local | None) -> None:
        if isinstance(step, Collective) and "shapes" in step.params and x is not None:
            self.found.note(var, x)  # what goes round has the shape that it has at home
        elif var.layout is not None:
            want = Local.dense(var.layout.local_shape(self.coords), var.dtype)
            if STRICT and x is not None and x.shape != want.shape:
                where = f"{said(step)} makes {list(x.shape)} on {_device(self.coords)}"
                self.faults.append(f"{where}, {var} is [{var.layout}]: {list(want.shape)}")
            elif STRICT and x is not None and x.dtype != want.dtype and not _differs(step):
                self.faults.append(f"{said(step)} makes {x.dtype}, {var} is {var.dtype}")
            x = want if x is None or x.shape != want.shape else Local(x.shape, x.stride, want.dtype)
        elif x is not None:
            self.found.note(var, x)
        self.there[var] = x

    def compute(self, step: Compute) -> Sequence[Local | None]:
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
                self.faults.append(f"{said(step)} on {_device(self.coords)}: {str(error).partition(chr(10))[0]}")
            made = ()
        if made and made[0] is not None and made[0].own and step.over is None and is_view(step.target):
            self.found.copies.add(step)
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

    def collective(self, step: Collective) -> Local | None:
        source = self.there[step.source]
        if source is None:
            return None
        told = rebuild(step.params, lambda x: x.at(self.coords) if isinstance(x, Sym) else x)
        at, n = position(self.coords, step.axes), math.prod(a.size for a in step.axes)
        try:
            return Local.dense(tuple(_RESULT[step.kind](source.shape, told, at, n)), source.dtype)
        except ProgramError as error:
            self.faults.append(f"{said(step)} on {_device(self.coords)}: {error}")
            return None


class _Number(NamedTuple):
    value: Any
    kind: type  # 1, 1.0 and True are equal


_MADE: Bounded[Any, tuple[Local | None, ...]] = Bounded(1 << 12)


def _made(target: Any, args: Any, kwargs: Any) -> tuple[Local | None, ...]:
    """What an op makes of tensors without values; nothing where torch cannot say."""

    operands: set[int] = set()

    def given(x: Any) -> Any:
        if isinstance(x, Local):
            tensor = torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")
            operands.add(tensor.untyped_storage()._cdata)
            return tensor
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
    return tuple(Local.of(x, operands) if isinstance(x, Tensor) else None for x in every)


def _acts(target: Any) -> bool:
    """Whether an op may do something though it gets no tensor: draw a number, print a text."""
    known = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return not known or torch.Tag.nondeterministic_seeded in target.tags


def _differs(step: Compute | Collective) -> bool:
    """Whether the dtypes of its results are others on other kinds of devices."""
    return isinstance(step, Compute) and has(step.target, "other dtypes")


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


def _device(coords: Coords) -> str:
    return " ".join(f"{name}={i}" for name, i in coords.items()) or "the one device"
