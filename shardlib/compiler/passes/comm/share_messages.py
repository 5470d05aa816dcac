"""Sends equal messages of local forms once: `log_softmax` and `logsumexp` of a value share its maximum."""

from __future__ import annotations

from dataclasses import replace

from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, reads, swapped
from shardlib.compiler.program.value_numbering import ValueNumbers


def share_messages(program: Program) -> Program:
    """Removes messages that repeat an earlier one, and the steps that only they need; results keep their own."""
    if sum(c.source.layout is None for c in program.collectives) < 2:
        return program
    alike, same, returned = ValueNumbers(), dict[Var, Var](), {*program.results}
    for step in program.steps:
        if isinstance(step, Compute):
            if any(v.layout is None for v in step.out_vars) and step.is_pure:
                alike.note(step.outs, step.target, step.args, dict(step.kwargs), step.backward)
        elif isinstance(step, Start):
            for c in (c for c in step.moves if c.source.layout is None):
                alike.note((c.out,), c.kind, c.axes, c.source, dict(c.params), c.reduce, c.backward)
                if (before := alike.first[c.out]) is not c.out and c.out not in returned:
                    same[c.out] = before
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
        if isinstance(step, Compute) and step.is_pure and used.isdisjoint(step.out_vars):
            continue
        used.update(reads(step))
        kept.append(step)
    return replace(program, steps=tuple(reversed(kept)))
