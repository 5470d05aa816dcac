"""Searches for the values to recompute or offload, so that a program fits into a memory budget and loses least time.

A few whole programs are built and simulated; their peaks and seconds decide. Each program has its bytes at every step,
and the spans in which values wait for the backward pass (`memory_levels`). From these, the effect of a change is
estimated without a program. A descent drops, at the fullest step, the value that frees most bytes per second, until the
estimate is within the budget. It builds that program and continues from its levels, for each distance that messages may
run ahead. Then values are exchanged, the most promising first. If no descent fits, single values and pairs are changed
in whole programs until one fits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, combinations, product, takewhile
from typing import NoReturn

from shardlib.compiler.passes.memory import remat_policies
from shardlib.compiler.passes.memory.budget_programs import DROPPED, KEPT, MOVED, WAYS, Candidates, Choice, Finish
from shardlib.compiler.passes.memory.memory_levels import NOWHERE, Levels, Span
from shardlib.compiler.passes.memory.saved_values import Crossing
from shardlib.compiler.program.buffers import largest, peak_bytes
from shardlib.compiler.program.steps import Compute, Program, Var
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Line, format_path_line
from shardlib.sharding.mesh.machine import Machine

PROGRAMS = 40  # that a search builds at most
LAST_RESORT = 240  # the same, with planning="best", or if no program fits
EXCHANGED = 24  # further programs, if the first that fits came late
_ROUNDS = 4  # of a descent
_CORRECTED = 2
_FAILURES = 6  # one program in so many may fail in a row
_CHANGES = 64  # most promising changes that are tried
_SHOWN = 5


def within(
    crossing: Crossing,
    budget: int,
    finish: Finish,
    machine: Machine,
    fixed: Collection[Var] = frozenset(),
    movable: Collection[Var] = (),
    trial: Finish | None = None,
    programs: int = PROGRAMS,
) -> Choice:
    """Returns the choice of values for a program whose peak is at most `budget` bytes.

    Values in `fixed` stay; those in `movable` may be offloaded. `trial` is a quick version of `finish`. The search
    builds about `programs` programs, and more only if none of them fits. Raises `ShardingError` with the least peak if
    none was found.
    """
    candidates = Candidates(crossing, budget, trial or finish, machine, fixed, movable)
    fits = candidates.trial(Choice(), WAYS[0]).peak <= budget
    if fits and peak_bytes(finish(crossing.program, math.inf, ())) <= budget:
        return Choice()
    alone = [(MOVED,)] if candidates.all_moved.moved else []
    _search(candidates, candidates.base, [*_ways(candidates), *alone], programs)
    for start in _layers(candidates):
        if candidates.best is None:
            _search(candidates, start, _ways(candidates)[-1:], programs)
    if candidates.best is None:
        _lower_the_peak(candidates)
    if candidates.best is None:
        _refuse(candidates)
    return _exchange(candidates, programs)


# Steps of the search --------------------------------------------------------------------------------------------------


def _search(candidates: Candidates, start: Choice, ways: Sequence[Collection[str]], programs: int) -> None:
    """Descends from a choice, for each distance of messages that may give the fastest program."""
    for ahead, some in product(WAYS, ways):
        for units in ((), candidates.groups) if some == (DROPPED,) else ((),):
            goes_on = candidates.best is None or len(candidates.programs) < programs
            if goes_on and candidates.is_worth(start, ahead):
                _descend(candidates, start, ahead, some, _ROUNDS, units)


def _descend(
    candidates: Candidates,
    choice: Choice,
    ahead: str,
    ways: Collection[str],
    rounds: int,
    units: Sequence[Sequence[Var]] = (),
) -> None:
    """Builds programs that drop more and more values, until one fits with messages `ahead` so far."""
    useless = set[tuple[Var, str]]()  # values that a program keeps although the choice offloads them
    for _ in range(rounds):
        levels = candidates.levels(choice, ahead)
        kept = {o for o in choice.moved if o not in levels.waits}
        choice, useless = choice.put(kept, KEPT), useless | {(o, MOVED) for o in kept}
        if levels.peak <= candidates.budget:
            break
        lower, _ = _give_up(candidates, choice, levels, ways, useless, units)
        if lower == choice:
            break
        choice = lower
    candidates.trial(choice, ahead)


def _give_up(
    candidates: Candidates,
    choice: Choice,
    levels: Levels,
    ways: Collection[str],
    but: Collection[tuple[Var, str]] = (),
    units: Sequence[Sequence[Var]] = (),
) -> tuple[Choice, Levels]:
    """Drops or offloads the values of the fullest step that free most bytes per second, until the estimate fits."""
    again = candidates.again(choice)

    def price(option: tuple[Var, str]) -> tuple[float, bool, int]:
        o, way = option
        is_moved = way == MOVED
        seconds = levels.copies.get(o, 0.0) if is_moved else candidates.repeat(o, choice, {*again})
        return seconds / max(o.nbytes, 1), is_moved, -o.nbytes

    while levels.peak > candidates.budget:
        step = levels.level.index(levels.peak)
        waiting = [o for o in candidates.ways if _is_inside(step, levels.gaps.get(o, NOWHERE))]
        held = [o for o in waiting if not _is_inside(step, _absence(levels, o, choice.way(o)))]
        options = [(o, way) for o in held for way in candidates.ways[o] if way in ways and (o, way) not in but]
        options = [option for option in options if _is_inside(step, _absence(levels, *option))]
        if not options:
            break
        o, way = min(options, key=price)
        unit = next((unit for unit in units if o in unit), [o])
        levels, choice = _changed(levels, unit, choice, way), choice.put(unit, way)
        for o in unit if way == DROPPED else ():
            candidates.repeat(o, choice, again)
    return choice, levels


def _reclaim_channels(
    candidates: Candidates, choice: Choice, levels: Levels, gains: Mapping[Var, float], but: Collection[Var] = ()
) -> Choice:
    """Keeps the values that fit into the estimated levels, those that save most seconds first."""
    for o, gain in gains.items():
        if gain >= 0 and o not in but and (way := choice.way(o)) != KEPT:
            begin, end = span = _absence(levels, o, way)
            if max(levels.level[begin:end], default=0) + o.nbytes <= candidates.budget:
                choice, levels = choice.put([o], KEPT), levels.with_span(span, o.nbytes)
    return choice


def _exchange(candidates: Candidates, programs: int) -> Choice:
    """Exchanges dropped values for others while that is faster; returns the best choice."""
    assert candidates.best is not None
    candidates.furthest_trial(candidates.best[0])  # messages may run further ahead
    seen = {choice for choice, _ in candidates.tried}
    is_late = len(candidates.programs) >= programs
    most = len(candidates.programs) + EXCHANGED if is_late else programs
    for ways in _ways(candidates):
        best, failures = candidates.best, 0
        others = _others(candidates, *best, ways)
        while others and len(candidates.programs) < most and failures < programs // _FAILURES:
            if (other := others.pop(0)) in seen:
                continue
            seen.add(other)
            before = len(candidates.programs)
            _descend(candidates, other, best[1], ways, _CORRECTED)
            failures += len(candidates.programs) > before
            if candidates.best != best:
                best, failures = candidates.best, 0
                others = _others(candidates, *best, ways)
    return candidates.best[0]


def _ways(candidates: Candidates) -> list[tuple[str, ...]]:
    """Returns the ways to treat values: recompute, and recompute or offload if some may be offloaded."""
    return [(DROPPED,), (DROPPED, MOVED)] if candidates.all_moved.moved else [(DROPPED,)]


def _others(candidates: Candidates, choice: Choice, ahead: str, ways: Collection[str]) -> list[Choice]:
    """Returns choices that are estimated to fit, the fastest first."""
    levels = candidates.levels(choice, ahead)

    def seconds(choice: Choice) -> float:
        return candidates.estimate(choice, levels.copies)

    given_up = [o for o in candidates.ways if choice.way(o) != KEPT]
    saved = {o: seconds(choice) - seconds(choice.put([o], KEPT)) for o in given_up}
    gains = dict(sorted(saved.items(), key=lambda item: -item[1]))
    others = [_reclaim_channels(candidates, choice, levels, gains)]
    for values, way in _promising(candidates, choice, ways, gains, levels):
        changed = [o for o in values if choice.way(o) != way]
        if KEPT not in (way, *map(choice.way, changed)):
            others.append(choice.put(changed, way))  # holds about as many bytes
        but = {(o, w) for o in changed for w in candidates.ways[o]}
        after = _changed(levels, changed, choice, way)
        other, after = _give_up(candidates, choice.put(changed, way), after, ways, but)
        if after.peak <= candidates.budget:
            others += [_reclaim_channels(candidates, other, after, gains, changed), other]
    return sorted(dict.fromkeys(others), key=lambda other: (seconds(other), *other.nbytes))


def _promising(
    candidates: Candidates, choice: Choice, ways: Collection[str], gains: Mapping[Var, float], levels: Levels
) -> list[tuple[Sequence[Var], str]]:
    """Returns the most promising changes of single values, and of values that equal layers share, by estimated gain."""
    worth = max((gain / o.nbytes for o, gain in gains.items() if o.nbytes), default=0.0)
    again, prices = candidates.again(choice), list[tuple[float, Sequence[Var], str]]()
    for values in [*candidates.groups, *([o] for o in candidates.ways)]:
        for way in (KEPT, *(way for way in candidates.ways[values[0]] if way in ways)):
            if not (changed := [o for o in values if choice.way(o) != way]):
                continue
            price, steps = 0.0, {*again}
            for o in changed:
                price += worth * o.nbytes * ((way == KEPT) - (choice.way(o) == KEPT)) - gains.get(o, 0.0)
                price += levels.copies.get(o, 0.0) if way == MOVED else 0.0
                price += candidates.repeat(o, choice, steps) if way == DROPPED else 0.0
            prices.append((price, values, way))
    return [(values, way) for _, values, way in sorted(prices, key=lambda price: price[0])[:_CHANGES]]


def _layers(candidates: Candidates) -> list[Choice]:
    """Returns choices that recompute all inside layers, recompute all, and offload the values between layers."""
    full, ways = remat_policies.full(candidates.crossing), candidates.ways
    layers = candidates.base.put([o for o in ways if o in full and DROPPED in ways[o]], DROPPED)
    every = candidates.base.put([o for o in ways if DROPPED in ways[o]], DROPPED)
    return [layers, every, layers.put([o for o in ways if o not in full and MOVED in ways[o]], MOVED)]


def _lower_the_peak(candidates: Candidates) -> None:
    """Changes values while that lowers the bytes above the budget, summed over the steps."""
    starts = [choice for choice, ahead in candidates.tried if ahead == WAYS[-1]]
    best: Choice | None = min(starts, key=candidates.excess)
    while best is not None and (excess := candidates.excess(best)):
        others = takewhile(lambda _: len(candidates.programs) < LAST_RESORT, _neighbors(candidates, best))
        best = next((other for other in others if candidates.excess(other) < excess), None)


def _neighbors(candidates: Candidates, choice: Choice) -> Iterator[Choice]:
    """Yields choices that differ in the values of equal layers, in single values, or in pairs.

    Values in use at the fullest step come first.
    """
    ones, used = [[o] for o in candidates.ways], candidates.in_use(choice, WAYS[-1])
    first = [[o] for o in used if o in candidates.ways]
    shared = [group for group in candidates.groups if not used.keys().isdisjoint(group)]
    pairs = combinations(first, 2), combinations(ones, 2)
    for groups in chain(zip(shared), zip(first), pairs[0], zip(candidates.groups), zip(ones), pairs[1]):
        for ways in product(*((KEPT, *candidates.ways[group[0]]) for group in groups)):
            other = choice
            for group, way in zip(groups, ways, strict=True):
                other = other.put(group, way)
            yield other


# Levels of a choice ---------------------------------------------------------------------------------------------------


def _absence(levels: Levels, value: Var, way: str) -> Span:
    """Returns the steps at which a waiting value takes no memory, if it is treated in this way."""
    return NOWHERE if way == KEPT else (levels.gaps if way == DROPPED else levels.away).get(value, NOWHERE)


def _changed(levels: Levels, values: Sequence[Var], choice: Choice, way: str) -> Levels:
    """Returns the estimated levels of a choice in which these values are treated in another way."""
    for o in values:
        levels = levels.with_span(_absence(levels, o, choice.way(o)), o.nbytes)
        levels = levels.with_span(_absence(levels, o, way), -o.nbytes)
    return levels


def _is_inside(step: int, span: Span) -> bool:
    return span[0] <= step < span[1]


# Refusal --------------------------------------------------------------------------------------------------------------


def _refuse(candidates: Candidates) -> NoReturn:
    least = min(candidates.tried, key=lambda key: candidates.tried[key].peak)
    (program, _), peak = candidates.program(*least), candidates.tried[least].peak
    lines = {v: step.line for step in program.steps if isinstance(step, Compute) for v in step.out_vars}
    lines |= {c.out: c.line for c in program.collectives}
    held = [f"{v.nbytes:,} bytes: {v.name}, {_whence(program, v, lines)}" for v in largest(program)[:_SHOWN]]
    raise ShardingError(
        f"the program does not fit into memory={candidates.budget:,} bytes: the least peak that was found is {peak:,}",
        held,
        rule="the peak is that of the program that runs, arguments, results and messages included; at its step the "
        "largest values are these",
        remedy=f'memory="{peak} B", more devices, or smaller pieces of what is listed',
    )


def _whence(program: Program, v: Var, lines: Mapping[Var, Line | None]) -> str:
    if v in program.entry_values:
        return "an input"
    return f"made at {format_path_line(lines.get(v))}"
