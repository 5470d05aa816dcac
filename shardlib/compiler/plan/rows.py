"""Rows of cells for a plan's text and its HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from shardlib.compiler.graph.ir import Op, is_creation
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan import backends
from shardlib.compiler.plan.explain import Explainer
from shardlib.compiler.plan.names import Naming, shorten
from shardlib.compiler.plan.redundant_work import sentence
from shardlib.compiler.program import flops
from shardlib.compiler.program.steps import TIERS, Collective, Compute, Start, Var, reads
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.source_lines import format_path_line
from shardlib.core.text_tables import Row, fold_names, fold_rows, format_si, format_table, indent_rows
from shardlib.primitives.debug_print import OP as PRINT

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

_OPS = 4  # rematerialized ops that are named
_LONG = 8  # most values of one message that are listed one by one


@dataclass(frozen=True)
class Rows:
    """The rows of one plan."""

    compiled: Compiled
    naming: Naming
    explainer: Explainer

    def inputs(self) -> list[tuple[str, ...]]:
        """Name, type, and whether it was annotated."""
        rows = []
        for i, (name, var) in enumerate(zip(self.naming.inputs, self.compiled.program.inputs, strict=True)):
            how = "annotated" if i in self.compiled.fixed_inputs else "inferred"
            rows.append((name, self.naming.typed(var), how))
        return fold_names(rows)

    def outputs(self) -> list[tuple[str, ...]]:
        """Name and type."""
        rows = []
        for name, out in zip(self.compiled.traced.result_names, self.compiled.program.outputs, strict=True):
            rows.append((shorten(name), self.naming.typed(out) if isinstance(out, Var) else repr(out)))
        return fold_names(rows)

    def program(self) -> list[Row]:
        """Lists steps under the user's lines and sections; repeats are folded."""
        rows: list[Row] = []
        heading, section = "", cast("tuple[str, ...]", ())
        listed: set[Op] = set()
        for step in self._shown_steps():
            if (cells := self._cells(step, listed)) is None:
                continue
            at = step.first if isinstance(step, Start) else step
            text = at.line.text if at.line else ""
            text = text if len(text) <= 96 else f"{text[:93]}..."
            line = f"{'backward of ' if at.backward else ''}{format_path_line(at.line)}  {text}".rstrip()
            inside = at.line.section if at.line else ()
            if inside != section:
                section, heading = inside, ""
                rows.append(Row((f"[{' > '.join(section) or 'outside sections'}]",)))
            if line != heading:
                rows.append(Row((heading := line,)))
            rows.append(Row(cells, 1))
        return fold_rows(rows)

    def _shown_steps(self) -> Iterator[Compute | Collective | Start]:
        """Yields calls, and collectives where they start; a long message is one step."""
        for step in self.compiled.program.steps:
            if isinstance(step, Start):
                yield from [step] if len(step.moves) > _LONG else step.moves
            elif isinstance(step, Compute):
                yield step

    def _cells(self, step: Compute | Collective | Start, listed: set[Op]) -> tuple[str, ...] | None:
        """Returns the row of a step; None for views, pointwise ops, constants, and ops that are `listed` already."""
        if isinstance(step, Start):
            first, *_, last = step.moves
            message = f"! {first.kind}[{' '.join(map(str, first.axes))}] of {len(step.moves)} values, one message"
            values = f"{self.explainer.subject(first)} ... {self.explainer.subject(last)}"
            return message, values, format_si(sum(c.bytes for c in step.moves), "B"), f"{self.explainer.why(first)} ..."
        if isinstance(step, Collective) and step.kind in TIERS:
            return f"! {step.kind} {self.naming.var(step.source)}", self.naming.typed(step.out), "", "offloaded"
        if isinstance(step, Collective):
            message = f"! {step.kind}[{' '.join(map(str, step.axes))}] {self.explainer.subject(step)}"
            _, after = self.explainer.ends(step)
            return message, self.naming.typed(after), format_si(step.bytes, "B"), self.explainer.why(step)
        if step.target is PRINT:
            names = [self.naming.var(v) for v in reads(step)]
            return f"  debug_print({', '.join([repr(step.args[0]), *names])})", "", "", "by the first device"
        var = next((v for v in step.outs if v is not None and v.value is not None), None)
        op = var.value.op if var is not None and var.value is not None else None
        if var is None or var.value is None or op is None or op in listed or not is_shown(op) or op.constant:
            return None
        listed.add(op)
        note = "" if op.rule is not None or op.manual else "no rule: runs replicated"
        if (choice := backends.of_attention(op, self.compiled.mesh)) is not None:
            note = f"by {choice}"
        return f"  {self.naming.own(var.value)} = {self.naming.call(op)}", self.naming.typed(var), "", note


def is_shown(op: Op) -> bool:
    if op.transparent or op.constrains or is_creation(op.target) or has_trait(op.target, "moves_data"):
        return False
    return op.rule is None or torch.Tag.pointwise not in getattr(op.target, "tags", ())


PROGRAM = "program (each device; lines with ! communicate)"


def full_text(plan: Plan) -> str:
    """Returns a plan with every input, step and output, and totals; the same in every terminal."""
    rows = plan.rows
    inputs, outputs = (
        format_table([(f"  {name}", *rest) for name, *rest in s]) for s in (rows.inputs(), rows.outputs())
    )
    program = [PROGRAM, *indent_rows(rows.program())]
    parts = [[plan.heading], ["inputs", *inputs], program, ["outputs", *outputs], [plan.summary()]]
    if (pipeline := plan.pipeline) is not None:
        parts.append(["pipeline", *(f"  {line}" for line in pipeline.brief())])
    return "\n\n".join("\n".join(part) for part in parts)


def totals(plan: Plan) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns the table of a plan's collectives by kind, axes and backend, and lines on its other costs."""
    counts: Counter[tuple[str, ...]] = Counter()
    sizes: Counter[tuple[str, ...]] = Counter()
    across: Counter[tuple[str, ...]] = Counter()
    reasons: dict[str, None] = {}
    forms = backends.crossings(plan.compiled.program)
    for c in plan.compiled.program.collectives:
        choice, form = backends.of_collective(c, plan.mesh), forms.get(c)
        key = (c.kind, " ".join(map(str, c.axes)), choice.name if choice else "", form.name if form else "")
        counts[key] += 1
        sizes[key] += c.bytes  # type: ignore[assignment]
        across[key] += form.across if form else 0  # type: ignore[assignment]
        reasons |= {str(choice): None} if choice else {}
    rows: list[tuple[str, ...]] = [("collective", "axes", "times", "wire bytes per device", "by" if reasons else "")]
    rows += [(*key[:2], str(counts[key]), format_si(sizes[key], "B"), key[2]) for key in sorted(counts)]
    rows.append(("total", "", str(sum(counts.values())), format_si(plan.comm_bytes, "B"), ""))
    if forms:
        cells = [(key[3], format_si(across[key], "B") if key[3] else "") for key in sorted(counts)]
        cells = [("form", "leaves each machine"), *cells, ("", format_si(across.total(), "B"))]
        rows = [(*row, *more) for row, more in zip(rows, cells, strict=True)]
    lines = sorted(reasons)
    lines.append(f"per device: {format_si(plan.flops, 'FLOP')}, peak memory {format_si(plan.peak_memory, 'B')}")
    lines += _host_lines(plan)
    lines += filter(None, [sentence(plan.redundant, flops.flops(plan.compiled.program))])
    lines += _backward_lines(plan)
    lines += [f"no rule, runs replicated: {op} ({n} times)" for op, n in Counter(plan.replicated_ops).items()]
    return rows, lines


def notes(plan: Plan) -> list[str]:
    """Returns lines on copies to the host, parts of rows, values kept or computed again, and a search that stopped."""
    return [*_host_lines(plan), *_backward_lines(plan)]


def _host_lines(plan: Plan) -> list[str]:
    program, lines = plan.compiled.program, list[str]()
    if program.copied:
        sent = format_si(sum(c.source.nbytes for c in program.copied), "B")
        lines.append(f"in the host's memory: at most {format_si(plan.host_memory, 'B')}, {sent} copied there and back")
    if parts := [c.out.part for c in program.collectives if c.out.part is not None]:
        lines.append(f"rows in {parts[0][1]} parts, worked on in turn: {len(parts)} messages")
    return lines


def _backward_lines(plan: Plan) -> list[str]:
    lines = []
    if (halves := plan.compiled.halves) is not None:
        n, held = len(halves.saved), sum(v.nbytes for v in halves.saved)
        lines.append(f"saved for the backward pass: {n} value{'s' * (n != 1)}, {format_si(held, 'B')}")
    return [*lines, *filter(None, [_recomputed(plan), _stopped(plan)])]


def _stopped(plan: Plan) -> str:
    """Reports that the search ran out of time."""
    search = plan.compiled.search
    if search is None or not search.effort.stopped:
        return ""
    return (
        f"the search stopped after {search.effort.spent:.2g} s, as counted, of at most {search.effort.limit:.2g}: "
        'planning="best" goes on, plan.lower_bound says how much better a plan could be'
    )


def _recomputed(plan: Plan) -> str:
    """Reports values that the backward pass recomputes, and the cost."""
    if (again := plan.compiled.recomputed) is None:
        return ""
    waits = (
        f"{again.moved} value{'s wait' if again.moved > 1 else ' waits'} in the host's memory" if again.moved else ""
    )
    if not again.values:
        return f"{again.request}: {waits or 'nothing is made again'}"
    ops = [f"{op} x {n}" for op, n in Counter(again.ops).most_common(_OPS)]
    ops += ["..."] if len(again.ops) > _OPS else []
    freed = f"{again.values} values ({', '.join(ops)}), {format_si(again.nbytes, 'B')} less"
    cost = f"{format_si(again.flops, 'FLOP')} more"
    n = again.collectives
    sent = f", {n} collective{'s' * (n != 1)} more ({format_si(again.sent, 'B')})" if n else ""
    more, kept = "", again.kept_peak
    if kept is not None and plan.peak_memory > kept:
        more = f"; the peak is higher for it, {format_si(plan.peak_memory, 'B')} instead of {format_si(kept, 'B')}"
    more += waits and f"; {waits}"
    return f"{again.request}: made again for the backward pass are {freed} to keep, {cost}{sent}{more}"
