"""The per-device program: instructions over local tensors.

One program serves every device of the mesh: whatever differs by device is a `Sym`, evaluated when code is generated. A
collective names mesh axes, not ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.graph import Value
from shardlib.lines import Line
from shardlib.lower.sym import Sym
from shardlib.meshes.axis import Axis
from shardlib.meshes.mesh import Mesh
from shardlib.specs.layout import Layout


@dataclass(eq=False)
class Var:
    """One local tensor: `layout` says its local shape on every device; `value` and `form` are what it is a form of.

    Inside the local form of a rule there is no layout.
    """

    name: str
    layout: Layout | None
    dtype: torch.dtype
    value: Value | None = None
    form: Any = None  # (cut, what is owed)
    numel: int = 0  # where it has no layout, elements on the fullest device that was looked at

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(eq=False)
class Instr:
    """One call of an op on local tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Var | None, ...]
    line: Line | None = None
    backward: bool = False
    note: str = ""
    flops: float = 0.0


@dataclass(eq=False)
class Collective:
    """One communication: `kind` over `axes` on local tensor `source`.

    `params` are the op's arguments (dims, and per-member sizes, which may be `Sym`s); `bytes` go on the wire per
    device; `reason` says which layouts forced it.
    """

    kind: str
    axes: tuple[Axis, ...]
    source: Var
    out: Var
    params: dict[str, Any]
    bytes: float
    reduce: str = "sum"
    line: Line | None = None
    backward: bool = False
    reason: str = ""
    because: Any = None

    @property
    def outs(self) -> tuple[Var, ...]:
        return (self.out,)

    @property
    def where(self) -> str:
        return f"{self.line[0]}:{self.line[1]}" if self.line else "?"

    def __str__(self) -> str:
        axes = ", ".join(map(str, self.axes))
        return f"{self.kind}[{axes}] {self.source.name}: {self.bytes:,.0f} bytes at {self.where} ({self.reason})"


Step = Instr | Collective


@dataclass
class Program:
    """Steps in order; inputs and captured tensors as local variables; outputs (a variable, or a constant)."""

    mesh: Mesh
    steps: list[Step] = field(default_factory=list)
    inputs: list[Var] = field(default_factory=list)
    captured: list[tuple[Var, torch.Tensor]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    donated: frozenset[int] = frozenset()  # positions of inputs whose memory may be overwritten
    varies: dict[Var, tuple[Axis, ...]] = field(default_factory=dict)  # where inputs differ, if their layout is silent
    owned: int | None = None  # so many results (None: all) show no memory of arguments, captured tensors or each other

    @property
    def collectives(self) -> list[Collective]:
        return [s for s in self.steps if isinstance(s, Collective)]


def leaves(x: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """All instances of `kind` in nested tuples, lists and dicts."""
    if isinstance(x, kind):
        yield x
    elif isinstance(x, tuple | list):
        yield from itertools.chain.from_iterable(leaves(y, kind) for y in x)
    elif isinstance(x, dict):
        yield from itertools.chain.from_iterable(leaves(y, kind) for y in x.values())


def rebuild(x: Any, change: Callable[[Any], Any]) -> Any:
    """`x` with `change` applied to every leaf of nested tuples, lists and dicts."""
    if isinstance(x, tuple | list):
        return type(x)(rebuild(y, change) for y in x)
    if isinstance(x, dict):
        return {k: rebuild(v, change) for k, v in x.items()}
    return change(x)


def reads(step: Step) -> Iterator[Var]:
    if isinstance(step, Collective):
        yield step.source
    else:
        yield from leaves((step.args, step.kwargs), Var)


def syms(step: Step) -> Iterator[Sym]:
    if isinstance(step, Collective):
        yield from leaves(step.params, Sym)
    else:
        yield from leaves((step.args, step.kwargs), Sym)
