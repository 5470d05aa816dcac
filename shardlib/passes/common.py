"""What two ops send of the same operands while they run is sent once: the largest of a row to `log_softmax`, say,
and to `logsumexp`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from shardlib.program.nested import rebuild
from shardlib.program.numbers import frozen
from shardlib.program.steps import Collective, Compute, Program, Start, Step, Var, Wait, reads, swapped


def share_messages(program: Program) -> Program:
    """The program without messages, and what was only done for them, that bring what an earlier one brought."""
    inside = [c for c in program.collectives if c.source.layout is None]
    if len(inside) < 2:
        return program
    made = {v: step for step in program.steps if isinstance(step, Compute) for v in step.outs if v is not None}
    same: dict[Var, Var] = {}
    known: dict[Var, Hashable] = {}
    first: dict[Hashable, Collective] = {}

    def number(v: Var) -> Hashable:
        """What a value is, by how an op came from its operands to it."""
        v = same.get(v, v)
        if v.layout is not None or (step := made.get(v)) is None or not step.is_pure:
            return v
        if v not in known:
            args = rebuild((step.args, dict(step.kwargs)), lambda x: number(x) if isinstance(x, Var) else x)
            known[v] = frozen((step.target, step.outs.index(v), step.backward, args))
        return known[v]

    for c in inside:
        key = number(c.source), frozen((c.kind, c.axes, dict(c.params), c.reduce, c.backward))
        before = first.setdefault(key, c)
        if before is not c:
            same[c.out] = before.out
    return _without(program, same) if same else program


def _without(program: Program, same: dict[Var, Var]) -> Program:
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Start) and step.first.out in same:
            continue
        if not (isinstance(step, Wait) and step.outs[0] in same):
            steps.append(swapped(step, same))
    used, kept = {*program.results}, list[Step]()
    for step in reversed(steps):
        if isinstance(step, Compute) and step.is_pure and used.isdisjoint(step.made):
            continue
        used.update(reads(step))
        kept.append(step)
    return replace(program, steps=tuple(reversed(kept)))
