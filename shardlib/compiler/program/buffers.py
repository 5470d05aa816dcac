"""Which values share memory, and how much of it is in use at once.

A view shows the memory of what it views, an in-place result that of the operand it writes over. An input's memory is
there all the time; other memory from the step that makes it, or the message that brings it, until a `Free` of the last
value that shows it. What an op allocates inside, and the buffers of collectives, are not counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardlib.compiler.program.steps import TIERS, Compute, Copy, Free, Program, Start, Step, Var, Wait, makes, reads
from shardlib.core.aten.op_traits import may_return_view


def owners(steps: Iterable[Step], *, exact: bool = False) -> dict[Var, Var]:
    """For every value of known memory, the value that first had that memory.

    A permutation may hand on what it is given, and a reshape copy what it shows, other than the plan says: only what is
    `exact` takes them at their word.
    """
    owner: dict[Var, Var] = {}
    for step in steps:
        if isinstance(step, Compute):
            if not (shown := step.shown) or (exact and step.copies):
                for out in step.made:
                    owner[out] = out
                continue
            for out in step.made:
                v = shown.get(out, out)
                owner[out] = owner.get(v, v)
        elif isinstance(step, Start):
            for c in step.moves:
                alone = c.kind == "ppermute" or all(a.size == 1 for a in c.axes)
                fresh = exact or c.kind in TIERS or not alone
                owner[c.out] = c.out if fresh else owner.get(c.source, c.source)
        elif isinstance(step, Copy):
            owner[step.out] = step.out
    return owner


_OWNERS: weakref.WeakKeyDictionary[Program, Mapping[Var, Var]] = weakref.WeakKeyDictionary()


def owners_in(program: Program) -> Mapping[Var, Var]:
    """The same of a program, once: passes ask for it, and those who check between them."""
    if (found := _OWNERS.get(program)) is None:
        found = _OWNERS[program] = owners(program.steps)
    return found


def last_reads(steps: Iterable[Step]) -> dict[Var, int]:
    """Where each variable is last read, or made if nobody reads it; what a message carries, until it is waited for."""
    last: dict[Var, int] = {}
    flying: dict[Var, tuple[Var, ...]] = {}
    for i, step in enumerate(steps):
        last |= dict.fromkeys((*reads(step), *makes(step)), i)
        if isinstance(step, Start):
            flying |= dict.fromkeys(step.outs, tuple(reads(step)))
        elif isinstance(step, Wait):
            last |= dict.fromkeys((v for out in step.outs for v in flying[out]), i)
    return last


def blurred(steps: Iterable[Step], owner: Mapping[Var, Var]) -> set[Var]:
    """Owners whose memory an op may, or may not, have kept or handed on to its results, and these."""
    return {
        owner.get(v, v)
        for step in steps
        if isinstance(step, Compute) and may_return_view(step.target)
        for v in (*reads(step), *makes(step))
    }


def handed_on(steps: Iterable[Step], owner: Mapping[Var, Var]) -> set[Var]:
    """Owners whose memory a permutation may show to other devices of the process as it is."""
    moves = (c for step in steps if isinstance(step, Start) for c in step.moves)
    return {owner.get(c.source, c.source) for c in moves if c.kind == "ppermute"}


def read_only(program: Program) -> set[Var]:
    """What is gathered and never written over, nor shown by a result: all devices may read the same memory."""
    owner = owners_in(program)
    over = (step.args[k] for step in program.steps if isinstance(step, Compute) for k in step.over if k is not None)
    seen = {owner.get(v, v) for v in (*program.results, *over)} | blurred(program.steps, owner)
    return {
        c.out
        for step in program.steps
        if isinstance(step, Start)
        for c in step.moves
        if c.kind == "all_gather" and owner.get(c.out) is c.out and c.out not in seen
    }


_ALIVE: weakref.WeakKeyDictionary[Program, Sequence[int]] = weakref.WeakKeyDictionary()


def alive(program: Program, *, host: bool = False) -> Sequence[int]:
    """Bytes in use on the fullest device, or in its host's memory, while each step runs."""
    if host:
        return [total for total, _ in _in_use(program, host=True)]
    if (levels := _ALIVE.get(program)) is None:
        levels = _ALIVE[program] = tuple(total for total, _ in _in_use(program))
    return levels


def _in_use(program: Program, *, host: bool = False) -> Iterator[tuple[int, Mapping[Var, int]]]:
    """The same, with how many values that are not freed show the memory of each owner."""
    owner = owners(program.steps, exact=True)
    names: Counter[Var] = Counter()
    seen = dict.fromkeys((*program.inputs, *(v for v, _ in program.captured)))  # in an order that is none of addresses'
    total = sum(v.nbytes for v in seen if v.host == host)
    names.update([*seen])
    for step in program.steps:
        made = step.outs if isinstance(step, Start) else makes(step)
        new = [v for v in made if v.host == host and v not in seen]
        seen.update(dict.fromkeys(new))
        for var in new:
            root = owner[var]
            total += 0 if names[root] else root.nbytes
            names[root] += 1
        yield total, names
        for var in step.vars if isinstance(step, Free) else ():
            if var.host != host:
                continue
            root = owner[var]
            names[root] -= 1
            total -= 0 if names[root] else root.nbytes


def peak_bytes(program: Program) -> int:
    """The most bytes that are in use at once, arguments and results included."""
    return max(alive(program), default=sum(v.nbytes for v in program.given if not v.host))


def largest(program: Program) -> list[Var]:
    """What is in use where most is, the largest memory first."""
    peak = peak_bytes(program)
    names = next((dict(names) for total, names in _in_use(program) if total == peak), dict.fromkeys(program.given, 1))
    return sorted((v for v, n in names.items() if n and not v.host), key=lambda v: -v.nbytes)


def host_bytes(program: Program) -> int:
    """The most bytes that are in use at once in the host's memory."""
    is_used = bool(program.copied) or any(v.host for v in program.inputs)
    return max(alive(program, host=True), default=0) if is_used else 0
