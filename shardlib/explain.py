"""Why: a value or a collective, as a chain back to the annotations."""

from __future__ import annotations

from shardlib.compile import Compiled
from shardlib.graph import Op, Value
from shardlib.lower.program import Collective, Var


def collective(compiled: Compiled, c: Collective) -> str:
    """What moved, between which layouts, who made it and who reads it, and what decided both."""
    lines = [
        f"{c.kind}[{' '.join(map(str, c.axes))}] of {c.source.name}, {c.bytes:,.0f} bytes per device",
        f"  because {c.reason}",
    ]
    if c.line:
        lines.append(f"  at {c.line}")
    value = c.source.value
    if value is not None and value.op is not None:
        lines += [f"  made by {line}" for line in _op(compiled, value.op)]
    reader = c.because[1] if isinstance(c.because, tuple) else None
    if isinstance(reader, Op):
        lines += [f"  read by {line}" for line in _op(compiled, reader)]
    return "\n".join(lines)


def value(compiled: Compiled, v: Value, var: Var, name: str) -> str:
    """Each cut of a value: which annotation asked for it, and what it won against."""
    flood = compiled.propagated.flood
    lines = [f"{name} is [{var.layout}]"]
    if v in flood.fixed:
        lines.append(f"  fixed by {flood.fixed[v][1].source}")
        return "\n".join(lines)
    cut = var.form[0] if var.form else ()
    for leaf, axes in zip(flood.leaves(v) if not v.constant else (), cut, strict=False):
        label = flood.names.get(leaf, f"a dim of {flood.dims.size(leaf)}")
        for axis in axes:
            source = next((w.source for w in flood.wants.get(leaf, ()) if w.axis == axis), None)
            lines.append(f"  {label} is cut over {axis}: asked for by {source}")
    if v.op is not None:
        lines += [f"  made by {line}" for line in _op(compiled, v.op)]
    return "\n".join(lines)


def _op(compiled: Compiled, op: Op) -> list[str]:
    units, decider = compiled.propagated.units, compiled.propagated.decider
    lines = [f"{op.name} = {op.target}" + (f" at {op.line}" if op.line else "")]
    unit = units.unit.get(op)
    if unit is not None:
        for axis in compiled.mesh.axis_names:
            decision = decider.decision(unit, axis)
            if decision is not None:
                lines.append(f"  {decision}")
    return lines
