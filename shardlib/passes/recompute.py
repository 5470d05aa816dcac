"""What is made again for the backward pass: by name, or as a budget of memory asks for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardlib.keeping import Keeping
from shardlib.machine import Machine
from shardlib.passes import policies
from shardlib.passes.budget import Finish, within
from shardlib.passes.crossing import Crossing
from shardlib.passes.remat import remade
from shardlib.program.steps import Compute, Program, Start, Var


@dataclass(frozen=True)
class Recomputed:
    """So many `values`, of `nbytes` on the fullest device, are not held from the forward pass to the backward one.

    Making them again takes `flops` and `collectives`, which send `sent` bytes; `said` is what asked for it, `ops` says
    how many of them each op makes.
    """

    said: str
    values: int
    ops: Mapping[str, int]
    nbytes: int
    flops: float
    collectives: int
    sent: float


def recompute(program: Program, keeping: Keeping, finish: Finish) -> tuple[Program, Recomputed | None]:
    """The program that makes again what `keeping` says, and what that takes; `finish` are the passes behind this one.

    Raises `ShardingError` for names of nothing, and for a budget that cannot be kept.
    """
    if keeping.remat == "none" and keeping.memory is None:
        return program, None
    crossing = Crossing.of(program)
    if keeping.memory is not None:
        said, fixed = f"memory={keeping.memory:,} B", crossing.weights if keeping.regather == "never" else frozenset()
        dropped = within(crossing, keeping.memory, finish, Machine.of(program.mesh.machine), fixed)
    else:
        said, dropped = f"remat={keeping.remat!r}", frozenset(_by_name(crossing, keeping))
    again = remade(crossing, dropped)
    return again, _told(said, crossing, dropped, again)


def _by_name(crossing: Crossing, keeping: Keeping) -> set[Var]:
    if keeping.remat == "full":
        dropped = policies.full(crossing)
    elif keeping.remat == "attention":
        dropped = policies.attention(crossing)
    else:
        names = [keeping.remat] if isinstance(keeping.remat, str) else keeping.remat
        dropped = policies.named(crossing, names)
    if keeping.regather == "never":
        return dropped - crossing.weights
    return dropped | (crossing.weights - {*crossing.held}) if dropped else dropped


def _told(said: str, crossing: Crossing, dropped: Collection[Var], again: Program) -> Recomputed:
    gone = [o for o in crossing.held if o in dropped]
    before, after = (
        [
            sum(s.flops for s in p.steps if isinstance(s, Compute)),
            sum(isinstance(s, Start) for s in p.steps),
            sum(c.bytes for c in p.collectives),
        ]
        for p in (crossing.program, again)
    )
    flops, collectives, sent = (b - a for a, b in zip(before, after, strict=True))
    ops = Counter(name for o in gone if (name := policies.kind(o)))
    return Recomputed(said, len(gone), ops, sum(o.nbytes for o in gone), flops, int(collectives), sent)
