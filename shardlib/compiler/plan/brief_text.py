"""The text of a plan that fits on a screen: totals, inputs, collectives by module, results, warnings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, compress
from textwrap import wrap
from typing import TYPE_CHECKING

from shardlib.compiler.plan.groups import (
    OUTPUT,
    STATE,
    Group,
    Item,
    group,
    group_to_fit,
    join_siblings,
    largest,
    set_apart,
)
from shardlib.compiler.plan.items import GRADIENT, NEW
from shardlib.compiler.plan.phases import FORWARD, PHASES
from shardlib.compiler.plan.plan_warnings import PlanWarning
from shardlib.compiler.plan.totals import (
    COLLECTIVES,
    EXPOSED,
    FLOPS,
    PEAK,
    SENT,
    STEP,
    Figure,
    busiest_sender,
    figures,
    list_costs,
    scope_label,
)
from shardlib.compiler.simulate.simulated import clock
from shardlib.core.text_tables import format_si, format_table
from shardlib.sharding.mesh.machine import Machine

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

LINES, WIDTH = 60, 120  # at most
_RESULTS, _WARNINGS, _NOTES = 12, 9, 4  # lines of sections
_KINDS, _STATE, _SCALARS = 3, 4, 3  # kinds of collectives and of moments, and scalar results, that have a line
_NOTE = 26  # columns that a layout or a reason may take from names


def brief_text(plan: Plan, width: int = WIDTH) -> str:
    """Returns the text, at most `LINES` lines of at most `width` columns."""
    above = [[plan.heading], _totals(plan)]
    below = [_results(plan, width), _warnings(plan, width), _pipeline(plan), [_END]]
    room = LINES - 1 - sum(len(part) + 1 for part in (*above, *below) if part) - 1
    wanted = [len(section(plan, LINES, width)) for section in (_inputs, _program)]
    first = min(wanted[0], max(room - wanted[1], 2 * room // 5))
    parts = [*above, _inputs(plan, first, width), _program(plan, room - first, width), *below]
    return "\n\n".join("\n".join(_cut_line(line, width) for line in part) for part in parts if part)


_END = "more: plan.full (every step), plan.explain(i) (why collective i is there), plan.show() (in color)"


def _cut_line(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _table(rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Aligns rows; names, in the first column, lose their first words where the last cells need room."""
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    *taken, note = (max(map(len, column)) for column in columns[1:])
    rows = list(zip(*columns, strict=True))
    limit = max(width - sum(taken) - 2 * len(columns) + 2 - min(note, _NOTE), _NOTE)
    return [line.rstrip() for line in format_table([(_short(name, limit), *cells) for name, *cells in rows], width)]


def _short(name: str, limit: int) -> str:
    """Drops the beginning of a long name, whole words if enough is left; the indentation stays."""
    if len(name) <= limit:
        return name
    bare = name.lstrip()
    indent, words = name[: len(name) - len(bare)], bare.split(".")
    room = limit - len(indent)
    while len(bare) > room and len(words) > 1:
        words = words[1:]
        bare = f"...{'.'.join(words)}"
    if 2 * len(bare) < room or len(bare) > room:
        bare = f"...{name[len(name) - room + 3 :]}"
    return indent + bare


def _totals(plan: Plan) -> list[str]:
    has_machine, stages = plan.mesh.machine is not None, scope_label(plan)
    by_name = {figure.name: figure for figure in figures(plan, plan.simulate() if has_machine else None)}
    sent, collectives, flops, peak = (by_name[name] for name in (SENT, COLLECTIVES, FLOPS, PEAK))
    sizes = defaultdict[str, float](float)
    for c in busiest_sender(plan).collectives:
        sizes[f"{c.kind}[{' '.join(map(str, c.axes))}]"] += c.bytes
    total = f"{sent.amount} in {_count(int(collectives.value), 'collective')}" if sizes else "nothing"
    total += _where(sent) + ", besides messages to other stages" * bool(stages)
    rows = [(SENT, total)]
    if len(sizes) > 1:
        kinds = [f"{kind} {format_si(sizes[kind], 'B')}" for kind in sorted(sizes, key=lambda kind: -sizes[kind])]
        more = f", and {len(kinds) - _KINDS} more" if len(kinds) > _KINDS else ""
        rows.append(("", ", ".join(kinds[:_KINDS]) + more))
    rows += [(FLOPS, str(flops)), (PEAK, f"{peak.amount} per device{_where(peak)}")]
    if plan.mesh.machine is not None:
        step, exposed = by_name[STEP], by_name[EXPOSED]
        machine = Machine.convert(plan.mesh.machine).name or "the machine of the mesh"
        waiting = f"{exposed.amount} of it waiting for messages{_where(exposed)}"
        rows.append((STEP, f"{step} on {machine}, {waiting}"))
    return [*format_table(rows, WIDTH), *list_costs(plan)[:_NOTES]]


def _where(figure: Figure) -> str:
    return f" ({figure.where})" if figure.where else ""


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _inputs(plan: Plan, limit: int, width: int) -> list[str]:
    items = plan.items.inputs
    return _tensors(plan, "inputs", items, limit, width) if items else ["no inputs"]


def _results(plan: Plan, width: int) -> list[str]:
    items = plan.items.results
    roles = Counter(role for _, role, _ in plan.items.output_roles.values())
    also = [f"new values of {_count(roles[NEW], 'input')}"] * bool(roles[NEW])
    also += [_count(roles[GRADIENT], "gradient")] * bool(roles[GRADIENT])
    lines = _tensors(plan, "results", items, _RESULTS, width) if items else ["results"] * bool(also)
    return [*lines, *([f"  and {', '.join(also)}"] if also else [])]


def _tensors(plan: Plan, title: str, items: Sequence[Item], limit: int, width: int) -> list[str]:
    """Returns lines on inputs or results: results of one element, then tensors by module, then each kind of moment."""
    is_scalar = [item.phase == OUTPUT and item.kind.endswith("[]") for item in items]
    tensors = [item for item, scalar in zip(items, is_scalar, strict=True) if item.phase != STATE and not scalar]
    first, more = largest(_group_tensors(list(compress(items, is_scalar))), _SCALARS)
    state, rest = largest(group([replace(item, note="") for item in items if item.phase == STATE]), _STATE)
    room = max(limit - len(first) - len(state) - bool(more or rest) - 1, 1)
    groups = _group_tensors(tensors)
    if len(groups) > room:
        groups = list(group_to_fit([_coarse(plan, item) for item in tensors], room))
    shown, others = largest(groups, room)
    notes = {item.position: item.note for item in items}
    rows = [(title, "type", "", scope_label(plan) or "per device", "layout")]
    rows += [*(_tensor(g, g.first.note) for g in (*first, *shown)), *(_tensor(g, _notes(g, notes)) for g in state)]
    return [*_table(rows, width), *_tail([*more, *others, *rest], "tensor")]


def _group_tensors(items: Sequence[Item]) -> list[Group]:
    return join_siblings(set_apart(group(items)))


def _tensor(g: Group, note: str) -> tuple[str, str, str, str, str]:
    return f"  {g.name}", g.first.kind, f"x {g.times}" * (g.times > 1), format_si(g.bytes, "B"), note


def _notes(g: Group, notes: Mapping[int, str]) -> str:
    """Returns the layout that most moments have: `as its parameter (3 of 4)`."""
    note, n = Counter(notes[item.position] for item in g.items).most_common(1)[0]
    return note if n == g.times else f"{note} ({n} of {g.times})"


def _coarse(plan: Plan, item: Item) -> Item:
    """Returns a tensor with its dtype and axes instead of its shape and layout."""
    program = plan.compiled.program
    layout = program.outputs[item.position].layout if item.phase == OUTPUT else program.inputs[item.position].layout
    axes = " ".join(dict.fromkeys(map(str, layout.axes))) if layout is not None else ""
    return replace(item, kind=item.kind.partition("[")[0], note=f"over {axes}" if axes else "whole")


def _program(plan: Plan, limit: int, width: int) -> list[str]:
    items = plan.items.collectives
    if not items:
        return ["collectives: none"]
    phases = [phase for phase in PHASES if any(item.phase == phase for item in items)]
    has_phases = phases != [FORWARD]
    room = max(limit - len(phases) * has_phases - 1, 1)
    shown, rest = largest(group_to_fit(items, room, (item.path for item in plan.items.inputs)), room)
    sent = ", ".join(filter(None, ("sent", scope_label(plan))))
    rows: list[tuple[str, ...]] = [("collectives by module", "", "", sent, "time", "i", "why")]
    for phase in phases:
        some = [item for item in items if item.phase == phase]
        n, nbytes, seconds = len(some), sum(i.bytes for i in some), sum(i.seconds for i in some)
        head = (f"  {phase}", _count(n, "collective"), "", format_si(nbytes, "B"), clock(seconds), "", "")
        rows += [head] * has_phases
        rows += [_collective(g, "    " if has_phases else "  ") for g in shown if g.first.phase == phase]
    if plan.mesh.machine is None:
        rows = [(*row[:4], "", *row[5:]) for row in rows]
    return [*_table(rows, width), *_tail(rest, "collective")]


def _collective(g: Group, indent: str) -> tuple[str, ...]:
    times, sent, at = f"x {g.times}" * (g.times > 1), format_si(g.bytes, "B"), str(g.first.position)
    return indent + g.name, g.first.kind, times, sent, clock(g.seconds), at, g.first.note


def _tail(rest: Sequence[Group], noun: str) -> list[str]:
    if not rest:
        return []
    n, size = sum(g.times for g in rest), format_si(sum(g.bytes for g in rest), "B")
    return [f"  ... and {_count(n, f'more {noun}')} in {_count(len(rest), 'group')}, {size}: print(plan.full)"]


def _warnings(plan: Plan, width: int) -> list[str]:
    if not plan.warnings:
        return ["warnings: none"]
    blocks = [_warning(w, width) for w in plan.warnings]
    ends = list(accumulate(map(len, blocks)))
    shown = max(sum(end <= _WARNINGS for end in ends), 1)
    more = f"  {len(blocks) - shown} more: plan.warnings"
    return ["warnings", *(line for block in blocks[:shown] for line in block), *[more] * (shown < len(blocks))]


def _warning(warning: PlanWarning, width: int) -> list[str]:
    line = f"  ! {warning}"
    if len(line) <= width:
        return [line]
    text = wrap(f"! {warning.text}", width, initial_indent="  ", subsequent_indent="    ")
    return text + wrap(f"-> {warning.remedy}", width, initial_indent="    ", subsequent_indent="       ")


def _pipeline(plan: Plan) -> list[str]:
    return [] if plan.pipeline is None else ["pipeline", *(f"  {line}" for line in plan.pipeline.brief())]
