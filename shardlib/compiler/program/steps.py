"""The per-device program: steps over local tensors.

One program serves every device of the mesh: whatever differs by device is a `Sym`, evaluated when code is generated. A
collective names mesh axes, not ranks. All of it is frozen: a pass makes another program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.program.nested_args import found, leaves, rebuild
from shardlib.compiler.program.sym_int import Sym
from shardlib.core.aten.op_traits import is_view
from shardlib.core.cached import lazy_property
from shardlib.core.source_lines import Line, Module
from shardlib.core.torch_private import OpOverload, schema_of
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Var:
    """One local tensor: `layout` says its local shape on every device; `value` is what it is a piece of.

    What only the local form of a rule knows has no layout, but the `shape` of the fullest device that was looked at.
    `host`: it lives in the host's memory. `part`: it is the first, second, ... of so many parts of it.
    """

    name: str
    layout: Layout | None
    dtype: torch.dtype
    value: Value | None = None
    placement: Any = None  # (cut, what is owed)
    shape: tuple[int, ...] | None = None
    host: bool = False
    part: tuple[int, int] | None = None

    @lazy_property
    def numel(self) -> int:
        """Elements on the fullest device; 0 while nobody knows the shape."""
        if self.layout is not None:
            return self.layout.max_local_numel()
        return 0 if self.shape is None else math.prod(self.shape)

    @lazy_property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"%{self.name}"


_OURS = ("aten", "prims", "shardlib")  # namespaces of ops that do what they say


@dataclass(frozen=True, eq=False)
class Compute:
    """One call of an op on local tensors.

    `flops` are those of the device that does most of it; where devices do not do the same, each does its part of
    `work`, a number that differs by device. `over`: for each result the operand, by position, whose memory it takes
    (empty: none takes any). `copies`: a view that is none, since the strides of its operand do not allow one. `inside`:
    the modules that it belongs to.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[Var | None, ...]
    line: Line | None = None
    backward: bool = False
    note: str = ""
    flops: float = 0.0
    work: Sym | None = None
    over: tuple[int | None, ...] = ()
    copies: bool = False
    inside: tuple[Module, ...] = ()

    @lazy_property
    def told(self) -> tuple[Var | Sym, ...]:
        """The variables, and the numbers that differ by device, among its arguments, in order."""
        return tuple(found((*self.args, *self.kwargs.values()) if self.kwargs else self.args, (Var, Sym)))

    @lazy_property
    def operands(self) -> tuple[Var, ...]:
        """The variables among its arguments, in order."""
        return tuple([x for x in self.told if isinstance(x, Var)])

    @lazy_property
    def made(self) -> tuple[Var, ...]:
        """The results that somebody may read."""
        return tuple([v for v in self.outs if v is not None])

    @lazy_property
    def overwritten(self) -> dict[Var | None, Var]:
        """The operands whose memory results take, by these."""
        return {out: self.args[k] for out, k in zip(self.outs, self.over, strict=False) if k is not None}

    @lazy_property
    def is_pure(self) -> bool:
        """Whether a call does nothing but to make values, the same ones each time; of others' ops nobody knows."""
        if not self.made or not isinstance(self.target, OpOverload):
            return bool(self.made)
        drawn = torch.Tag.nondeterministic_seeded in self.target.tags
        return not drawn and self.target.namespace in _OURS and not schema_of(self.target).is_mutable

    @lazy_property
    def shown(self) -> Mapping[Var | None, Var]:
        """The operands whose memory results have, taken or shown, by these."""
        if is_view(self.target):
            return dict.fromkeys(self.made, self.operands[0])
        return self.overwritten if self.over else {}

    @lazy_property
    def owes(self) -> bool:
        """Whether a sum is pending in what it reads or makes."""
        return any(v.layout is not None and v.layout.pending for v in (*self.operands, *self.made))


@dataclass(frozen=True, eq=False)
class Asked:
    """Why a value moves: an op, a result by its number, or the program as a whole (None) wants it elsewhere."""

    by: Op | int | None


@dataclass(frozen=True, eq=False)
class Inside:
    """Why an op communicates by itself: its local form does, over these factors; `what` it moves, and `how`."""

    op: Op
    factors: tuple[str, ...]
    what: str = ""
    how: str = "passed round"


@dataclass(frozen=True, eq=False)
class Collective:
    """One communication: `kind` over `axes` on local tensor `source`; or, over none, a copy to another tier of memory.

    `params` are the op's arguments (dims, and per-member sizes, which may be `Sym`s); `bytes` go on the wire per
    device; `reason` says which layouts forced it.
    """

    kind: str
    axes: tuple[Axis, ...]
    source: Var
    out: Var
    params: Mapping[str, Any]
    bytes: float
    reduce: str = "sum"
    line: Line | None = None
    backward: bool = False
    reason: str = ""
    because: Asked | Inside | None = None

    @property
    def where(self) -> str:
        return f"{self.line[0]}:{self.line[1]}" if self.line else "?"

    def __str__(self) -> str:
        axes = ", ".join(map(str, self.axes))
        return f"{self.kind}[{axes}] {self.source.name}: {self.bytes:,.0f} bytes at {self.where} ({self.reason})"


@dataclass(frozen=True, eq=False)
class Start:
    """Collectives of one kind over one group begin, as one message: their results are in flight."""

    moves: tuple[Collective, ...]

    @property
    def first(self) -> Collective:
        return self.moves[0]

    @lazy_property
    def outs(self) -> tuple[Var, ...]:
        """What is in flight then."""
        return tuple([c.out for c in self.moves])

    @lazy_property
    def sources(self) -> tuple[Var, ...]:
        """What is sent."""
        return tuple([c.source for c in self.moves])


@dataclass(frozen=True, eq=False)
class Wait:
    """What began together is there: all results of one `Start`."""

    outs: tuple[Var, ...]


@dataclass(frozen=True, eq=False)
class Free:
    """Nobody reads these again."""

    vars: tuple[Var, ...]


@dataclass(frozen=True, eq=False)
class Copy:
    """A result that would show memory of somebody else gets its own."""

    source: Var
    out: Var


Step = Compute | Start | Wait | Free | Copy


@dataclass(frozen=True, eq=False)
class Program:
    """Steps in order; inputs and captured tensors as local variables; outputs (a variable, or a constant).

    `donated` are the positions of inputs whose memory may be overwritten; `replaced`, of those that a call overwrites
    itself: their memory only has the output, by position, that comes to stand there. `varies` says where inputs differ
    of which no layout does. So many results, `owned` (None: all), show no memory of arguments, captured tensors or each
    other.
    """

    mesh: Mesh
    steps: tuple[Step, ...] = ()
    inputs: tuple[Var, ...] = ()
    captured: tuple[tuple[Var, torch.Tensor], ...] = ()
    outputs: tuple[Any, ...] = ()
    donated: frozenset[int] = frozenset()
    varies: Mapping[Var, tuple[Axis, ...]] = field(default_factory=dict)
    owned: int | None = None
    replaced: Mapping[int, int] = field(default_factory=dict)

    @lazy_property
    def collectives(self) -> tuple[Collective, ...]:
        """All between devices, in the order in which they start."""
        return tuple(c for s in self.steps if isinstance(s, Start) for c in s.moves if c.kind not in TIERS)

    @lazy_property
    def copied(self) -> tuple[Collective, ...]:
        """All copies between the memory of the device and that of its host, in the order in which they start."""
        return tuple(c for s in self.steps if isinstance(s, Start) for c in s.moves if c.kind in TIERS)

    @lazy_property
    def given(self) -> frozenset[Var]:
        """Inputs and captured tensors."""
        return frozenset((*self.inputs, *(v for v, _ in self.captured)))

    @property
    def results(self) -> Iterator[Var]:
        """The outputs that are tensors."""
        return (v for v in self.outputs if isinstance(v, Var))

    def with_vars(self, other: Mapping[Var, Var]) -> Program:
        """The same with other variables in place of some."""
        if not other:
            return self
        return replace(
            self,
            steps=tuple(swapped(s, other) for s in self.steps),
            inputs=tuple(other.get(v, v) for v in self.inputs),
            captured=tuple((other.get(v, v), x) for v, x in self.captured),
            outputs=tuple(other.get(x, x) if isinstance(x, Var) else x for x in self.outputs),
            varies={other.get(v, v): axes for v, axes in self.varies.items()},
        )


TIERS = ("to_host", "to_device")  # kinds of copies between tiers of memory


def together(c: Collective) -> tuple[Start, Wait]:
    """A collective that is waited for at once."""
    return Start((c,)), Wait((c.out,))


def _one(name: str) -> Callable[[Any], tuple[Var, ...]]:
    return lambda step: (getattr(step, name),)


def _none(step: Any) -> tuple[Var, ...]:
    return ()


_READS: Mapping[type, Callable[[Any], tuple[Var, ...]]] = {
    Compute: attrgetter("operands"),
    Start: attrgetter("sources"),
    Wait: _none,
    Free: _none,
    Copy: _one("source"),
    Collective: _one("source"),
}
_MAKES: Mapping[type, Callable[[Any], tuple[Var, ...]]] = {
    Compute: attrgetter("made"),
    Start: _none,
    Wait: attrgetter("outs"),
    Free: _none,
    Copy: _one("out"),
    Collective: _one("out"),
}


def reads(step: Step | Collective) -> tuple[Var, ...]:
    """What a step reads, or a collective by itself."""
    return _READS[type(step)](step)


def makes(step: Step | Collective) -> tuple[Var, ...]:
    """What is there when a step is done, and was not before."""
    return _MAKES[type(step)](step)


def syms(step: Step) -> Iterator[Sym]:
    if isinstance(step, Start):
        yield from leaves([c.params for c in step.moves], Sym)
    elif isinstance(step, Compute) and len(step.told) > len(step.operands):
        yield from (x for x in step.told if isinstance(x, Sym))


def swapped(step: Step, other: Mapping[Var, Var]) -> Step:
    """The step with other variables in place of some."""
    known, changes = other.keys(), dict[str, Any]()

    def get(v: Var) -> Var:
        return other.get(v, v)

    if isinstance(step, Compute):
        if not known.isdisjoint(step.made):
            changes["outs"] = tuple(v and get(v) for v in step.outs)
        if not known.isdisjoint(step.operands):
            args, kwargs = rebuild((step.args, step.kwargs), lambda x: get(x) if isinstance(x, Var) else x)
            changes |= {"args": args, "kwargs": kwargs}
        return replace(step, **changes) if changes else step
    if isinstance(step, Start):
        if known.isdisjoint(step.outs) and known.isdisjoint(step.sources):
            return step
        return Start(tuple(replace(c, source=get(c.source), out=get(c.out)) for c in step.moves))
    if isinstance(step, Wait):
        return step if known.isdisjoint(step.outs) else Wait(tuple(map(get, step.outs)))
    if isinstance(step, Free):
        return step if known.isdisjoint(step.vars) else Free(tuple(map(get, step.vars)))
    return Copy(get(step.source), get(step.out))
