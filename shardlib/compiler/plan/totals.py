"""The totals of a plan: one list of figures for its texts, its page and comparisons."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardlib.compiler.plan import backends
from shardlib.compiler.plan.redundant_work import sentence
from shardlib.compiler.program import flops
from shardlib.compiler.program.buffers import host_bytes, peak_bytes
from shardlib.compiler.program.steps import Program
from shardlib.compiler.simulate.simulated import Simulated, clock
from shardlib.core.text_tables import format_si

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

SENT, COLLECTIVES, FLOPS, REDUNDANT = "sent per device", "collectives", "FLOPs per device", "redundant FLOPs"
PEAK, HOST, STEP, EXPOSED = "peak memory", "host memory", "simulated step", "exposed communication"
_OPS = 4  # rematerialized ops that are named


@dataclass(frozen=True)
class Figure:
    """One total: `value` in B, FLOP, s, or without a unit; of a pipeline, `where` says on which stages."""

    name: str
    value: float
    unit: str = ""
    where: str = ""

    @property
    def amount(self) -> str:
        """`3.07 kB`, `1.2 ms`; counts, without a unit, are exact: `1,234`."""
        if not self.unit:
            return f"{self.value:,.0f}"
        return clock(self.value) if self.unit == "s" else format_si(self.value, self.unit)

    def __str__(self) -> str:
        return f"{self.amount} ({self.where})" if self.where else self.amount


def figures(plan: Plan, simulated: Simulated | None = None) -> list[Figure]:
    """Returns the figures of one device; of a pipeline, those of the stage that has most of each."""
    busiest = busiest_sender(plan)
    most = stage_label(plan, busiest)
    result = [
        Figure(SENT, sent_bytes(busiest), "B", most),
        Figure(COLLECTIVES, len(busiest.collectives), "", most),
        _most(plan, FLOPS, "FLOP", flops.flops),
        Figure(REDUNDANT, sum(r.flops for r in plan.redundant), "FLOP", scope_label(plan)),
        _most(plan, PEAK, "B", peak_bytes),
    ]
    if plan.host_memory:
        result.append(_most(plan, HOST, "B", host_bytes))
    if simulated is not None:
        exposed = Figure(EXPOSED, simulated.exposed, "s", stage_label(plan, simulated.program, "works most"))
        result += [Figure(STEP, simulated.seconds, "s"), exposed]
    return result


def sent_bytes(program: Program) -> float:
    """Returns the bytes that one device sends by collectives."""
    return float(sum(c.bytes for c in program.collectives))


def busiest_sender(plan: Plan) -> Program:
    """Returns the program of the stage that sends most by collectives; without stages, the whole program."""
    return max(plan.programs, key=sent_bytes)


def _most(plan: Plan, name: str, unit: str, measure: Callable[[Program], float]) -> Figure:
    program = max(plan.programs, key=measure)
    return Figure(name, measure(program), unit, stage_label(plan, program))


def stage_label(plan: Plan, program: Program, verb: str = "has most") -> str:
    """Returns `stage 1 has most` for the program of a stage; nothing without stages."""
    return "" if plan.compiled.staged is None else f"stage {plan.programs.index(program)} {verb}"


def scope_label(plan: Plan) -> str:
    """Returns the label of a sum over the whole program: `all stages` of a pipeline, else nothing."""
    return "" if plan.compiled.staged is None else "all stages"


def tabulate_collectives(plan: Plan) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns the table of a plan's collectives by kind, axes and backend, and lines on its other costs."""
    counts: Counter[tuple[str, ...]] = Counter()
    sizes, across = defaultdict[tuple[str, ...], float](float), defaultdict[tuple[str, ...], float](float)
    reasons: dict[str, None] = {}
    program = plan.compiled.program
    forms = backends.crossings(program)
    for c in program.collectives:
        choice, form = backends.of_collective(c, plan.mesh), forms.get(c)
        key = (c.kind, " ".join(map(str, c.axes)), choice.name if choice else "", form.name if form else "")
        counts[key] += 1
        sizes[key] += c.bytes
        across[key] += form.across if form else 0
        reasons |= {str(choice): None} if choice else {}
    wire = ", ".join(filter(None, ("wire bytes per device", scope_label(plan))))
    rows: list[tuple[str, ...]] = [("collective", "axes", "times", wire, "by" if reasons else "")]
    rows += [(*key[:2], str(counts[key]), format_si(sizes[key], "B"), key[2]) for key in sorted(counts)]
    rows.append(("total", "", str(counts.total()), format_si(sum(sizes.values()), "B"), ""))
    if forms:
        cells = [(key[3], format_si(across[key], "B") if key[3] else "") for key in sorted(counts)]
        cells = [("form", "leaves each machine"), *cells, ("", format_si(sum(across.values()), "B"))]
        rows = [(*row, *more) for row, more in zip(rows, cells, strict=True)]
    whole = sentence(plan.redundant, flops.flops(program))
    lines = [*sorted(reasons), _per_device(plan), *_host_lines(plan), *_labeled(plan, [whole]), *_backward_lines(plan)]
    lines += [f"no rule, runs replicated: {op} ({n} times)" for op, n in Counter(plan.replicated_ops).items()]
    return rows, lines


def _per_device(plan: Plan) -> str:
    by_name = {figure.name: figure for figure in figures(plan)}
    sent = f"sent {by_name[SENT]}, " if scope_label(plan) else ""  # without stages, the total of the table
    return f"per device: {sent}{by_name[FLOPS]}, peak memory {by_name[PEAK]}"


def list_costs(plan: Plan) -> list[str]:
    """Returns lines on copies to the host, parts of rows, values kept or computed again, and a search that stopped."""
    return [*_host_lines(plan), *_backward_lines(plan)]


def _labeled(plan: Plan, lines: Iterable[str]) -> Iterator[str]:
    """Adds to lines about the whole program that they count all stages; drops empty ones."""
    yield from (f"{line} (all stages)" if scope_label(plan) else line for line in lines if line)


def _host_lines(plan: Plan) -> list[str]:
    lines = []
    program = max(plan.programs, key=host_bytes)
    if program.copied:
        sent = format_si(sum(c.source.nbytes for c in program.copied), "B")
        held = _most(plan, HOST, "B", host_bytes)
        lines.append(f"in the host's memory: at most {held}, {sent} copied there and back")
    if parts := [c.out.part for c in plan.compiled.program.collectives if c.out.part is not None]:
        lines += _labeled(plan, [f"rows in {parts[0][1]} parts, worked on in turn: {len(parts)} messages"])
    return lines


def _backward_lines(plan: Plan) -> list[str]:
    lines = []
    if (halves := plan.compiled.halves) is not None:
        n, held = len(halves.saved), sum(v.nbytes for v in halves.saved)
        lines.append(f"saved for the backward pass: {n} value{'s' * (n != 1)}, {format_si(held, 'B')}")
    return [*_labeled(plan, [*lines, _recomputed(plan)]), *filter(None, [_stopped(plan)])]


def _stopped(plan: Plan) -> str:
    """Reports that the search ran out of time."""
    search = plan.compiled.search
    if search is None or not search.effort.stopped:
        return ""
    spent = f"{search.effort.spent:.2g} s"
    return f'the search stopped after {spent} as counted: planning="best" goes on, see plan.lower_bound'


def _recomputed(plan: Plan) -> str:
    """Reports values that the backward pass recomputes, and the cost."""
    if (again := plan.compiled.recomputed) is None:
        return ""
    waits = (
        f"{again.moved} value{'s wait' if again.moved > 1 else ' waits'} in the host's memory" if again.moved else ""
    )
    if not again.values:
        return f"{again.request}: {waits or 'nothing is recomputed'}"
    ops = [f"{op} x {n}" for op, n in Counter(again.ops).most_common(_OPS)]
    ops += ["..."] if len(again.ops) > _OPS else []
    n = again.values
    freed = f"{n} value{'s' * (n != 1)} ({', '.join(ops)}): {format_si(again.nbytes, 'B')} less memory"
    cost = f"{format_si(again.flops, 'FLOP')} more"
    n = again.collectives
    sent = f", {n} collective{'s' * (n != 1)} more ({format_si(again.sent, 'B')})" if n else ""
    more, kept = "", again.kept_peak
    if kept is not None and plan.peak_memory > kept:
        more = f"; the peak is higher for it, {format_si(plan.peak_memory, 'B')} instead of {format_si(kept, 'B')}"
    more += waits and f"; {waits}"
    return f"{again.request}: the backward pass recomputes {freed}, {cost}{sent}{more}"
