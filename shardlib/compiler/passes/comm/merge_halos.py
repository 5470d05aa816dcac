"""Merges the messages that carry borders of one value to the same neighbors.

Overlapping and adjacent ranges are sent once, and different devices' ranges share a message. So a circular pad costs no
message of its own. Borders of a pointwise result, or of repeated elements, are computed from the borders of its
operands if these are sent anyway (`derive_halos`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shardlib.compiler.passes.comm.derive_halos import DerivedBorder, derive, elements, joined, repeats
from shardlib.compiler.passes.comm.halo import MOVES, Border, Trace
from shardlib.compiler.program.steps import (
    Collective,
    Compute,
    Program,
    Start,
    Step,
    Var,
    Wait,
    reads,
    swapped,
    together,
)
from shardlib.compiler.program.sym_int import Sym
from shardlib.core.aten.op_names import NARROW, REPEAT, VIEW
from shardlib.sharding.mesh.axis import group_size


def share_borders(program: Program) -> Program:
    """Merges the messages of each value between the same neighbors."""
    moves = [c for c in program.collectives if c.kind == "ppermute"]
    if not moves:
        return program
    readers: dict[Var, list[Step]] = {}
    for step in program.steps:
        for v in reads(step):
            readers.setdefault(v, []).append(step)
    traces = {axes: Trace(program, frozenset(a.name for a in axes)) for axes in dict.fromkeys(c.axes for c in moves)}
    borders = [
        border
        for border in filter(None, (traces[c.axes].border(c) for c in moves))
        if border.is_read_where_it_arrives(readers.get(border.moves[0].out, ()), program)
    ]
    steps = {v: step for step in program.steps if isinstance(step, Compute) for v in step.out_vars}
    derived = {each.move: each for each in derive(borders, steps)}
    groups = joined(border for each in derived.values() for border in each.borders())
    shared = [g for g in groups if len(g.moves) > 1 or derived[g.moves[0]].border is None]
    return _rewrite(program, shared, derived) if shared else program


# --- rewriting --------------------------------------------------------------------------------------------------------


def _rewrite(program: Program, shared: Sequence[Border], derived: Mapping[Collective, DerivedBorder]) -> Program:
    gone = {c.out: c for g in shared for c in g.moves}
    place = {c: i for i, c in enumerate(program.collectives)}
    first = defaultdict[Collective, list[Border]](list)
    for g in shared:
        first[min(g.moves, key=place.__getitem__)].append(g)
    names = {v.name for s in program.steps if isinstance(s, Compute | Start) for v in s.outs if v is not None}
    other, parts, steps = dict[Var, Var](), dict[tuple[Collective, Var], Var](), list[Step]()
    for step in program.steps:
        if isinstance(step, Start) and (move := gone.get(step.first.out)) is not None:
            for border in first[move]:
                steps += _message(border, names, other, parts)
            other[move.out] = _emit_border(derived[move], names, parts, steps)
        elif not (isinstance(step, Wait) and step.outs[0] in gone):
            steps.append(swapped(step, other))
    return replace(program, steps=tuple(_needed(steps, program)))


def _new(like: Var, name: str, names: set[str]) -> Var:
    free = next(x for k in range(len(names) + 1) if (x := f"{name}.{k}" if k else name) not in names)
    names.add(free)
    return Var(free, None, like.dtype)


def _emit_border(
    derived: DerivedBorder, names: set[str], parts: Mapping[tuple[Collective, Var], Var], steps: list[Step]
) -> Var:
    """Returns the variable of a border, received or computed; emits the computation."""
    move, step = derived.move, derived.step
    if step is None:
        return parts[move, derived.value]
    operands = {each.value: _emit_border(each, names, parts, steps) for each in derived.operands}
    if derived.repeated_range is not None:
        (x,) = operands.values()
        return _emit_repeated(derived, derived.repeated_range, x, names, steps)
    args = [operands[x] if isinstance(x, Var) else x for x in step.args]
    out = _new(move.out, f"{move.out.name}.computed", names)
    note, flops = "made of borders", float(max(map(elements, derived.borders())))
    steps.append(Compute(step.target, tuple(args), {}, (out,), move.line, move.backward, note, flops))
    return out


def _emit_repeated(derived: DerivedBorder, target_range: Border, x: Var, names: set[str], steps: list[Step]) -> Var:
    """Emits a border of repeated elements from the border of the elements."""
    assert derived.step is not None
    move, times = derived.move, repeats(derived.step)
    (at, shape, sends, ranges), n = target_range.parts[0], times[target_range.dim]
    begin = _numbers(move, {dst: ranges[src][0] % n for src, dst in sends.items()})
    count = _numbers(move, {dst: ranges[src][1] - ranges[src][0] for src, dst in sends.items()})
    calls: list[tuple[Any, ...]] = [(REPEAT, m, dim) for dim, m in enumerate(times) if m > 1]
    calls.append((NARROW, target_range.dim, begin, count))
    calls.append((VIEW, [count if d == at else size for d, size in enumerate(shape)]))
    for target, *args in calls:
        out = _new(move.out, f"{move.out.name}.computed", names)
        steps.append(Compute(target, (x, *args), {}, (out,), move.line, move.backward, "made of borders"))
        x = out
    return x


def _numbers(move: Collective, each: Mapping[int, int]) -> Sym | int:
    """Returns a number that differs by position in the group of a message; 0 for members without one."""
    numbers = tuple(each.get(i, 0) for i in range(group_size(move.axes)))
    return numbers[0] if len({*numbers}) == 1 else Sym("at", (move.axes, numbers))


def _message(
    border: Border, names: set[str], other: Mapping[Var, Var], parts: dict[tuple[Collective, Var], Var]
) -> Iterator[Step]:
    """Emits one message in place of several; records in `parts` the range of each."""
    move, members = border.moves[0], range(group_size(border.moves[0].axes))
    line, backward = move.line, move.backward
    number = partial(_numbers, move)

    def call(target: Any, *args: Any, out: Var) -> Step:
        return Compute(
            target,
            args,
            {},
            (out,),
            line,
            backward,
            f"shared by {len(border.moves)} messages" if len(border.moves) > 1 else "",
        )

    low = {i: a for i, (a, _) in border.ranges.items()}
    size = {i: b - a for i, (a, b) in border.ranges.items()}
    source, out = (_new(move.out, f"{x.name}.shared", names) for x in (move.source, move.out))
    yield call(NARROW, other.get(border.root, border.root), border.dim, number(low), number(size), out=source)
    shapes = [[size.get(i, 0) if d == border.dim else n for d, n in enumerate(border.shape)] for i in members]
    params = {"pairs": sorted(border.sends.items())} | ({"shapes": shapes} if len({*map(str, shapes)}) > 1 else {})
    nbytes = max(math.prod(shape) for shape in shapes) * move.out.dtype.itemsize
    yield from together(replace(move, source=source, out=out, params=params, bytes=nbytes))
    for c, (at, shape, sends, ranges) in zip(border.moves, border.parts, strict=True):
        begin = number({dst: ranges[src][0] - low[src] for src, dst in sends.items()})
        count = number({dst: ranges[src][1] - ranges[src][0] for src, dst in sends.items()})
        part, view = (_new(move.out, f"{c.out.name}.{word}", names) for word in ("part", "own"))
        yield call(NARROW, out, border.dim, begin, count, out=part)
        yield call(VIEW, part, [count if d == at else n for d, n in enumerate(shape)], out=view)
        parts[c, border.root] = view


def _needed(steps: Sequence[Step], program: Program) -> Iterator[Step]:
    """Yields the steps without those that only prepared removed messages."""
    used, kept = {*program.results}, list[Step]()
    for step in reversed(steps):
        if isinstance(step, Compute) and step.target in MOVES and used.isdisjoint(step.out_vars):
            continue
        used.update(reads(step))
        kept.append(step)
    return reversed(kept)
