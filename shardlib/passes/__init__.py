"""Passes over a lowered program, each from program to program. What the last one makes runs, and is what plans show."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from shardlib.machine import Machine
from shardlib.passes import bundle, free, fuse, offload, reuse, schedule, settle
from shardlib.program.check import check
from shardlib.program.steps import Program, Var
from shardlib.program.storage import peak_bytes
from shardlib.schedule import DEFAULT, Schedule

PASSES = (fuse.fuse, bundle.bundle, schedule.schedule, offload.offload, settle.settle, reuse.reuse, free.free)
_MOVING = {bundle.bundle, schedule.schedule}


def run_passes(
    program: Program,
    how: Schedule = DEFAULT,
    memory: float | None = None,
    offloaded: Collection[Var] | None = None,
    *,
    draft: bool = False,
) -> Program:
    """The program after all passes, checked after each unless it is a `draft`, of which only figures are wanted.

    Raises `ProgramError` for what would be a fault of ours.

    What hides messages holds memory. Where the program would not fit into `memory` bytes (None: what a device of the
    mesh's machine has), nothing is gathered ahead, and then nothing moves at all. Where that does not fit either, it is
    the program that holds least if `memory` was asked for, and else the one that hides most. `offloaded` are the values
    that are meanwhile in the host's memory (None: those that the schedule names).
    """
    limit = Machine.of(program.mesh.machine).device.memory if memory is None else memory
    found: list[tuple[int, Program]] = []
    for way, moves in ((how, True), (replace(how, prefetch=0), True), (replace(how, prefetch=0), False)):
        made = program
        for made in _passed(program, way, moves, offloaded):
            if not draft:
                check(made)
        if not (program.collectives or made.copied) or (held := peak_bytes(made)) <= limit:
            return made
        found.append((held, made))
    return found[0][1] if memory is None else min(found, key=lambda pair: pair[0])[1]


def _passed(program: Program, how: Schedule, moves: bool, offloaded: Collection[Var] | None) -> Iterator[Program]:
    """What each pass makes; where nothing `moves`, messages stay where they are."""
    for one in PASSES:
        if moves or one not in _MOVING:
            if one is offload.offload:
                program = offload.offload(program, how, offloaded)
            else:
                program = bundle.bundle(program, how) if one is bundle.bundle else one(program)
            yield program
