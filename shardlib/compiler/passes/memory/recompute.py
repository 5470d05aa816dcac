"""Recomputes values for the backward pass: those named by the user, or those that a memory budget requires."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardlib.compiler.memory_options import WORDS, MemoryOptions
from shardlib.compiler.passes.memory import remat_policies
from shardlib.compiler.passes.memory.budget_programs import Finish
from shardlib.compiler.passes.memory.memory_budget import LAST_RESORT, PROGRAMS, within
from shardlib.compiler.passes.memory.offload_saved import movable
from shardlib.compiler.passes.memory.remat import remade
from shardlib.compiler.passes.memory.saved_values import Crossing
from shardlib.compiler.program import flops as program_flops
from shardlib.compiler.program.buffers import peak_bytes
from shardlib.compiler.program.steps import Program, Start, Var
from shardlib.core.errors import public
from shardlib.sharding.mesh.machine import Machine


@public
class RematWarning(UserWarning):
    """Recomputing values takes more memory than keeping them."""


@dataclass(frozen=True)
class Recomputed:
    """Counts the recomputed `values`, and their `nbytes` on the fullest device.

    Recomputing them takes `flops` and `collectives`, which send `sent` bytes. `request` is the user's option, `ops` the
    number of values by op. `kept_peak` is the peak of the program that keeps them (None: not computed). A budget
    offloads `moved` further values.
    """

    request: str
    values: int
    ops: Mapping[str, int]
    nbytes: int
    flops: float
    collectives: int
    sent: float
    kept_peak: int | None = None
    moved: int = 0


def recompute(
    program: Program,
    options: MemoryOptions,
    finish: Finish,
    trial: Finish,
    *,
    moves: bool,
) -> tuple[Program, frozenset[Var], Recomputed | None]:
    """Returns the program that recomputes values as in `options`, the values to offload, and the counts.

    `finish` runs the later passes, `trial` a quick version of them. A budget `moves` values unless the schedule names
    some. Raises `ShardingError` for a budget that is too small.
    """
    if options.remat == "none" and options.memory is None:
        return program, frozenset(), None
    crossing, moved = Crossing.analyze(program), frozenset[Var]()
    if options.memory is not None:
        request, fixed = (
            f"memory={options.memory:,} B",
            crossing.weights if options.regather == "never" else frozenset(),
        )
        may_move = movable(program) if moves and options.schedule.saved is None else ()
        machine = Machine.convert(program.mesh.machine)
        programs = LAST_RESORT if options.planning == "best" else PROGRAMS
        dropped, moved = within(crossing, options.memory, finish, machine, fixed, may_move, trial, programs)
    else:
        request, dropped = f"remat={options.remat!r}", frozenset(_by_name(crossing, options))
    again = remade(crossing, dropped)
    counts = _count(request, crossing, dropped, again)
    if options.memory is None and dropped:
        counts = replace(counts, kept_peak=peak_bytes(finish(program, None, ())))
    return again, moved, replace(counts, moved=len(moved))


def warn_of_a_higher_peak(name: str, counts: Recomputed, peak: int) -> None:
    """Warns if named values, recomputed, take more memory than if kept."""
    if counts.kept_peak is not None and peak > counts.kept_peak:
        others = "" if "full" in counts.request else 'remat="full", '
        warnings.warn(
            f"{name} with {counts.request} holds at most {peak:,} bytes, and without it {counts.kept_peak:,}: what the "
            "values are made of is held instead of them, and all that one step back needs is made at once\n"
            f'Remedy: {others}names of whole modules, or memory="...", which never takes more than it saves',
            RematWarning,
            stacklevel=2,
        )


def refuse_remat(program: Program, options: MemoryOptions, absent: Callable[[str], bool]) -> None:
    """Raises `ShardingError` for names in `remat` of no op and no module, except those that are `absent`."""
    if names := _names(options):
        remat_policies.refuse_unknown(Crossing.analyze(program), names, absent)


def add_up(counts: Sequence[Recomputed | None]) -> Recomputed | None:
    """Returns the counts of several programs as one: sums, and the largest peak."""
    some = [x for x in counts if x is not None]
    if not some:
        return None
    peaks = [x.kept_peak for x in some if x.kept_peak is not None]
    return Recomputed(
        some[0].request,
        sum(x.values for x in some),
        sum((Counter(x.ops) for x in some), Counter()),
        sum(x.nbytes for x in some),
        sum(x.flops for x in some),
        sum(x.collectives for x in some),
        sum(x.sent for x in some),
        max(peaks) if len(peaks) == len(counts) else None,
        sum(x.moved for x in some),
    )


def _names(options: MemoryOptions) -> list[str]:
    """Returns the names in `remat` that are no words of its own."""
    request = [options.remat] if isinstance(options.remat, str) else options.remat
    return [name for name in request if name not in WORDS]


def _by_name(crossing: Crossing, options: MemoryOptions) -> set[Var]:
    """Returns the values that the option's words and names drop."""
    request = [options.remat] if isinstance(options.remat, str) else options.remat
    dropped = set[Var]()
    for word, policy in (("full", remat_policies.full), ("attention", remat_policies.attention)):
        dropped |= policy(crossing) if word in request else set()
    if (names := _names(options)) and any(crossing.back):
        dropped |= remat_policies.named(crossing, names)
    if options.regather == "never":
        return dropped - crossing.weights
    return dropped | (crossing.weights - {*crossing.held}) if dropped else dropped


def _count(request: str, crossing: Crossing, dropped: Collection[Var], again: Program) -> Recomputed:
    gone = [o for o in crossing.held if o in dropped]
    before, after = (
        [
            program_flops.flops(p),
            sum(isinstance(s, Start) for s in p.steps),
            sum(c.bytes for c in p.collectives),
        ]
        for p in (crossing.program, again)
    )
    flops, collectives, sent = (b - a for a, b in zip(before, after, strict=True))
    ops = Counter(name for o in gone if (name := remat_policies.kind(o)))
    return Recomputed(request, len(gone), ops, sum(o.nbytes for o in gone), flops, int(collectives), sent)
