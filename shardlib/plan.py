"""The plan: what a function became on a mesh, to be read before it runs."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardlib import explain as explaining
from shardlib.compile import Compiled
from shardlib.graph import Op, Value, is_creation
from shardlib.layout import Layout
from shardlib.lower.program import Collective, Instr, Var
from shardlib.memory import peak_bytes
from shardlib.propagate.units import is_constraint
from shardlib.tensor import Names, short_dtype


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of a plan: wire `bytes` per device, the user's source line, and the layouts that forced it."""

    kind: str
    axes: tuple[str, ...]
    bytes: float
    line: str
    reason: str
    value: str
    backward: bool

    def __str__(self) -> str:
        back = ", backward of" if self.backward else " at"
        return f"{self.kind}[{' '.join(self.axes)}] {si(self.bytes, 'B')}{back} {self.line}: {self.reason}"


class Plan:
    """The printable result of propagation and lowering; made by `step.plan(*args)`, without any device.

    Example:
        >>> import torch, shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     plan = sl.jit(lambda x: x.sum(), in_specs=("batch@data _",)).plan(torch.ones(4, 3))
        >>> plan.comm_bytes, [c.kind for c in plan.collectives]
        (4.0, ['all_reduce'])
        >>> str(plan.layout_of("x"))
        '4@data, 3'
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.name, self.mesh = compiled.traced.name, compiled.mesh

    @cached_property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        return tuple(
            PlannedCollective(
                c.kind, tuple(map(str, c.axes)), float(c.bytes), _where(c), c.reason, c.source.name, c.backward
            )
            for c in self.compiled.program.collectives
        )

    @property
    def comm_bytes(self) -> float:
        """Wire bytes that one device sends in one call (ring algorithms)."""
        return sum(c.bytes for c in self.collectives)

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of one device in one call."""
        return sum(s.flops for s in self.compiled.program.steps if isinstance(s, Instr))

    @cached_property
    def peak_memory(self) -> int:
        """The most bytes of local tensors alive at once on the fullest device."""
        return peak_bytes(self.compiled.program)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each stage of planning took."""
        return dict(self.compiled.seconds)

    @property
    def replicated_ops(self) -> tuple[str, ...]:
        """Ops that run on every device with whole operands, for want of a rule."""
        ops = (op for op in self.compiled.graph.ops if op.rule is None)
        return tuple(f"{op.target} at {_place(op.line)}" for op in ops)

    @cached_property
    def output_names(self) -> tuple[Names, ...]:
        """Logical names per output, dim and factor, aligned with the outputs' layouts."""
        return tuple(self._names_of(v) if isinstance(v, Var) else () for v in self.compiled.program.outputs)

    def layout_of(self, what: str | Value) -> Layout:
        """The layout of an input (`"params['w']"`), an output (`"result[0]"`) or a value of the program, by name."""
        program = self.compiled.program
        if isinstance(what, str):
            for (name, _), var in zip(self.compiled.inputs, program.inputs, strict=True):
                if name == what and var.layout is not None:
                    return var.layout
            for name, out in zip(self.compiled.traced.output_names, program.outputs, strict=True):
                if f"result{name}" == what and isinstance(out, Var) and out.layout is not None:
                    return out.layout
        for step in program.steps:
            for out in step.outs:
                if out is not None and out.layout is not None and (out.name == what or out.value is what is not None):
                    return out.layout
        names = [name for name, _ in self.compiled.inputs]
        raise KeyError(f"{self.name} has no value {what!r}; its inputs are {', '.join(names[:20])}")

    def explain(self, what: str | PlannedCollective | int) -> str:
        """Why a value lives where it does, or a collective (or the i-th) is there: a chain back to annotations."""
        if isinstance(what, PlannedCollective):
            what = self.collectives.index(what)
        if isinstance(what, int):
            return explaining.collective(self.compiled, self.compiled.program.collectives[what])
        for (name, value), var in zip(self.compiled.inputs, self.compiled.program.inputs, strict=True):
            if name == what:
                return explaining.value(self.compiled, value, var, name)
        for step in self.compiled.program.steps:
            for out in step.outs:
                if out is not None and out.name == what and out.value is not None:
                    return explaining.value(self.compiled, out.value, out, what)
        raise KeyError(f"{self.name} has no value {what!r}")

    # Text -----------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join(
            [self._heading(), "", *self._inputs(), "", *self._program(), "", *self._outputs(), "", self.summary()]
        )

    __repr__ = __str__

    def summary(self) -> str:
        """Totals: collectives by kind and axes, wire bytes, arithmetic and memory per device."""
        counts: Counter[tuple[str, str]] = Counter()
        sizes: dict[tuple[str, str], float] = defaultdict(float)
        for c in self.collectives:
            key = (c.kind, " ".join(c.axes))
            counts[key] += 1
            sizes[key] += c.bytes
        rows = [("collective", "axes", "times", "wire bytes per device")]
        rows += [(kind, axes, str(counts[kind, axes]), si(sizes[kind, axes], "B")) for kind, axes in sorted(counts)]
        rows.append(("total", "", str(sum(counts.values())), si(self.comm_bytes, "B")))
        lines = table(rows)
        lines.append(f"per device: {si(self.flops, 'FLOP')}, peak memory {si(self.peak_memory, 'B')}")
        lines += [f"no rule, runs replicated: {op} ({n} times)" for op, n in Counter(self.replicated_ops).items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data (JSON-ready)."""
        return {
            "name": self.name,
            "mesh": str(self.mesh),
            "inputs": {
                name: str(var.layout)
                for (name, _), var in zip(self.compiled.inputs, self.compiled.program.inputs, strict=True)
            },
            "collectives": [vars(c) | {"axes": list(c.axes)} for c in self.collectives],
            "comm_bytes": self.comm_bytes,
            "flops": self.flops,
            "peak_memory": self.peak_memory,
            "replicated_ops": list(self.replicated_ops),
        }

    def _heading(self) -> str:
        axes = ", ".join(f"{name}={n}" for name, n in self.mesh.axes.items())
        return f"{self.name} on {axes} ({self.mesh.size} devices, {self.mesh.kind})"

    def _inputs(self) -> list[str]:
        rows = []
        for i, ((name, _), var) in enumerate(zip(self.compiled.inputs, self.compiled.program.inputs, strict=True)):
            how = "annotated" if i in self.compiled.fixed_inputs else "inferred"
            rows.append((f"  {name}", self._typed(var), how))
        return ["inputs", *table(fold(rows))]

    def _outputs(self) -> list[str]:
        rows = []
        for name, out in zip(self.compiled.traced.output_names, self.compiled.program.outputs, strict=True):
            rows.append((f"  result{name}", self._typed(out) if isinstance(out, Var) else repr(out), ""))
        return ["outputs", *table(fold(rows))]

    def _program(self) -> list[str]:
        rows: list[tuple[str, str, str]] = []
        for step in self.compiled.program.steps:
            if isinstance(step, Collective):
                axes = " ".join(map(str, step.axes))
                rows.append(
                    (
                        f"  ! {step.kind}[{axes}] {step.source.name}",
                        self._typed(step.out),
                        f"{si(step.bytes, 'B')}  {_where(step)}",
                    )
                )
            elif (value := _result(step)) is not None and value.op is not None and _matters(value.op):
                back = "backward of " if step.backward else ""
                call = f"{_short(step.target)}({', '.join(v.name for v in value.op.operands)})"
                note = f"  [{step.note}]" if step.note else ""
                rows.append(
                    (
                        f"  {step.outs[0].name if step.outs[0] else '_'} = {call}",
                        self._typed(step.outs[0]),
                        f"{back}{_place(step.line)}{note}",
                    )
                )
        return ["program (each device; lines with ! communicate)", *table(rows)]

    def _typed(self, var: Var | None) -> str:
        if var is None or var.layout is None:
            return ""
        dims = []
        for factors, names in zip(var.layout.dims, self._names_of(var), strict=True):
            parts = [f"{name}={f}" if name else str(f) for f, name in zip(factors, names, strict=True)]
            dims.append(parts[0] if len(parts) == 1 else f"({' '.join(parts)})")
        pending = " ".join(map(str, var.layout.pending))
        return f"{short_dtype(var.dtype)}[{', '.join(dims)}]{' ' + pending if pending else ''}"

    def _names_of(self, var: Var) -> Names:
        """Names of the layout's factors: a factor that is exactly one leaf has its class's name."""
        assert var.layout is not None
        value, flood = var.value, self.compiled.propagated.flood
        if value is None or value.constant:
            return tuple((None,) * len(dim) for dim in var.layout.dims)
        out = []
        for leaves, factors in zip(flood.value[value], var.layout.dims, strict=True):
            sizes = [(flood.dims.size(leaf), flood.names.get(leaf)) for leaf in leaves]
            names: list[str | None] = []
            for f in factors:
                name, size, count = None, 1, 0
                while sizes and size < f.size:
                    n, name = sizes.pop(0)
                    size, count = size * n, count + 1
                names.append(name if count == 1 and size == f.size else None)
            out.append(tuple(names))
        return tuple(out)


def _result(step: Instr) -> Value | None:
    return next((v.value for v in step.outs if v is not None and v.value is not None), None)


def _matters(op: Op) -> bool:
    """What a reader wants to see: not views, not pointwise arithmetic, not constants."""
    if op.rule is None:
        return True
    if op.transparent or is_constraint(op) or is_creation(op.target):
        return False
    tags = getattr(op.target, "tags", ())
    plumbing = {"slice", "cat", "split", "stack", "select", "slice_backward", "select_backward", "clone"}
    return torch.Tag.pointwise not in tags and _short(op.target) not in plumbing


def _short(target: Any) -> str:
    return str(target._schema.name).split("::")[-1] if hasattr(target, "_schema") else str(target)


_ROOTS = sorted({str(Path(torch.__path__[0]).parent), sysconfig.get_paths()["purelib"]}, key=len, reverse=True)


def _place(line: Any) -> str:
    if line is None or not line.file:
        return "?"
    path = line.file
    for root in (*_ROOTS, str(Path.cwd())):
        if path.startswith(root + os.sep):
            path = path[len(root) + 1 :]
            break
    return f"{path}:{line.lineno}"


def _where(c: Collective) -> str:
    return _place(c.line)


def si(n: float, unit: str) -> str:
    """A count with a decimal prefix.

    Example:
        >>> si(11_421_708, "B"), si(96, "B")
        ('11.4 MB', '96 B')
    """
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= power:
            return f"{n / power:.3g} {prefix}{unit}"
    return f"{n:g} {unit}"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows in columns."""
    if not rows:
        return []
    widths = [min(48, max(len(r[i]) for r in rows)) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def fold(rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Rows that differ only by an index (`layers[0]`, `layers[1]`) become one (`layers[*]`), with their number."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, typed, how in rows:
        groups.setdefault((re.sub(r"\[\d+\]", "[*]", name), typed, how), []).append(name)
    return list(_folded(groups))


def _folded(groups: dict[tuple[str, str, str], list[str]]) -> Iterator[tuple[str, str, str]]:
    for (pattern, typed, how), names in groups.items():
        yield (names[0], typed, how) if len(names) == 1 else (f"{pattern} x {len(names)}", typed, how)
