"""Finds values that share memory, and counts the bytes in use at once.

A view shares its operand's memory, an in-place result the memory that it writes over. An input's memory is in
use all the time. Other memory is in use from the step that allocates it, or the message that brings it, until a `Free`
of the last value in it. Temporaries inside an op, and the buffers of collectives, are not counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardlib.compiler.program.steps import TIERS, Compute, Copy, Free, Program, Start, Step, Var, Wait, makes, reads
from shardlib.core.aten.op_traits import may_return_view


def owners(steps: Iterable[Step], *, exact: bool = False) -> dict[Var, Var]:
    """Maps every value to the value that first had its memory.

    At run time a permutation may pass its operand on, and a reshape may copy, though the program says otherwise. Only
    `exact` takes the program at its word.
    """
    owner: dict[Var, Var] = {}
    for step in steps:
        if isinstance(step, Compute):
            if not (shown := step.shown) or (exact and step.copies):
                for out in step.out_vars:
                    owner[out] = out
                continue
            for out in step.out_vars:
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
    """Returns the `owners` in a program, computed once."""
    if (owner := _OWNERS.get(program)) is None:
        owner = _OWNERS[program] = owners(program.steps)
    return owner


def last_reads(steps: Iterable[Step]) -> dict[Var, int]:
    """Maps each variable to the step that last needs it: its last reader, its maker, or the wait for its message."""
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
    """Returns owners of memory that an op might share with its results: operands and results of such ops."""
    return {
        owner.get(v, v)
        for step in steps
        if isinstance(step, Compute) and may_return_view(step.target)
        for v in (*reads(step), *makes(step))
    }


def handed_on(steps: Iterable[Step], owner: Mapping[Var, Var]) -> set[Var]:
    """Returns owners of memory that a permutation may pass to other devices of the process without a copy."""
    moves = (c for step in steps if isinstance(step, Start) for c in step.moves)
    return {owner.get(c.source, c.source) for c in moves if c.kind == "ppermute"}


def read_only(program: Program) -> set[Var]:
    """Returns gathered values that are neither written over nor returned: all devices may read the same memory."""
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
    """Returns the bytes in use on the fullest device, or in its host's memory, while each step runs."""
    if host:
        return [total for total, _ in _in_use(program, host=True)]
    if (levels := _ALIVE.get(program)) is None:
        levels = _ALIVE[program] = tuple(total for total, _ in _in_use(program))
    return levels


def _in_use(program: Program, *, host: bool = False) -> Iterator[tuple[int, Mapping[Var, None]]]:
    """Yields for each step the bytes in use, and the owners of that memory."""
    owners_alive: dict[Var, None] = {}  # ordered
    total = 0
    for i, (begun, ended) in enumerate(_changes(program, host=host)):
        owners_alive |= dict.fromkeys(begun)
        total += sum(v.nbytes for v in begun)
        if i:
            yield total, owners_alive
        total -= sum(v.nbytes for v in ended)
        for v in ended:
            del owners_alive[v]


def _changes(program: Program, *, host: bool = False) -> Iterator[tuple[list[Var], list[Var]]]:
    """Yields the owners of memory whose use begins with a step, and those whose use ends behind it.

    The first pair has the entry values; a pair for each step follows.
    """
    owner = owners(program.steps, exact=True)
    seen = dict.fromkeys((*program.inputs, *(v for v, _ in program.captured)))  # ordered
    names = Counter(seen.keys())  # how many live values share the memory of each owner
    yield [v for v in seen if v.host == host], []
    for step in program.steps:
        begun, ended = [], []
        for var in step.outs if isinstance(step, Start) else makes(step):
            if var.host == host and var not in seen:
                seen[var] = None
                root = owner[var]
                begun += [] if names[root] else [root]
                names[root] += 1
        for var in step.vars if isinstance(step, Free) else ():
            if var.host == host:
                root = owner[var]
                names[root] -= 1
                ended += [] if names[root] else [root]
        yield begun, ended


def peak_by_group(program: Program, group: Callable[[Var], str]) -> dict[str, tuple[int, int]]:
    """Returns for each group of owners its bytes at the step with the most bytes in use, and its most at any step."""
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    at_peak, peak = Counter(now), -1
    for begun, ended in _changes(program):
        for v in begun:
            now[group(v)] += v.nbytes
        most |= now
        if now.total() > peak:
            at_peak, peak = Counter(now), now.total()
        for v in ended:
            now[group(v)] -= v.nbytes
    return {name: (at_peak[name], n) for name, n in most.items()}


class Lifetime(NamedTuple):
    """The memory of one value is in use from step `start` through step `end`; `last` is the last step that reads it."""

    var: Var
    start: int
    end: int
    last: int


def lifetimes(program: Program) -> list[Lifetime]:
    """Returns the memory in use on the device, in the order of allocation; at each step the bytes sum to `alive`."""
    owner = owners(program.steps, exact=True)
    names: Counter[Var] = Counter(v for v in program.entry_values if not v.host)
    started: dict[Var, int] = dict.fromkeys((v for v in _entries(program) if not v.host), 0)
    seen = {*program.entry_values}
    last: dict[Var, int] = {}
    spans: list[Lifetime] = []
    for i, step in enumerate(program.steps):
        last |= dict.fromkeys((owner.get(v, v) for v in reads(step)), i)
        new = [v for v in (step.outs if isinstance(step, Start) else makes(step)) if not v.host and v not in seen]
        seen.update(new)
        for var in new:
            started.setdefault(owner[var], i)
            names[owner[var]] += 1
        for var in step.vars if isinstance(step, Free) else ():
            root = owner.get(var, var)
            names[root] -= not var.host
            if not var.host and not names[root]:
                spans.append(Lifetime(root, started.pop(root), i, last.get(root, i)))
    end = max(len(program.steps) - 1, 0)
    spans += [Lifetime(root, start, end, last.get(root, start)) for root, start in started.items()]
    return sorted(spans, key=lambda span: span.start)


def _entries(program: Program) -> tuple[Var, ...]:
    return (*program.inputs, *(v for v, _ in program.captured))


def peak_bytes(program: Program) -> int:
    """Returns the most bytes in use at once, arguments and results included."""
    return max(alive(program), default=sum(v.nbytes for v in program.entry_values if not v.host))


def largest(program: Program) -> list[Var]:
    """Returns the values in use at the peak, the largest first."""
    peak = peak_bytes(program)
    names = next(
        (dict(names) for total, names in _in_use(program) if total == peak), dict.fromkeys(program.entry_values)
    )
    return sorted((v for v in names if not v.host), key=lambda v: -v.nbytes)


def host_bytes(program: Program) -> int:
    """Returns the most bytes in use at once in the host's memory."""
    is_used = bool(program.copied) or any(v.host for v in program.inputs)
    return max(alive(program, host=True), default=0) if is_used else 0
