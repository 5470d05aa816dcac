"""The text of a plan that fits on a screen: totals, inputs, collectives by module, results, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardlib.compiler.plan.groups import PHASES, STATE, Group, Item, group, group_to_fit, star
from shardlib.compiler.plan.items import GRADIENT, NEW
from shardlib.compiler.plan.rows import notes
from shardlib.compiler.simulate.simulated import clock
from shardlib.core.text_tables import format_si, format_table

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

LINES, WIDTH = 60, 120  # at most
_RESULTS, _WARNINGS, _NOTES = 3, 4, 4  # lines of results, warnings, and lines on other costs
_NAME = 52  # columns of the name of a group


def summarize(plan: Plan, width: int = WIDTH) -> str:
    """Returns the text, at most `LINES` lines of at most `width` columns."""
    above, below = [[plan.heading], _totals(plan)], [_results(plan), _warnings(plan), _pipeline(plan)]
    taken = sum(len(part) + 1 for part in [*above, *below] if part) + len(_END) + 2
    inputs, program = _share(LINES - taken, lambda n: _inputs(plan, n), lambda n: _program(plan, n))
    parts = [*above, inputs, program, *below, list(_END)]
    return "\n\n".join("\n".join(line if len(line) <= width else f"{line[: width - 3]}..." for line in part) for part in parts if part)


_END = ("all steps: print(plan.full)   why collective i is there: print(plan.explain(i))   plan.warnings, plan.redundant",)


def _share(lines: int, first: Callable[[int], list[str]], second: Callable[[int], list[str]]) -> tuple[list[str], list[str]]:
    """Returns two sections of together at most `lines` lines; each may have the lines that the other does not need."""
    one = first(lines // 3)
    two = second(lines - len(one))
    return first(lines - len(two)), two


def _totals(plan: Plan) -> list[str]:
    program = plan.compiled.program
    counts, sizes = Counter[str](), Counter[str]()
    for item in plan.items.collectives:
        counts[item.kind] += 1
        sizes[item.kind] += item.bytes  # type: ignore[assignment]
    n = len(program.collectives)
    sent = f"{format_si(plan.comm_bytes, 'B')} in {n} collective{'s' * (n != 1)}" if n else "nothing: no collectives"
    kinds = [f"{counts[kind]} {kind} {format_si(size, 'B')}" for kind, size in sizes.most_common()]
    rows = [
        ("sent per device", sent + (f" ({', '.join(kinds)})" if len(kinds) > 1 else "")),
        ("FLOPs per device", format_si(plan.flops, "FLOP")),
        ("peak memory", f"{format_si(plan.peak_memory, 'B')} per device"),
    ]
    if plan.mesh.machine is not None:
        step = plan.simulate()
        exposed = f"of which {clock(step.exposed)} wait for communication" if step.exposed else "no communication shows"
        rows.append(("simulated step", f"{clock(step.seconds)} on {step.machine}, {exposed}"))
    return [*format_table(rows), *notes(plan)[:_NOTES]]


def _inputs(plan: Plan, limit: int) -> list[str]:
    items = plan.items.inputs
    tensors = [item for item in items if item.phase != STATE]
    groups = _join_siblings(group(tensors))
    state = group([replace(item, note="") for item in items if item.phase == STATE])
    room = limit - len(state) - 1
    if len(groups) > room:
        groups = group_to_fit([_coarse(plan, item) for item in tensors], room)
    head = ("inputs", "type", "", "per device", "layout")
    shown, rest = _largest(groups, room)
    rows = [head, *(_tensor(g, g.first.note) for g in shown), *(_tensor(g, _notes(g, items)) for g in state)]
    return [*format_table(rows, _NAME), *_tail(rest, "tensors")] if items else ["no inputs"]


def _tensor(g: Group, note: str) -> tuple[str, ...]:
    return f"  {_short(g.name)}", g.first.kind, f"x {g.times}" * (g.times > 1), format_si(g.bytes, "B"), note


def _notes(g: Group, items: Sequence[Item]) -> str:
    """Counts the layouts of moments: `18 like its parameter, 3 whole`."""
    counts = Counter(items[item.position].note for item in g.items).most_common()
    return counts[0][0] if len(counts) == 1 else ", ".join(f"{n} {note}" for note, n in counts)


def _coarse(plan: Plan, item: Item) -> Item:
    """Returns an input with its dtype and axes instead of its shape and layout."""
    layout = plan.compiled.program.inputs[item.position].layout
    axes = " ".join(dict.fromkeys(map(str, layout.axes))) if layout is not None else ""
    return replace(item, kind=item.kind.partition("[")[0], note=f"over {axes}" if axes else "whole")


def _join_siblings(groups: Sequence[Group]) -> list[Group]:
    """Joins groups of one type and layout whose patterns differ in one word: `attn.{wq,wk}.weight`."""
    at = max((g.pattern.count(".") for g in groups), default=0)
    for i in range(at, -1, -1):
        joined: dict[tuple[str, ...], list[Group]] = {}
        for g in groups:
            words = g.pattern.split(".")
            rest = [word if k != i else "" for k, word in enumerate(words)]
            joined.setdefault((g.first.kind, g.first.note, str(g.times), *(rest if i < len(words) else words)), []).append(g)
        groups = [_joined(alike, i) for alike in joined.values()]
    return list(groups)


def _joined(groups: Sequence[Group], i: int) -> Group:
    if len(groups) == 1:
        return groups[0]
    words = [g.pattern.split(".") for g in groups]
    both = f"{{{','.join(w[i] for w in words)}}}"
    return _Joined(".".join([*words[0][:i], both, *words[0][i + 1 :]]), tuple(item for g in groups for item in g.items))


class _Joined(Group):
    @property
    def name(self) -> str:
        return self.pattern


def _program(plan: Plan, limit: int) -> list[str]:
    items = plan.items.collectives
    if not items:
        return ["program: nothing is sent"]
    phases = [phase for phase in PHASES if any(item.phase == phase for item in items)]
    room = limit - len(phases) - 2
    shown, rest = _largest(group_to_fit(items, room), room)
    timed = plan.mesh.machine is not None
    rows = [("collectives by module", "", "", "sent", "time" * timed, "i", "why")]
    for phase in phases:
        some = [item for item in items if item.phase == phase]
        sent, seconds = sum(i.bytes for i in some), sum(i.seconds for i in some)
        rows.append((f"  {phase}", "", f"{len(some)}", format_si(sent, "B"), clock(seconds) if timed else "", "", ""))
        rows += [_collective(g, timed) for g in shown if g.first.phase == phase]
    return [*format_table(rows, _NAME), *_tail(rest, "collectives")]


def _collective(g: Group, timed: bool) -> tuple[str, ...]:
    seconds = clock(g.seconds) if timed else ""
    times = f"x {g.times}" * (g.times > 1)
    return f"    {_short(g.name)}", g.first.kind, times, format_si(g.bytes, "B"), seconds, str(g.first.position), g.first.note


def _largest(groups: Sequence[Group], limit: int) -> tuple[list[Group], list[Group]]:
    """Returns the groups with most seconds, then bytes, in their order, and the others."""
    if len(groups) <= limit:
        return list(groups), []
    ranked = sorted(groups, key=lambda g: (-g.seconds, -g.bytes))[: max(limit - 1, 0)]
    kept = set(map(id, ranked))
    return [g for g in groups if id(g) in kept], [g for g in groups if id(g) not in kept]


def _tail(rest: Sequence[Group], noun: str) -> list[str]:
    if not rest:
        return []
    n, size = sum(g.times for g in rest), format_si(sum(g.bytes for g in rest), "B")
    return [f"  ... and {n} more {noun} in {len(rest)} groups, {size}: print(plan.full)"]


def _results(plan: Plan) -> list[str]:
    groups = group_to_fit(plan.items.results, _RESULTS)
    shown, rest = _largest(groups, _RESULTS)
    rows = [("results", "", "", "per device", "layout"), *(_tensor(g, g.first.note) for g in shown)]
    roles = Counter(role for _, role, _ in plan.items.output_roles.values())
    also = [f"{roles[NEW]} inputs are overwritten"] * bool(roles[NEW])
    also += [f"{roles[GRADIENT]} gradients are returned"] * bool(roles[GRADIENT])
    return [*format_table(rows, _NAME), *_tail(rest, "tensors"), *([f"  {', '.join(also)}"] if also else [])]


def _warnings(plan: Plan) -> list[str]:
    warnings = plan.warnings
    lines = [line for w in warnings[:_WARNINGS] for line in (f"  ! {w.text}", f"      -> {w.remedy}")]
    more = len(warnings) - _WARNINGS
    return ["warnings", *lines, *([f"  {more} more: plan.warnings"] if more > 0 else [])] if lines else ["warnings: none"]


def _pipeline(plan: Plan) -> list[str]:
    return [] if plan.pipeline is None else ["pipeline", *(f"  {line}" for line in plan.pipeline.brief())]


def _short(name: str) -> str:
    """Cuts the middle out of a long name."""
    limit = _NAME - 4
    return name if len(name) <= limit else f"{name[: limit // 3]}...{name[len(name) - limit + limit // 3 + 3 :]}"
