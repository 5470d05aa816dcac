"""Lists the numbers of a call that a program reads."""

from __future__ import annotations

from shardlib.compiler.program.nested_args import leaves
from shardlib.compiler.program.steps import Compute, Program
from shardlib.core.call_scalar import Scalar


def list_numbers(program: Program) -> tuple[int, ...]:
    """Returns the leaves of the call that are numbers, and that the program's steps and results read."""
    read = [x for s in program.steps if isinstance(s, Compute) for x in leaves((s.args, s.kwargs), Scalar)]
    return tuple(sorted({leaf for x in (*read, *leaves(program.outputs, Scalar)) for leaf in x.leaves()}))
