"""The plan: what a function became on a mesh, to be read before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, cast

import torch

from shardlib.aten.traits import has
from shardlib.compile import Compiled
from shardlib.graph import Op, Value, is_creation
from shardlib.lines import Line, place
from shardlib.machine import Machine
from shardlib.plans import backends
from shardlib.plans.diff import PlanDiff, diff
from shardlib.plans.explain import Explainer
from shardlib.plans.html import page
from shardlib.plans.naming import Naming, shorten
from shardlib.plans.plantext import Row, fold, fold_names, si, table
from shardlib.plans.redundant import Redundant, redundant, sentence
from shardlib.printing import OP as PRINT
from shardlib.program.steps import Collective, Compute, Start, Var, makes, reads
from shardlib.program.storage import peak_bytes
from shardlib.program.text import show
from shardlib.propagate.bound import LowerBound, lower_bound
from shardlib.propagate.refine import alone
from shardlib.simulate.simulated import Simulated
from shardlib.specs.fixed import Names
from shardlib.specs.layout import Layout


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of a plan.

    `bytes` go on the wire per device (ring algorithms); `value` is what moves; `line` is the user's source line, or,
    where `backward`, the line whose gradient this is; `reason` names the layouts that forced it, and why they are so;
    `backend` is what runs it, and why ("" on an abstract mesh).
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    value: str
    line: str
    backward: bool
    reason: str
    backend: str = ""

    def __str__(self) -> str:
        back = "backward of" if self.backward else "at"
        return f"{self.kind}[{' '.join(self.axes)}] {si(self.bytes, 'B')} {back} {self.line}: {self.reason}"


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
        >>> plan.collectives[0].reason
        'sum_1[] +data -> [], sum over batch; returned as result'
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.name, self.mesh = compiled.traced.name, compiled.mesh

    # Figures --------------------------------------------------------------------------------------------------------

    @cached_property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """Every collective of the program, in order."""
        why = self._explainer
        return tuple(
            PlannedCollective(
                c.kind,
                tuple(map(str, c.axes)),
                float(c.bytes),
                why.subject(c),
                place(c.line),
                c.backward,
                why.reason(c),
                str(backends.of_collective(c, self.mesh) or ""),
            )
            for c in self.compiled.program.collectives
        )

    @property
    def comm_bytes(self) -> float:
        """Wire bytes that one device sends in one call (ring algorithms)."""
        return float(sum(c.bytes for c in self.compiled.program.collectives))

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of one device in one call: two for a multiply-add, one for a pointwise result."""
        return float(sum(s.flops for s in self.compiled.program.steps if isinstance(s, Compute)))

    @cached_property
    def redundant(self) -> tuple[Redundant, ...]:
        """What several devices do identically, by op, line and axes; most FLOPs first, then most bytes.

        The plan's text says so where it is 5 % of the FLOPs or more.

        Example:
            >>> import torch, shardlib as sl
            >>> with sl.Mesh(data=4, tensor=2):
            ...     product = sl.jit(lambda x, w: x @ w, in_specs=("m@data _", "..."))
            ...     plan = product.plan(torch.ones(8, 4), torch.ones(4, 4))
            >>> most = plan.redundant[0]
            >>> most.op, most.flops, most.bytes, most.copies, most.axes
            ('mm', 32.0, 16, 2, ('tensor',))
        """
        return redundant(self.compiled.program)

    @cached_property
    def peak_memory(self) -> int:
        """The most bytes of local tensors alive at once on the fullest device, arguments and results included."""
        return peak_bytes(self.compiled.program)

    @cached_property
    def lower_bound(self) -> LowerBound:
        """How far the decisions are from the best of all, by the estimate that they are made by; worked out when asked.

        Example:
            >>> import torch, shardlib as sl
            >>> with sl.Mesh(data=2):
            ...     product = sl.jit(lambda x, w: x @ w, in_specs=("m@data _", "_ n@data"))
            ...     plan = product.plan(torch.ones(64, 8), torch.ones(8, 16))
            >>> plan.lower_bound.gap, plan.lower_bound.exact
            (0.0, True)
        """
        compiled = self.compiled
        flood, decider = compiled.propagated.flood, compiled.propagated.decider
        return lower_bound(decider, alone(compiled.graph, flood, self.mesh, decider))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each stage of planning took."""
        return dict(self.compiled.seconds)

    @property
    def replicated_ops(self) -> tuple[str, ...]:
        """Ops that run on every device with whole operands, for want of a rule."""
        ops = (op for op in self.compiled.graph.ops if op.rule is None and not op.manual and op.target is not PRINT)
        return tuple(f"{op.target} at {place(op.line)}" for op in ops)

    # Questions ------------------------------------------------------------------------------------------------------

    @cached_property
    def _naming(self) -> Naming:
        return Naming(self.compiled)

    @cached_property
    def _explainer(self) -> Explainer:
        return Explainer(self.compiled, self._naming)

    @cached_property
    def output_names(self) -> tuple[Names, ...]:
        """Logical names per output, dim and factor, aligned with the outputs' layouts."""
        return tuple(self._aligned(v) if isinstance(v, Var) else () for v in self.compiled.program.outputs)

    def layout_of(self, what: str | Value) -> Layout:
        """The layout of an input (`"params['w']"` or `"params.w"`), an output (`"result[0]"`) or a value of the
        program, by the name that the plan prints. Raises KeyError for any other name."""
        layout = self._var(what).layout
        assert layout is not None
        return layout

    def explain(self, what: str | PlannedCollective | int) -> str:
        """Why a value lives where it does, or a collective (or the i-th) is there: a chain back to annotations.

        Raises KeyError for a name that is none of the plan's, IndexError past the last collective.
        """
        if isinstance(what, PlannedCollective):
            what = self.collectives.index(what)
        if isinstance(what, int):
            return self._explainer.collective(self.compiled.program.collectives[what])
        var = self._var(what)
        value = var.value if var.value is not None else self._naming.find(what)
        assert value is not None
        return self._explainer.value(value, var)

    def _var(self, what: str | Value) -> Var:
        value: Value | None
        if isinstance(what, str):
            for name, out in self._out:
                if what in (name, shorten(name)) and isinstance(out, Var):
                    return out
            value = self._naming.find(self.compiled.traced.twins.get(what, what))
        else:
            value = what
        for var in self._variables():
            if var.layout is not None and (var.name == what or (value is not None and var.value is value)):
                return var
        names = ", ".join(self._naming.inputs[:20])
        raise KeyError(f"{self.name} has no value {what!r}; its inputs are {names}")

    def _variables(self) -> Iterator[Var]:
        yield from self.compiled.program.inputs
        for step in self.compiled.program.steps:
            yield from makes(step)

    def diff(self, other: Plan) -> PlanDiff:
        """What changed from this plan to another one, in bytes, FLOPs, memory and layouts, line by line.

        Example:
            >>> import torch, shardlib as sl
            >>> product = lambda x, w: x @ w
            >>> with sl.Mesh(data=2):
            ...     before = sl.jit(product).plan(torch.ones(4, 4), torch.ones(4, 4))
            ...     after = sl.jit(product, in_specs=("m@data _", None)).plan(torch.ones(4, 4), torch.ones(4, 4))
            >>> change = before.diff(after)
            >>> change.inputs, change.lines[0].flops
            ((('x', 'f32[4, 4]', 'f32[m=4@data, 4]'),), (128.0, 64.0))
            >>> bool(before.diff(before))
            False
        """
        return diff(self, other)

    def simulate(self, machine: Machine | str | None = None, *, fused: bool = False) -> Simulated:
        """What one call would take on `machine` (an `sl.Machine`, its text, or None: that of the mesh): seconds,
        exposed communication, utilisation, memory over time. An estimate; nothing runs.

        `fused` counts calls element by element that follow each other as one kernel, as a compiler would make them.
        Raises `ShardingError` where the machine has links for axes that the mesh has not.

        Example:
            >>> import torch, shardlib as sl
            >>> x = torch.empty(8192, 8192, device="meta")
            >>> with sl.Mesh.abstract(data=8):
            ...     plan = sl.jit(lambda x, y: x @ y, in_specs=("_ k@data", "k@data _")).plan(x, x)
            >>> [f"{step.exposed / step.seconds:.0%}" for step in map(plan.simulate, ("h100", "a100-40"))]
            ['33%', '17%']
        """
        return Simulated(self.compiled.program, self.name, Machine.of(machine), fused=fused)

    # Forms ----------------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """Totals per kind of collective, axis and backend; why these backends; arithmetic and memory."""
        rows, lines = self._totals()
        return "\n".join([*table(rows), *lines])

    def _totals(self) -> tuple[list[tuple[str, ...]], list[str]]:
        counts: Counter[tuple[str, str, str]] = Counter()
        sizes: Counter[tuple[str, str, str]] = Counter()
        reasons: dict[str, None] = {}
        for c in self.compiled.program.collectives:
            choice = backends.of_collective(c, self.mesh)
            key = (c.kind, " ".join(map(str, c.axes)), choice.name if choice else "")
            counts[key] += 1
            sizes[key] += c.bytes  # type: ignore[assignment]
            reasons |= {str(choice): None} if choice else {}
        rows: list[tuple[str, ...]] = [
            ("collective", "axes", "times", "wire bytes per device", "by" if reasons else "")
        ]
        rows += [(*key[:2], str(counts[key]), si(sizes[key], "B"), key[2]) for key in sorted(counts)]
        rows.append(("total", "", str(sum(counts.values())), si(self.comm_bytes, "B"), ""))
        lines = sorted(reasons)
        lines.append(f"per device: {si(self.flops, 'FLOP')}, peak memory {si(self.peak_memory, 'B')}")
        lines += filter(None, [sentence(self.redundant, self.flops)])
        if (halves := self.compiled.halves) is not None:
            n, held = len(halves.saved), sum(v.nbytes for v in halves.saved)
            lines.append(f"saved for the backward pass: {n} value{'s' * (n != 1)}, {si(held, 'B')}")
        lines += [f"no rule, runs replicated: {op} ({n} times)" for op, n in Counter(self.replicated_ops).items()]
        return rows, lines

    def __str__(self) -> str:
        inputs, outputs = (
            table([(f"  {name}", *rest) for name, *rest in s]) for s in (self._inputs(), self._outputs())
        )
        program = [_PROGRAM, *self._program()]
        parts = [[self.heading], ["inputs", *inputs], program, ["outputs", *outputs], [self.summary()]]
        return "\n\n".join("\n".join(part) for part in parts)

    def _repr_html_(self) -> str:
        inputs, outputs = (("inputs", self._inputs()), ("outputs", self._outputs()))
        return page(self.heading, [inputs, (_PROGRAM, self._folded()), outputs], *self._totals())

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data (JSON-ready)."""
        return {
            "name": self.name,
            "mesh": dict(self.mesh.axes),
            "inputs": {name: self._naming.typed(var) for name, var in zip(self._naming.inputs, self._in, strict=True)},
            "outputs": {name: self._naming.typed(v) if isinstance(v, Var) else repr(v) for name, v in self._out},
            "collectives": [asdict(c) | {"axes": list(c.axes)} for c in self.collectives],
            "comm_bytes": self.comm_bytes,
            "flops": self.flops,
            "redundant": [asdict(r) | {"axes": list(r.axes)} for r in self.redundant],
            "peak_memory": self.peak_memory,
            "replicated_ops": list(self.replicated_ops),
        }

    def listing(self, where: Callable[[Line | None], str] = place) -> str:
        """The program that runs, step by step, as text: plans with one listing are the same.

        `where` writes its lines of source.
        """
        return show(self.compiled.program, where)

    # Text -----------------------------------------------------------------------------------------------------------

    @property
    def _in(self) -> tuple[Var, ...]:
        return self.compiled.program.inputs

    @property
    def _out(self) -> Iterable[tuple[str, Any]]:
        return zip(self.compiled.traced.result_names, self.compiled.program.outputs, strict=True)

    @property
    def heading(self) -> str:
        """`mlp on data=2, tensor=4 (8 devices, virtual)`."""
        axes = ", ".join(f"{name}={n}" for name, n in self.mesh.axes.items())
        return f"{self.name} on {axes} ({self.mesh.size} devices, {self.mesh.kind})"

    def _inputs(self) -> list[tuple[str, ...]]:
        rows = []
        for i, (name, var) in enumerate(zip(self._naming.inputs, self._in, strict=True)):
            how = "annotated" if i in self.compiled.fixed_inputs else "inferred"
            rows.append((name, self._naming.typed(var), how))
        return fold_names(rows)

    def _outputs(self) -> list[tuple[str, ...]]:
        rows = []
        for name, out in self._out:
            rows.append((shorten(name), self._naming.typed(out) if isinstance(out, Var) else repr(out)))
        return fold_names(rows)

    def _program(self) -> list[str]:
        folded = self._folded()
        lines = iter(table([("  " * (r.depth + 1) + r.cells[0], *r.cells[1:]) for r in folded if len(r.cells) > 1]))
        return ["  " * (r.depth + 1) + r.cells[0] if len(r.cells) == 1 else next(lines) for r in folded]

    def _folded(self) -> list[Row]:
        rows: list[Row] = []
        heading, section = "", cast("tuple[str, ...]", ())
        listed: set[Op] = set()
        for step in self._told():
            if (cells := self._cells(step, listed)) is None:
                continue
            at = step.first if isinstance(step, Start) else step
            text = at.line.text if at.line else ""
            text = text if len(text) <= 96 else f"{text[:93]}..."
            line = f"{'backward of ' if at.backward else ''}{place(at.line)}  {text}".rstrip()
            inside = at.line.section if at.line else ()
            if inside != section:
                section, heading = inside, ""
                rows.append(Row((f"[{' > '.join(section) or 'outside sections'}]",)))
            if line != heading:
                rows.append(Row((heading := line,)))
            rows.append(Row(cells, 1))
        return fold(rows)

    def _told(self) -> Iterator[Compute | Collective | Start]:
        """Calls, and collectives where they start; long messages as a whole."""
        for step in self.compiled.program.steps:
            if isinstance(step, Start):
                yield from [step] if len(step.moves) > _LONG else step.moves
            elif isinstance(step, Compute):
                yield step

    def _cells(self, step: Compute | Collective | Start, listed: set[Op]) -> tuple[str, ...] | None:
        """A step as a reader wants to see it; None for what does not matter: views, pointwise ops, constants, and more
        forms of what is `listed`."""
        if isinstance(step, Start):
            first, *_, last = step.moves
            what = f"! {first.kind}[{' '.join(map(str, first.axes))}] of {len(step.moves)} values, one message"
            whose = f"{self._explainer.subject(first)} ... {self._explainer.subject(last)}"
            return what, whose, si(sum(c.bytes for c in step.moves), "B"), f"{self._explainer.why(first)} ..."
        if isinstance(step, Collective):
            what = f"! {step.kind}[{' '.join(map(str, step.axes))}] {self._explainer.subject(step)}"
            _, after = self._explainer.ends(step)
            return what, self._naming.typed(after), si(step.bytes, "B"), self._explainer.why(step)
        if step.target is PRINT:
            names = [self._naming.var(v) for v in reads(step)]
            return f"  debug_print({', '.join([repr(step.args[0]), *names])})", "", "", "by the first device"
        var = next((v for v in step.outs if v is not None and v.value is not None), None)
        op = var.value.op if var is not None and var.value is not None else None
        if var is None or var.value is None or op is None or op in listed or not _matters(op) or op.constant:
            return None
        listed.add(op)
        note = "" if op.rule is not None or op.manual else "no rule: runs replicated"
        if (choice := backends.of_attention(op, self.mesh)) is not None:
            note = f"by {choice}"
        return f"  {self._naming.own(var.value)} = {self._naming.call(op)}", self._naming.typed(var), "", note

    def _aligned(self, var: Var) -> Names:
        """A name for each factor of a variable's layout: those that the layout's shortest form keeps apart."""
        assert var.layout is not None
        out = []
        for dim, named in zip(var.layout.dims, self._naming.dims(var), strict=True):
            same = len(dim) == len(named) and all(f == g for f, (_, g) in zip(dim, named, strict=True))
            out.append(tuple(name for name, _ in named) if same else (None,) * len(dim))
        return tuple(out)


_LONG = 8  # values of one message that are listed one by one
_PROGRAM = "program (each device; lines with ! communicate)"


def _matters(op: Op) -> bool:
    """What a reader wants to see: not views, not pointwise arithmetic, not constants."""
    if op.transparent or op.constrains or is_creation(op.target) or has(op.target, "plumbing"):
        return False
    return op.rule is None or torch.Tag.pointwise not in getattr(op.target, "tags", ())
