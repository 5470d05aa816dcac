"""Compares two plans line by line: after one more annotation, on another mesh, or of another version of a function.

Source lines are equal if their file and text are, so that plans can be compared across an edit that moved lines.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shardlib.compiler.plan.names import shorten
from shardlib.compiler.plan.page.write_page import page_text, write_page
from shardlib.compiler.plan.totals import Figure, figures
from shardlib.compiler.program.steps import Compute
from shardlib.core.errors import ShardingError
from shardlib.core.name_patterns import strip_numbers
from shardlib.core.source_lines import Line, format_path_line
from shardlib.core.text_tables import fold_names, format_si, format_table
from shardlib.sharding.mesh.machine import Machine

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

Spot = tuple[str, str, int, bool]  # a line: its file, its text, its rank among equal texts, True if its backward


@dataclass(frozen=True)
class Total:
    """A figure of both plans (`compiler/plan/totals`); 0 for a plan without it.

    Of a pipeline, `where` says on which stages; the stages of both plans if they differ.
    """

    figure: str
    unit: str
    before: float
    after: float
    where: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Its row of the table."""
        before, after = (Figure(self.figure, x, self.unit).amount for x in (self.before, self.after))
        return _labeled(self.figure, self.where), before, after, _share(self.before, self.after)


@dataclass(frozen=True)
class Moved:
    """Collectives of one line, kind, axes and value name: their `times` and `bytes` in all, before and after."""

    kind: str
    axes: tuple[str, ...]
    value: str
    times: tuple[int, int]
    bytes: tuple[float, float]

    def __str__(self) -> str:
        before, after = (
            f"{n} times, {format_si(size, 'B')}" if n > 1 else format_si(size, "B") if n else ""
            for n, size in zip(self.times, self.bytes, strict=True)
        )
        sign = "~" if before and after else "-" if before else "+"
        return f"{sign} {self.kind}[{' '.join(self.axes)}] {self.value}  {' -> '.join(filter(None, (before, after)))}"


@dataclass(frozen=True)
class LineDiff:
    """A source line whose FLOPs per device, or collectives, changed; `line` is its place after, or before if gone."""

    line: str
    text: str
    backward: bool
    flops: tuple[float, float]
    collectives: tuple[Moved, ...]

    def __str__(self) -> str:
        lines = [f"{'backward of ' if self.backward else ''}{self.line}  {self.text}".rstrip()]
        if self.flops[0] != self.flops[1]:
            lines.append(f"    {' -> '.join(format_si(n, 'FLOP') for n in self.flops)} ({_share(*self.flops)})")
        return "\n".join([*lines, *(f"  {c}" for c in self.collectives)])


@dataclass(frozen=True)
class PlanDiff:
    """The result of `plan.diff(other)`: true if something changed; `print` it, or take it as plain data.

    `inputs` and `outputs` lists those with another layout, or in one plan only: (name, before, after), "" if missing.
    """

    before: str
    after: str
    totals: tuple[Total, ...]
    inputs: tuple[tuple[str, str, str], ...]
    outputs: tuple[tuple[str, str, str], ...]
    lines: tuple[LineDiff, ...]
    plans: tuple[Plan, Plan] = field(repr=False, compare=False)

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.lines) or any(t.before != t.after for t in self.totals)

    def __str__(self) -> str:
        heading = self.before if self.before == self.after else f"{self.before}\n-> {self.after}"
        if not self:
            return f"{heading}\n\nnothing changed: layouts, collectives, FLOPs and memory are the same"
        parts = [[heading], format_table([("totals", "before", "after", ""), *(t.cells for t in self.totals)])]
        for title, rows in (("inputs", self.inputs), ("outputs", self.outputs)):
            cells = [(f"  {name}", a or "not there", f"-> {b or 'not there'}") for name, a, b in fold_names(rows)]
            parts += [[title, *format_table(cells)]] if cells else []
        if self.lines:
            program = "program (- gone, + new, ~ other bytes)"
            parts.append([program, *(f"  {x}" for line in self.lines for x in str(line).splitlines())])
        return "\n\n".join("\n".join(part) for part in parts)

    def to_dict(self) -> dict[str, Any]:
        """Returns the difference as plain data (JSON-ready)."""
        data: dict[str, Any] = _plain(asdict(self))
        del data["plans"]
        return data

    def html(self, path: str | os.PathLike[str], *, machine: Machine | str | None = None) -> None:
        """Writes both plans and their differences, side by side, as one HTML file, like `Plan.html`.

        Example:
            >>> import tempfile, torch, shardlib as sl
            >>> product = lambda x, w: x @ w
            >>> with sl.Mesh(data=2):
            ...     before = sl.jit(product).plan(torch.ones(4, 4), torch.ones(4, 4))
            ...     after = sl.jit(product, in_specs=("m@data _", None)).plan(torch.ones(4, 4), torch.ones(4, 4))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     before.diff(after).html(f"{folder}/change.html")
        """
        write_page(path, page_text(f"{self.before} -> {self.after}", self.plans, machine, self))


@dataclass
class _Costs:
    """The costs of one line of one plan."""

    line: Line | None = None
    flops: float = 0.0
    moved: defaultdict[tuple[str, tuple[str, ...], str], list[float]] = field(default_factory=lambda: defaultdict(list))


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Compares two plans. Raises `ShardingError` for another object."""
    if not isinstance(after, type(before)):
        raise ShardingError(
            f"the plan of {before.name} is compared with {after!r}",
            rule="plans are compared with plans",
            remedy="plan.diff(step.plan(*args)), where step is jitted",
        )
    old, new = _costs(before), _costs(after)
    changed = (_line(spot, old.get(spot, _Costs()), new.get(spot, _Costs())) for spot in {**new, **old})
    lines = tuple(x for x in changed if x.collectives or x.flops[0] != x.flops[1])
    was, now = before.to_dict(), after.to_dict()
    inputs, outputs = (_placed(was[key], now[key]) for key in ("inputs", "outputs"))
    return PlanDiff(before.heading, after.heading, _totals(before, after), inputs, outputs, lines, (before, after))


def _totals(before: Plan, after: Plan) -> tuple[Total, ...]:
    was, now = ({x.name: x for x in figures(plan)} for plan in (before, after))
    totals = []
    for name, figure in (was | now).items():
        old, new = (some.get(name, Figure(name, 0.0)) for some in (was, now))
        where = " -> ".join(dict.fromkeys(filter(None, (old.where, new.where))))
        totals.append(Total(name, figure.unit, float(old.value), float(new.value), where))
    return tuple(totals)


def _labeled(name: str, where: str) -> str:
    return f"{name} ({where})" if where else name


def _share(before: float, after: float) -> str:
    if before == after:
        return "as before"
    return f"{100 * (after / before - 1):+.3g} %" if before else "new"


def _costs(plan: Plan) -> dict[Spot, _Costs]:
    """Returns the costs of every line, in program order."""
    program = plan.compiled.program
    computed = [(s.line, s.backward) for s in program.steps if isinstance(s, Compute)]
    spots = _spots([*computed, *((c.line, c.backward) for c in program.collectives)])
    costs: defaultdict[Spot, _Costs] = defaultdict(_Costs)
    for step in program.steps:
        if isinstance(step, Compute) and step.flops:
            mine = costs[spots[step.line, step.backward]]
            mine.line, mine.flops = step.line, mine.flops + step.flops
    for c, planned in zip(program.collectives, plan.collectives, strict=True):
        mine = costs[spots[c.line, c.backward]]
        mine.line = c.line
        mine.moved[planned.kind, planned.axes, strip_numbers(planned.value)].append(planned.bytes)
    return dict(costs)


def _spots(lines: Iterable[tuple[Line | None, bool]]) -> dict[tuple[Line | None, bool], Spot]:
    """Returns the key of every line: equal texts are ranked by line number."""
    numbers_by_text: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    distinct = dict.fromkeys(lines)
    for line, _ in distinct:
        if line is not None:
            numbers_by_text[line.file, line.text].add(line.lineno)
    ranks = {(*key, n): i for key, numbers in numbers_by_text.items() for i, n in enumerate(sorted(numbers))}
    return {
        (line, backward): ("", "", 0, backward)
        if line is None
        else (line.file, line.text, ranks[line.file, line.text, line.lineno], backward)
        for line, backward in distinct
    }


def _line(spot: Spot, before: _Costs, after: _Costs) -> LineDiff:
    moved = []
    for key in {**before.moved, **after.moved}:
        a, b = before.moved.get(key, []), after.moved.get(key, [])
        if (len(a), sum(a)) != (len(b), sum(b)):
            moved.append(Moved(*key, (len(a), len(b)), (sum(a), sum(b))))
    line = after.line or before.line
    return LineDiff(
        format_path_line(line), line.text if line else "", spot[-1], (before.flops, after.flops), tuple(moved)
    )


def _placed(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    rows = ((shorten(name), before.get(name, ""), after.get(name, "")) for name in {**before, **after})
    return tuple(row for row in rows if row[1] != row[2])


def _plain(x: Any) -> Any:
    """Turns tuples into lists, for JSON."""
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    return [_plain(y) for y in x] if isinstance(x, tuple) else x
