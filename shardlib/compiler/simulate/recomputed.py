"""Finds recomputation: calls of the backward pass that repeat one of the forward pass on the same values."""

from __future__ import annotations

from shardlib.compiler.program.steps import Compute, Program
from shardlib.compiler.program.value_numbering import firsts


def recomputed(program: Program) -> set[Compute]:
    """Returns the calls that run again, in a checkpoint or by `remat`."""
    first = firsts(program)
    calls = (s for s in program.steps if isinstance(s, Compute) and s.backward and s.flops)
    return {s for s in calls if s.out_vars and all(first[v] is not v for v in s.out_vars)}
