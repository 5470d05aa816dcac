"""Frees each value behind the last step that reads it, or behind the wait of a message that carries it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from shardlib.compiler.program.buffers import last_reads
from shardlib.compiler.program.steps import Free, Program, Step, Var


def free(program: Program) -> Program:
    """Adds a `Free` for every value that the program makes and does not return."""
    kept = {*program.entry_values, *program.results}
    ends: dict[int, list[Var]] = defaultdict(list)
    for var, i in last_reads(program.steps).items():
        if var not in kept:
            ends[i].append(var)
    steps: list[Step] = []
    for i, step in enumerate(program.steps):
        steps += [step, Free(tuple(ends[i]))] if i in ends else [step]
    return replace(program, steps=tuple(steps))
