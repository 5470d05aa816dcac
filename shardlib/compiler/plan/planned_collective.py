"""A collective as a plan shows it."""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan import backends
from shardlib.compiler.plan.explain import Explainer
from shardlib.core.source_lines import format_path_line
from shardlib.core.text_tables import format_si


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of a plan.

    `bytes` go on the wire per device (ring algorithms). `value` names the tensor that moves. `line` is the user's
    source line, or, if `backward`, the line that this gradient belongs to. `reason` names the layouts that forced it,
    and their reader. `backend` names the backend, and why it was chosen ("" on an abstract mesh).

    If the collective crosses machines, by the machine model of the mesh, `form` names the way ("ring", "two_level",
    "exchange" or "scatter_gather"), and `across` counts the bytes that a group sends out of each of its machines.
    Otherwise they are "" and 0. A model whose links are all alike knows no machines.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    value: str
    line: str
    backward: bool
    reason: str
    backend: str = ""
    form: str = ""
    across: float = 0.0

    def __str__(self) -> str:
        back = "backward of" if self.backward else "at"
        return f"{self.kind}[{' '.join(self.axes)}] {format_si(self.bytes, 'B')} {back} {self.line}: {self.reason}"


def planned_collectives(compiled: Compiled, explainer: Explainer) -> tuple[PlannedCollective, ...]:
    """Returns every collective of the program, in order."""
    crossings = backends.crossings(compiled.program)
    return tuple(
        PlannedCollective(
            c.kind,
            tuple(map(str, c.axes)),
            float(c.bytes),
            explainer.subject(c),
            format_path_line(c.line),
            c.backward,
            explainer.reason(c),
            str(backends.of_collective(c, compiled.mesh) or ""),
            *((crossings[c].name, crossings[c].across) if c in crossings else ()),
        )
        for c in compiled.program.collectives
    )
