"""What is made again for the backward pass: by name, or as a budget of memory asks for it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
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
    """Making values again takes more memory than keeping them."""


@dataclass(frozen=True)
class Recomputed:
    """So many `values`, of `nbytes` on the fullest device, are not held from the forward pass to the backward one.

    Making them again takes `flops` and `collectives`, which send `sent` bytes; `said` is what asked for it, `ops` says
    how many of them each op makes. `kept_peak` is the peak of the program that keeps them (None: nobody asked). So
    many values, `moved`, wait in the host's memory because a budget asks for it.
    """

    said: str
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
    absent: Callable[[str], bool],
    *,
    moves: bool,
) -> tuple[Program, frozenset[Var], Recomputed | None]:
    """The program that makes again what `options` says, the values that are to wait in the host's memory, and what that
    takes; `finish` are the passes behind this one, `trial` those with which a budget is tried. A budget `moves` values
    unless the schedule names some.

    Raises `ShardingError` for names of nothing, but for those that are `absent`, and for a budget that cannot be kept.
    """
    if options.remat == "none" and options.memory is None:
        return program, frozenset(), None
    crossing, moved = Crossing.of(program), frozenset[Var]()
    if options.memory is not None:
        said, fixed = f"memory={options.memory:,} B", crossing.weights if options.regather == "never" else frozenset()
        may_move = movable(program) if moves and options.schedule.saved is None else ()
        machine = Machine.convert(program.mesh.machine)
        programs = LAST_RESORT if options.planning == "best" else PROGRAMS
        dropped, moved = within(crossing, options.memory, finish, machine, fixed, may_move, trial, programs)
    else:
        said, dropped = f"remat={options.remat!r}", frozenset(_by_name(crossing, options, absent))
    again = remade(crossing, dropped)
    told = _told(said, crossing, dropped, again)
    if options.memory is None and dropped:
        told = replace(told, kept_peak=peak_bytes(finish(program, None, ())))
    return again, moved, replace(told, moved=len(moved))


def warn_of_a_higher_peak(name: str, told: Recomputed, peak: int) -> None:
    """Warn where what is made again by name is in the way: what it is made of is held instead, or all at once."""
    if told.kept_peak is not None and peak > told.kept_peak:
        others = "" if "full" in told.said else 'remat="full", '
        warnings.warn(
            f"{name} with {told.said} holds at most {peak:,} bytes, and without it {told.kept_peak:,}: what the values "
            "are made of is held instead of them, and all that one step back needs is made at once\n"
            f'Remedy: {others}names of whole modules, or memory="...", which never takes more than it saves',
            RematWarning,
            stacklevel=2,
        )


def _by_name(crossing: Crossing, options: MemoryOptions, absent: Callable[[str], bool]) -> set[Var]:
    """What any of the words and names gives up."""
    said = [options.remat] if isinstance(options.remat, str) else options.remat
    dropped = set[Var]()
    for word, policy in (("full", remat_policies.full), ("attention", remat_policies.attention)):
        dropped |= policy(crossing) if word in said else set()
    names = [name for name in said if name not in WORDS]
    if names and any(crossing.back):
        dropped |= remat_policies.named(crossing, names, absent)
    if options.regather == "never":
        return dropped - crossing.weights
    return dropped | (crossing.weights - {*crossing.held}) if dropped else dropped


def _told(said: str, crossing: Crossing, dropped: Collection[Var], again: Program) -> Recomputed:
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
    return Recomputed(said, len(gone), ops, sum(o.nbytes for o in gone), flops, int(collectives), sent)
