"""Counts the arithmetic of a program, for the busiest device."""

from __future__ import annotations

from collections import defaultdict

from shardlib.compiler.program.steps import Compute, Program
from shardlib.compiler.program.sym_int import Sym, apart, everywhere, most


def flops(program: Program) -> float:
    """Counts the floating-point operations of the busiest device, which need not be the busiest in each step."""
    alike = 0.0  # equal on all devices
    shared: defaultdict[Sym, float] = defaultdict(float)  # per unit of work
    for step in program.steps:
        if isinstance(step, Compute):
            if step.work is None:
                alike += step.flops
            else:
                shared[step.work] += step.flops / most(step.work)
    devices = everywhere(apart(axis for work in shared for axis in work.axes))
    return alike + max(float(sum(n * work.at(coords) for work, n in shared.items())) for coords in devices)
