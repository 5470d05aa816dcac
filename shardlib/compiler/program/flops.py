"""The arithmetic of a program: of the device that does most of it."""

from __future__ import annotations

from collections import defaultdict

from shardlib.compiler.program.steps import Compute, Program
from shardlib.compiler.program.sym_int import Sym, apart, everywhere, most


def flops(program: Program) -> float:
    """Floating-point operations of the device that does most: it need not be the one that does most of each step."""
    alike = 0.0
    shared: defaultdict[Sym, float] = defaultdict(float)  # for each unit of work
    for step in program.steps:
        if isinstance(step, Compute):
            if step.work is None:
                alike += step.flops
            else:
                shared[step.work] += step.flops / most(step.work)
    devices = everywhere(apart(axis for work in shared for axis in work.axes))
    return alike + max(float(sum(n * work.at(coords) for work, n in shared.items())) for coords in devices)
