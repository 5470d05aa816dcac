"""The program of a plan as leaves of a tree: calls, collectives, and copies between memories."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardlib.compiler.graph.ir import Op
from shardlib.compiler.plan.explain import Explainer
from shardlib.compiler.plan.names import Naming
from shardlib.compiler.plan.page.program_tree import Leaf
from shardlib.compiler.plan.phases import step_phases
from shardlib.compiler.plan.planned_collective import PlannedCollective
from shardlib.compiler.plan.rows import is_shown
from shardlib.compiler.program.steps import TIERS, Asked, Collective, Compute, Inside, Program, Start, Var
from shardlib.compiler.simulate.timeline import called
from shardlib.core.name_patterns import strip_numbers
from shardlib.core.source_lines import Line, Module

CALL, SMALL, MESSAGE, COPY = "call", "small", "message", "copy"  # small: views, pointwise calls, constants


@dataclass(frozen=True)
class Record:
    """One row of the program: `var` is its result, and `index` a collective's position, or -1.

    `flops` are those of the busiest device, `bytes` go on the wire.
    """

    kind: str
    var: Var | None
    phase: str
    line: Line | None
    bytes: float = 0.0
    flops: float = 0.0
    index: int = -1
    start: Start | None = None


@dataclass(frozen=True)
class ProgramRows:
    """Makes the leaves of one program, in its order."""

    program: Program
    naming: Naming
    explainer: Explainer
    planned: tuple[PlannedCollective, ...]

    def leaves(self) -> list[Leaf]:
        """Returns a leaf per call and per collective; a collective stands in a group of its neighbors."""
        rows = [*self._rows()]
        calls = [i for i, (_, _, _, record) in enumerate(rows) if record.kind in (CALL, SMALL)]
        following: dict[int, int] = {}
        for before, after in zip([-1, *calls], [*calls, len(rows)], strict=True):
            following |= dict.fromkeys(range(before + 1, after + 1), after)
        leaves: list[Leaf] = []
        for i, (path, text, more, record) in enumerate(rows):
            if record.kind in (MESSAGE, COPY):
                near = [leaves[-1].path] if leaves else []
                near += [rows[following[i]][0]] if following[i] < len(rows) else []
                if near and path not in near:
                    path = next((other for other in near if other[0] == record.phase), near[0])
            at = None if record.line is None else (record.line.file, record.line.lineno)
            key = (record.kind, strip_numbers(text), *more, at, record.bytes, record.flops)
            leaves.append(Leaf(path, text, key, record))
        return leaves

    def _rows(self) -> Iterator[tuple[tuple[str, ...], str, tuple[str, ...], Record]]:
        """Yields path, text, the rest of the key, and record."""
        listed: set[Op] = set()
        index = 0
        for step, phase in zip(self.program.steps, step_phases(self.program), strict=True):
            if isinstance(step, Compute):
                yield self._call(step, phase, listed)
            for c in step.moves if isinstance(step, Start) else ():
                assert isinstance(step, Start)
                is_copy = c.kind in TIERS
                yield self._message(c, phase, -1 if is_copy else index, step)
                index += not is_copy

    def _call(self, step: Compute, phase: str, listed: set[Op]) -> tuple[tuple[str, ...], str, tuple[str, ...], Record]:
        var = next((v for v in step.out_vars if v.value is not None), step.out_vars[0] if step.out_vars else None)
        value = None if var is None else var.value
        op = None if value is None else value.op
        if var is not None and value is not None and op is not None and op not in listed:
            listed.add(op)
            kind = CALL if is_shown(op) and not op.constant else SMALL
            text = f"{self.naming.own(value)} = {self.naming.call(op)}"
        else:
            kind = SMALL
            operands = ", ".join(self.naming.var(v) for v in step.operands[:3])
            text = f"{'' if var is None else f'{self.naming.var(var)} = '}{called(step)}({operands})"
        typed = "" if var is None else self.naming.typed(var)
        record = Record(kind, var, phase, step.line, flops=step.flops)
        return _path(phase, step.line, step.inside), text, (typed,), record

    def _message(
        self, c: Collective, phase: str, index: int, start: Start
    ) -> tuple[tuple[str, ...], str, tuple[str, ...], Record]:
        _, after = self.explainer.ends(c)
        because = c.because
        op = because.by if isinstance(because, Asked) else because.op if isinstance(because, Inside) else None
        inside = op.node.meta.get("modules", ()) if isinstance(op, Op) else ()
        path = _path(phase, c.line, inside)
        axes = " ".join(map(str, c.axes))
        if index < 0:
            text = f"{c.kind} {self.naming.var(c.source)}"
            record = Record(COPY, after, phase, c.line, flops=0.0, start=start)
            return path, text, (self.naming.typed(after),), record
        planned = self.planned[index]
        record = Record(MESSAGE, after, phase, c.line, planned.bytes, 0.0, index, start)
        more = (self.naming.typed(after), strip_numbers(planned.reason), planned.backend, planned.form)
        return path, f"{c.kind}[{axes}] {planned.value}", more, record


def _path(phase: str, line: Line | None, inside: tuple[Module, ...]) -> tuple[str, ...]:
    """Returns the groups around a step: phase, profiler sections, then modules, or the function without modules."""
    sections = line.section if line is not None else ()
    if inside:
        return (phase, *sections, *_module_names(inside))
    function = "" if line is None else _INNER.sub("", line.function).rpartition("<locals>.")[2]
    return (phase, *sections, function) if function else (phase, *sections)


_INNER = re.compile(r"\.<locals>\.<\w+>")  # a comprehension or lambda inside a function


def _module_names(inside: tuple[Module, ...]) -> Iterator[str]:
    """Yields each module's path below the one around it, and its class."""
    above = ""
    for module in inside:
        own = module.path.removeprefix(f"{above}.") if above else module.path
        yield f"{own} ({module.kind})" if own else module.kind
        above = module.path
