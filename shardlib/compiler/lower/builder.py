"""Collects the steps of a program, each with the source line that is being lowered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardlib.compiler.program.abstract_device import Device
from shardlib.compiler.program.steps import (
    Asked,
    Collective,
    Compute,
    Inside,
    Program,
    Start,
    Step,
    Var,
    swapped,
    together,
)
from shardlib.compiler.program.sym_int import Sym
from shardlib.core.aten.op_names import ALIAS
from shardlib.core.source_lines import Line, Module
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh


class Builder:
    """Collects steps. Each name of a variable is unique in the program."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.first = Device(mesh, {})  # the first device, with the shapes of values that no layout describes
        self.steps: list[Step] = []
        self.inputs: list[Var] = []
        self.captured: list[tuple[Var, torch.Tensor]] = []
        self.outputs: list[Any] = []
        self.line: Line | None = None
        self.backward = False
        self.inside: tuple[Module, ...] = ()
        self._names: dict[str, int] = {}
        self.now: dict[Var, Var] = {}  # maps a variable of a local form to the variable that replaced it
        self.sent: dict[Any, Any] = {}  # results of exchanged borders, by value and ranges

    @contextmanager
    def at(self, line: Line | None, backward: bool = False) -> Iterator[None]:
        """Assigns the steps written inside to a source line."""
        before = self.line, self.backward
        self.line, self.backward = line, backward
        try:
            yield
        finally:
            self.line, self.backward = before

    def name(self, base: str) -> str:
        """Returns an unused name."""
        n = self._names[base] = self._names.get(base, -1) + 1
        return base if n == 0 else self.name(f"{base}_{n}")

    def compute(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outs: Sequence[Var | None],
        note: str = "",
        flops: float = 0.0,
        work: Sym | None = None,
    ) -> None:
        """Appends one call."""
        where = self.line, self.backward
        self.steps.append(Compute(target, args, kwargs, tuple(outs), *where, note, flops, work, inside=self.inside))

    def communicate(
        self,
        kind: str,
        axes: tuple[Axis, ...],
        source: Var,
        out: Var,
        params: Mapping[str, Any],
        nbytes: float,
        reduce: str = "sum",
        reason: str = "",
        because: Asked | Inside | None = None,
    ) -> Var:
        """Appends one collective and its wait; returns its result."""
        c = Collective(kind, axes, source, out, params, nbytes, reduce, self.line, self.backward, reason, because)
        self.steps += together(c)
        if out.layout is None:
            self.first.hold(out, self.first.collective(c))
        return out

    def become(self, var: Var, out: Var, first: int) -> None:
        """Replaces a variable made at step `first` or later by `out`; `out` is an alias of any other variable."""
        new = self.steps[first:]
        if not any(var in step.outs for step in new if isinstance(step, Compute | Start)):
            self.compute(ALIAS, (self.now.get(var, var),), {}, [out])
            return
        self.now[var] = out
        self.steps[first:] = [swapped(step, {var: out}) for step in new]

    def finish(self) -> Program:
        return Program(self.mesh, tuple(self.steps), tuple(self.inputs), tuple(self.captured), tuple(self.outputs))
