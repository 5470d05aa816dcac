"""Turns a plan into plain data for its page; page.js reads it.

Tables hold repeats of a layer once, with their number. Seconds of events are in microseconds.
"""

from __future__ import annotations

from dataclasses import astuple
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from shardlib.compiler.plan.explain import Explainer
from shardlib.compiler.plan.names import Naming, shorten
from shardlib.compiler.plan.page.layout_pictures import layout_picture
from shardlib.compiler.plan.page.program_rows import MESSAGE, ProgramRows, Record
from shardlib.compiler.plan.page.program_tree import Node, TreeBuilder, walk
from shardlib.compiler.plan.page.source_lines import SourceLines
from shardlib.compiler.plan.page.tables import Strings
from shardlib.compiler.plan.phases import step_phases
from shardlib.compiler.plan.totals import figures, tabulate_collectives
from shardlib.compiler.program.buffers import Lifetime, lifetimes, owners, peak_bytes
from shardlib.compiler.program.steps import Collective, Compute, Copy, Program, Start, Step, Var, makes
from shardlib.compiler.simulate.simulated import Simulated
from shardlib.compiler.simulate.timeline import STREAMS, called
from shardlib.core.name_patterns import group_names
from shardlib.core.source_lines import Line
from shardlib.sharding.mesh.machine import Machine

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan


class PlanData:
    """The data of one plan; `machine` is the one whose clock is simulated, None for none."""

    def __init__(self, plan: Plan, machine: Machine | None, strings: Strings) -> None:
        self.plan, self.strings = plan, strings
        self.naming = Naming(plan.compiled)
        self.explainer = Explainer(plan.compiled, self.naming)
        self.lines = SourceLines()
        self.simulated: Simulated | None = None if machine is None else plan.simulate(machine)
        self._layouts: dict[str, tuple[int, Var]] = {}

    def data(self) -> dict[str, Any]:
        """Returns everything as JSON-ready data."""
        plan, strings = self.plan, self.strings
        table, notes = tabulate_collectives(plan)
        parts = {
            "heading": plan.heading,
            "name": plan.name,
            "mesh": ", ".join(f"{axis}={n}" for axis, n in plan.mesh.shape.items()),
            "totals": [astuple(figure) for figure in figures(plan, self.simulated)],
            "kinds": table,
            "notes": notes,
            "inputs": self._inputs(),
            "outputs": self._outputs(),
            **self._program(),
            "redundant": self._redundant(),
            "memory": self._memory(),
            "clock": self._clock(),
        }
        parts["layouts"] = [layout_picture(self.naming, var, plan.mesh) for _, var in self._layouts.values()]
        parts["lines"], parts["files"] = self.lines.table(strings), self.lines.files()
        return parts

    def _layout(self, var: Var | None) -> int:
        """Returns the position of a variable's layout in the list of layouts; -1 without one."""
        text = "" if var is None else self.naming.typed(var)
        if var is None or not text:
            return -1
        return self._layouts.setdefault(text, (len(self._layouts), var))[0]

    # Figures ----------------------------------------------------------------------------------------------------------

    def _redundant(self) -> dict[str, Any]:
        columns = {"op": str, "line": int, "backward": int, "flops": float, "bytes": int, "copies": int, "axes": str}
        rows = (
            (r.op, self.lines.number_of_label(r.line), int(r.backward), r.flops, r.bytes, r.copies, " ".join(r.axes))
            for r in self.plan.redundant
        )
        return self.strings.table(columns, rows)

    # Arguments and results --------------------------------------------------------------------------------------------

    def _inputs(self) -> dict[str, Any]:
        compiled, annotated = self.plan.compiled, self.plan.items.annotated
        rows, layouts = [], dict[str, Var]()
        for i, (name, var) in enumerate(zip(self.naming.inputs, compiled.program.inputs, strict=True)):
            layouts[typed := self.naming.typed(var)] = var
            rows.append((name, typed, "annotated" if i in annotated else "inferred"))
        return self._named(group_names(rows), layouts)

    def _outputs(self) -> dict[str, Any]:
        compiled = self.plan.compiled
        rows, layouts = [], dict[str, Var]()
        for i, (name, out) in enumerate(zip(compiled.traced.result_names, compiled.program.outputs, strict=True)):
            typed = self.naming.typed(out) if isinstance(out, Var) else repr(out)
            layouts |= {typed: out} if isinstance(out, Var) else {}
            rows.append((shorten(name), typed, "annotated" if i in compiled.fixed_outputs else "inferred"))
        return self._named(group_names(rows), layouts)

    def _named(self, groups: list[tuple[str, int, tuple[str, ...]]], layouts: dict[str, Var]) -> dict[str, Any]:
        columns = {"name": str, "times": int, "type": str, "how": str, "layout": int, "bytes": int}
        rows = []
        for name, times, (typed, how) in groups:
            var = layouts.get(typed)
            rows.append((name, times, typed, how, self._layout(var), 0 if var is None else times * var.nbytes))
        return self.strings.table(columns, rows)

    # Program ----------------------------------------------------------------------------------------------------------

    def _program(self) -> dict[str, Any]:
        plan = self.plan
        leaves = ProgramRows(plan.compiled.program, self.naming, self.explainer, plan.collectives).leaves()
        rows, messages, alternatives = list[Any](), list[Any](), list[Any]()
        for node, parent, total in walk(TreeBuilder().build(leaves)):
            record = None if node.leaf is None else node.leaf.record
            message = -1
            if record is not None and record.kind == MESSAGE:
                message = len(messages)
                messages.append(self._message(record, total))
                c = plan.compiled.program.collectives[record.index]
                alternatives += [(message, *astuple(x)) for x in self.explainer.alternatives(c)]
            rows.append(self._row(node, record, parent, total, message))
        columns = {"parent": int, "kind": str, "text": str, "last": str, "times": int, "total": int, "phase": str}
        columns |= {"line": int, "layout": int, "bytes": float, "flops": float, "message": int}
        more = {"kind": str, "axes": str, "value": str, "before": int, "after": int, "bytes": float, "total": int}
        more |= {"phase": str, "line": int, "reason": str, "backend": str, "form": str, "together": int, "explain": str}
        more |= {"seconds": float, "exposed": float}
        options = {"message": int, "op": str, "axis": str, "dim": str, "seconds": float, "bytes": float}
        options |= {"chosen": int, "source": str}
        return {
            "program": self.strings.table(columns, rows),
            "messages": self.strings.table(more, messages),
            "alternatives": self.strings.table(options, alternatives),
        }

    def _row(self, node: Node, record: Record | None, parent: int, total: int, message: int) -> tuple[Any, ...]:
        head = (parent, "group" if record is None else record.kind, node.text, node.last, node.times, total)
        if record is None:
            return (*head, "", -1, -1, 0, 0, -1)
        at, layout = self.lines.number(record.line), self._layout(record.var)
        return (*head, record.phase, at, layout, record.bytes, record.flops, message)

    def _message(self, record: Record, total: int) -> tuple[Any, ...]:
        planned = self.plan.collectives[record.index]
        c = self.plan.compiled.program.collectives[record.index]
        before, after = self.explainer.ends(c)
        assert record.start is not None
        return (
            planned.kind, " ".join(planned.axes), planned.value, self._layout(before), self._layout(after),
            planned.bytes, total, record.phase, self.lines.number(record.line), planned.reason, planned.backend,
            planned.form, len(record.start.moves), self.explainer.chain(c), self._seconds_of(record.start),
            self._exposed(record.start),
        )  # fmt: skip

    @cached_property
    def _whole(self) -> Simulated | None:
        """One call of the whole program, which the stages of a pipeline share."""
        if self.simulated is None or len(self.plan.programs) == 1:
            return self.simulated
        return Simulated(self.plan.compiled.program, self.plan.name, self.simulated.machine)

    def _seconds_of(self, start: Start) -> float | None:
        """Returns the simulated seconds of a message; None without a machine."""
        return None if self._whole is None else self._whole.timeline.message_seconds[start]

    def _exposed(self, start: Start) -> float | None:
        """Returns the seconds of a message that nothing hides; None without a machine, and in pipelines."""
        if self.simulated is None or self.simulated is not self._whole:
            return None
        return self.simulated.timeline.waits.get(start, 0.0)

    def _stage(self, program: Program) -> int | None:
        """Returns the stage of a program; None without stages."""
        return None if self.plan.compiled.staged is None else self.plan.programs.index(program)

    # Memory -----------------------------------------------------------------------------------------------------------

    def _memory(self) -> dict[str, Any]:
        """Returns the values in memory, with their first and last steps, on the fullest device of the fullest stage."""
        program = max(self.plan.programs, key=peak_bytes)
        makers: dict[Var, Step | Collective] = {v: step for step in program.steps for v in makes(step)}
        makers |= {c.out: c for step in program.steps if isinstance(step, Start) for c in step.moves}
        owner = owners(program.steps, exact=True)
        named = zip(self.plan.compiled.traced.result_names, program.outputs, strict=True)
        results = {owner.get(v, v): shorten(name) for name, v in named if isinstance(v, Var)}
        phases = step_phases(program)
        rows = []
        for span in lifetimes(program):
            maker = makers.get(span.var)
            at = self.lines.number(_line_of(maker))
            why = self._why_kept(program, span, results, phases)
            rows.append((self.naming.var(span.var), span.var.nbytes, span.start, span.end, at, _name_of(maker), why))
        columns = {"name": str, "bytes": int, "start": int, "end": int, "line": int, "maker": str, "why": str}
        runs, position = [], 0
        for phase, run in groupby(phases):
            runs.append((position, phase))
            position += len(list(run))
        return {
            "stage": self._stage(program),
            "steps": len(program.steps),
            "phases": runs,
            "values": self.strings.table(columns, rows),
        }

    def _why_kept(self, program: Program, span: Lifetime, results: dict[Var, str], phases: list[str]) -> str:
        if span.var in results:
            return f"returned as {results[span.var]}"
        if span.var in program.entry_values:
            return "an argument, or captured: kept for the whole call"
        step = program.steps[span.last]
        if not isinstance(step, Compute | Start | Copy):
            return "not read"
        first = step.first if isinstance(step, Start) else step
        place = self.lines.label(_line_of(first)).rpartition("/")[2]
        return f"read by {_name_of(first)} ({phases[span.last]} at {place})"

    # Time -------------------------------------------------------------------------------------------------------------

    def _clock(self) -> dict[str, Any] | None:
        """Returns the simulated streams, in microseconds; None without a machine."""
        if (simulated := self.simulated) is None:
            return None
        line = simulated.timeline
        columns = {"stream": int, "name": str, "start": float, "duration": float, "line": int, "exposed": float}
        rows = (
            (STREAMS.index(e.stream), e.name, _microseconds(e.start), _microseconds(e.seconds),
             self.lines.number(e.line),
             _microseconds(line.waits.get(e.step, 0.0)) if isinstance(e.step, Start) else 0)
            for e in line.events
        )  # fmt: skip
        return {
            "title": f"{simulated.name} on {simulated.program.mesh} ({simulated.machine}), simulated",
            "stage": self._stage(simulated.program),
            "streams": STREAMS,
            "seconds": simulated.seconds,
            "exposed": simulated.exposed,
            "events": self.strings.table(columns, rows),
            "memory": _changes(line.memory),
        }


def _name_of(step: Step | Collective | None) -> str:
    """Returns the op's name; "" for an argument."""
    match step:
        case None:
            return ""
        case Compute():
            return called(step)
        case Collective():
            return step.kind
    return "copy"


def _line_of(step: Step | Collective | None) -> Line | None:
    return step.line if isinstance(step, Compute | Collective) else None


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _changes(levels: tuple[tuple[float, int], ...]) -> list[tuple[float, int]]:
    """Keeps the highest and the last level of each moment."""
    out: list[tuple[float, int]] = []
    for second, run in groupby(levels, lambda level: level[0]):
        held = [level for _, level in run]
        out += [(_microseconds(second), level) for level in dict.fromkeys((max(held), held[-1]))]
    return out
