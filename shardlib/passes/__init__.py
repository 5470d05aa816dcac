"""Passes over a lowered program, each from program to program. What the last one makes runs, and is what plans show."""

from __future__ import annotations

from shardlib.passes import bundle, free, fuse, reuse, schedule, settle
from shardlib.program.check import check
from shardlib.program.steps import Program

PASSES = (fuse.fuse, bundle.bundle, schedule.schedule, settle.settle, reuse.reuse, free.free)


def run_passes(program: Program) -> Program:
    """The program after all passes, checked after each; raises `ProgramError` for what would be a fault of ours."""
    for one in PASSES:
        program = check(one(program))
    return program
