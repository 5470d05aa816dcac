"""Runs the passes over a lowered program, each from program to program. The last program runs, and plans show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from shardlib.compiler.passes import fuse_alpha
from shardlib.compiler.passes.comm import bucket_collectives, hide_messages, merge_halos, row_overlap
from shardlib.compiler.passes.memory import free, offload_saved, offload_state, reuse_buffers, update_in_place
from shardlib.compiler.program.buffers import peak_bytes
from shardlib.compiler.program.check_order import check
from shardlib.compiler.program.steps import Program, Var
from shardlib.compiler.program.verify import verify
from shardlib.compiler.schedule_options import AHEAD, DEFAULT, Schedule
from shardlib.sharding.mesh.machine import Machine

PASSES = (
    merge_halos.share_borders,
    fuse_alpha.fuse,
    row_overlap.parts,
    bucket_collectives.bundle,
    hide_messages.schedule,
    offload_saved.offload,
    update_in_place.settle,
    reuse_buffers.reuse,
    free.free,
)
_MOVING = frozenset({row_overlap.parts, bucket_collectives.bundle, hide_messages.schedule})


@dataclass(frozen=True)
class Hosted:
    """The values in the host's memory, besides those that the schedule names.

    Saved `values` are there until the backward pass. `inputs` (by position) start there; `outputs` end there.
    """

    values: Collection[Var] = ()
    inputs: Collection[int] = ()
    outputs: Collection[int] = ()


def run_passes(
    program: Program,
    how: Schedule = DEFAULT,
    memory: float | None = None,
    hosted: Hosted = Hosted(),
    *,
    ahead: str | None = None,
    draft: bool = False,
    report: Callable[[str, Program], None] = lambda stage, program: None,
    peak: Callable[[Program], int] = peak_bytes,
) -> Program:
    """Returns the program after all passes, checked after each, and verified after the last.

    A `draft` is not checked; only its figures are of use. `peak` returns a program's peak in bytes. `report` takes the
    module name and the program of each pass, except for drafts. Raises `ProgramError` for a fault of the compiler.

    Messages that run further ahead hide more, and hold more memory. `ahead` is one of `AHEAD`; None is the furthest
    that fits into `memory` bytes (None: those of a device, if the mesh names a machine). If no program fits, the result
    is the one in which nothing moves if `memory` is not None, and else the one that hides most.
    """
    limit = _memory(program) if memory is None else memory
    whole, near = replace(how, parts=1), replace(how, parts=1, prefetch=0)
    all_ways = _Way(how), _Way(whole), _Way(whole, frozenset({hide_messages.schedule})), _Way(near), _Way(near, _MOVING)
    ways = dict(zip(AHEAD, all_ways, strict=True))
    first, *others = dict.fromkeys(ways.values())

    @cache
    def passed(way: _Way) -> Program:
        result = program
        for stage, after in _passed(program, way, hosted):
            result = after if draft or after is result else check(after)
            if not draft:
                report(stage, result)
        if not draft:
            verify(result)  # including every message's sizes, on every kind of device
        return result

    def fits(way: _Way) -> bool:
        return math.isinf(limit) or peak(passed(way)) <= limit

    if ahead is not None:
        return passed(ways[ahead])
    if fits(first) or not (program.collectives or passed(first).copied):
        return passed(first)
    if memory is None and not fits(others[-1]):  # no budget was requested: few trials
        return passed(first)
    return passed(next(filter(fits, others), others[-1]))


def _memory(program: Program) -> float:
    """Returns a device's bytes of memory, if the mesh names a machine; else infinity."""
    machine = program.mesh.machine
    return math.inf if machine is None else Machine.convert(machine).device.memory


class _Way(NamedTuple):
    """A schedule, and the passes that it leaves out."""

    how: Schedule
    without: Collection[Any] = frozenset()


def _passed(program: Program, way: _Way, hosted: Hosted) -> Iterator[tuple[str, Program]]:
    """Runs each pass; yields the name of its module and its program."""
    how = way.how
    whole_rows = replace(how, parts=1) if hosted.values else how  # values on the host are whole
    configured: dict[Any, Callable[[Program], Program]] = {
        row_overlap.parts: partial(row_overlap.parts, how=whole_rows),
        bucket_collectives.bundle: lambda p: bucket_collectives.bundle(p, how),
        offload_saved.offload: partial(offload_saved.offload, how=how, chosen=hosted.values),
        update_in_place.settle: partial(_settled, how=how, hosted=hosted),
    }
    for one in PASSES:
        if one not in way.without:
            program = configured.get(one, one)(program)
            yield one.__module__.rpartition(".")[2], program


def _settled(program: Program, how: Schedule, hosted: Hosted) -> Program:
    """Updates state in place, and moves state to and from the host's memory, in the order that holds less memory."""
    if not hosted.inputs and not hosted.outputs:
        return update_in_place.settle(program)
    moved = partial(offload_state.offload_state, away=hosted.inputs, sent=hosted.outputs, how=how)
    on_host = {i: program.replaced[i] for i in hosted.inputs if i in program.replaced}
    settled = update_in_place.settle(program)
    settled = replace(
        settled, replaced={**settled.replaced, **on_host}
    )  # including state that no step updates in place
    both = moved(settled), update_in_place.settle(moved(program))
    return min(both, key=lambda candidate: peak_bytes(free.free(reuse_buffers.reuse(candidate))))
