"""The per-device program: steps over local tensors.

One program serves every device of the mesh: a number that differs by device is a `Sym`, evaluated when code is
generated. A collective names mesh axes, not ranks. Programs and steps are frozen: a pass makes another program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.program.nested_args import leaves, list_leaves, rebuild
from shardlib.compiler.program.sym_int import Sym
from shardlib.core.aten.op_traits import is_view
from shardlib.core.cached import lazy_property
from shardlib.core.source_lines import Line, Module
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Var:
    """One local tensor: its `layout` gives the local shape on every device; it is a shard of `value`.

    An intermediate of a rule's local form has no layout, but the `shape` of the fullest device that was looked at.
    `host`: the tensor lives in the host's memory. `part` is (i, n) if it holds part i of n of the shard's rows.
    `elsewhere`: an input that another stage of a pipeline holds; it takes no memory on these devices.
    """

    name: str
    layout: Layout | None
    dtype: torch.dtype
    value: Value | None = None
    placement: Any = None  # (sharding, partial sums)
    shape: tuple[int, ...] | None = None
    host: bool = False
    part: tuple[int, int] | None = None
    elsewhere: bool = False

    @lazy_property
    def numel(self) -> int:
        """Elements on the fullest device; 0 if the shape is unknown."""
        if self.layout is not None:
            return self.layout.max_local_numel()
        return 0 if self.shape is None else math.prod(self.shape)

    @lazy_property
    def nbytes(self) -> int:
        return 0 if self.elsewhere else self.numel * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"%{self.name}"


_OURS = ("aten", "prims", "shardlib")  # namespaces whose schemas can be trusted


@dataclass(frozen=True, eq=False)
class Compute:
    """One call of an op on local tensors.

    `flops` are those of the busiest device; if devices do unequal work, each does its part of `work`, a number that
    differs by device. `over` gives for each result the operand, by position, whose memory it takes (empty: none does).
    `copies` marks a view that copies, since the strides of its operand do not allow a view. `inside` are the modules
    that the call belongs to.
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
    def arg_leaves(self) -> tuple[Var | Sym, ...]:
        """The variables and the `Sym`s among its arguments, in order."""
        return tuple(list_leaves((*self.args, *self.kwargs.values()) if self.kwargs else self.args, (Var, Sym)))

    @lazy_property
    def operands(self) -> tuple[Var, ...]:
        """The variables among its arguments, in order."""
        return tuple([x for x in self.arg_leaves if isinstance(x, Var)])

    @lazy_property
    def out_vars(self) -> tuple[Var, ...]:
        """The results that are tensors."""
        return tuple([v for v in self.outs if v is not None])

    @lazy_property
    def overwritten(self) -> dict[Var | None, Var]:
        """Maps results to the operands whose memory they take."""
        return {out: self.args[k] for out, k in zip(self.outs, self.over, strict=False) if k is not None}

    @lazy_property
    def is_pure(self) -> bool:
        """True if a call has no side effects and always computes the same; foreign ops count as impure."""
        if not self.out_vars or not isinstance(self.target, OpOverload):
            return bool(self.out_vars)
        drawn = torch.Tag.nondeterministic_seeded in self.target.tags
        return not drawn and self.target.namespace in _OURS and not schema_of(self.target).is_mutable

    @lazy_property
    def shown(self) -> Mapping[Var | None, Var]:
        """Maps results to the operands whose memory they take or view."""
        if is_view(self.target):
            return dict.fromkeys(self.out_vars, self.operands[0])
        return self.overwritten if self.over else {}

    @lazy_property
    def has_partial_sums(self) -> bool:
        """True if an operand or a result is a partial sum."""
        return any(v.layout is not None and v.layout.pending for v in (*self.operands, *self.out_vars))


@dataclass(frozen=True, eq=False)
class Asked:
    """The reader that needs a value elsewhere: an op, a result by its position, or the whole program (None)."""

    by: Op | int | None


@dataclass(frozen=True, eq=False)
class Inside:
    """The op whose local form communicates, over these factors; the name of what is `moved`, and `how`."""

    op: Op
    factors: tuple[str, ...]
    moved: str = ""
    how: str = "passed round"


@dataclass(frozen=True, eq=False)
class Collective:
    """One communication: `kind` over `axes` on local tensor `source`; without axes, a copy to another tier of memory.

    `params` are the op's arguments (dims, and per-member sizes, which may be `Sym`s). `bytes` go on the wire per
    device. `reason` names the layouts that forced it.
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
    """Collectives of one kind over one group begin as one message; their results are in flight."""

    moves: tuple[Collective, ...]

    @property
    def first(self) -> Collective:
        return self.moves[0]

    @lazy_property
    def outs(self) -> tuple[Var, ...]:
        """The results, in flight until the `Wait`."""
        return tuple([c.out for c in self.moves])

    @lazy_property
    def sources(self) -> tuple[Var, ...]:
        """The tensors that are sent."""
        return tuple([c.source for c in self.moves])


@dataclass(frozen=True, eq=False)
class Wait:
    """All results of one `Start` have arrived."""

    outs: tuple[Var, ...]


@dataclass(frozen=True, eq=False)
class Free:
    """These variables are not read again."""

    vars: tuple[Var, ...]


@dataclass(frozen=True, eq=False)
class Copy:
    """A result that would view memory of another tensor gets its own."""

    source: Var
    out: Var


Step = Compute | Start | Wait | Free | Copy


@dataclass(frozen=True, eq=False)
class Program:
    """Steps in order; inputs and captured tensors as local variables; outputs (a variable, or a constant).

    `donated` are positions of inputs whose memory may be overwritten. `replaced` maps positions of inputs to outputs
    that become their new values; only these may take their memory. `varies` gives the mesh axes along which inputs
    without a layout differ. The first `owned` results (None: all) view no memory of arguments, captured tensors or
    each other.
    """

    mesh: Mesh
    steps: tuple[Step, ...] = ()
    inputs: tuple[Var, ...] = ()
    captured: tuple[tuple[Var, torch.Tensor], ...] = ()
    outputs: tuple[Any, ...] = ()
    donated: frozenset[int] = frozenset()
    varies: Mapping[Var, tuple[Axis, ...]] = field(default_factory=dict)
    owned_outputs: int | None = None
    replaced: Mapping[int, int] = field(default_factory=dict)

    @lazy_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives between devices, in the order in which they start."""
        return tuple(c for s in self.steps if isinstance(s, Start) for c in s.moves if c.kind not in TIERS)

    @lazy_property
    def copied(self) -> tuple[Collective, ...]:
        """All copies between the memories of the device and its host, in the order in which they start."""
        return tuple(c for s in self.steps if isinstance(s, Start) for c in s.moves if c.kind in TIERS)

    @lazy_property
    def entry_values(self) -> frozenset[Var]:
        """Inputs and captured tensors."""
        return frozenset((*self.inputs, *(v for v, _ in self.captured)))

    @property
    def results(self) -> Iterator[Var]:
        """The outputs that are tensors."""
        return (v for v in self.outputs if isinstance(v, Var))

    def with_vars(self, other: Mapping[Var, Var]) -> Program:
        """Returns the program with some variables replaced."""
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
    """Returns the steps of a collective that is waited for at once."""
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
    Compute: attrgetter("out_vars"),
    Start: _none,
    Wait: attrgetter("outs"),
    Free: _none,
    Copy: _one("out"),
    Collective: _one("out"),
}


def reads(step: Step | Collective) -> tuple[Var, ...]:
    """Returns the variables that a step, or a single collective, reads."""
    return _READS[type(step)](step)


def makes(step: Step | Collective) -> tuple[Var, ...]:
    """Returns the variables that can be read after a step, and not before."""
    return _MAKES[type(step)](step)


def syms(step: Step) -> Iterator[Sym]:
    if isinstance(step, Start):
        yield from leaves([c.params for c in step.moves], Sym)
    elif isinstance(step, Compute) and len(step.arg_leaves) > len(step.operands):
        yield from (x for x in step.arg_leaves if isinstance(x, Sym))


def swapped(step: Step, other: Mapping[Var, Var]) -> Step:
    """Returns the step with some variables replaced."""
    replaced, changes = other.keys(), dict[str, Any]()

    def get(v: Var) -> Var:
        return other.get(v, v)

    if isinstance(step, Compute):
        if not replaced.isdisjoint(step.out_vars):
            changes["outs"] = tuple(v and get(v) for v in step.outs)
        if not replaced.isdisjoint(step.operands):
            args, kwargs = rebuild((step.args, step.kwargs), lambda x: get(x) if isinstance(x, Var) else x)
            changes |= {"args": args, "kwargs": kwargs}
        return replace(step, **changes) if changes else step
    if isinstance(step, Start):
        if replaced.isdisjoint(step.outs) and replaced.isdisjoint(step.sources):
            return step
        return Start(tuple(replace(c, source=get(c.source), out=get(c.out)) for c in step.moves))
    if isinstance(step, Wait):
        return step if replaced.isdisjoint(step.outs) else Wait(tuple(map(get, step.outs)))
    if isinstance(step, Free):
        return step if replaced.isdisjoint(step.vars) else Free(tuple(map(get, step.vars)))
    return Copy(get(step.source), get(step.out))
