"""On which mesh axes the local values of a program may differ between devices: elsewhere they are computed once."""

from __future__ import annotations

from collections.abc import Iterable

from shardlib.lower.program import Collective, Program, Var, reads, syms
from shardlib.meshes.axis import Axis

Primes = tuple[Axis, ...]


def varying(program: Program, everything: Primes | None = None) -> dict[Var, Primes]:
    """The prime parts of axes that each variable may differ on; `everything`, if given, for every variable."""
    varies: dict[Var, Primes] = {}
    for var in program.inputs:
        if everything is not None:
            varies[var] = everything
        elif var in program.varies:
            varies[var] = program.varies[var]
        else:
            assert var.layout is not None, f"{var} is an input without a layout"
            varies[var] = primes((*var.layout.axes, *var.layout.pending_axes))
    for var, _ in program.captured:
        varies[var] = everything or ()
    for step in program.steps:
        axes: set[Axis] = {a for v in reads(step) for a in varies[v]}
        axes |= set(primes(a for s in syms(step) for a in s.axes))
        if isinstance(step, Collective):
            group = set(primes(step.axes))
            axes = axes - group if step.kind in ("all_reduce", "all_gather") else axes | group
        for out in step.outs:
            if out is not None:
                varies[out] = primes(axes) if everything is None else everything
    return varies


def primes(axes: Iterable[Axis]) -> Primes:
    """The prime parts of axes, each once, in order."""
    found = {p for a in axes for p in a.primes()}
    return tuple(sorted(found, key=lambda a: (a.name, a.pre)))
