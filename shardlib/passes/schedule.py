"""Work for the time in which a message is in flight: matmuls that stand a little later go in front of the wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardlib.program.steps import Compute, Program, Start, Step, Wait, makes, reads

HOIST = 32  # steps behind a wait among which work is looked for


def schedule(program: Program) -> Program:
    """The program with such work brought forward."""
    there, done = set(program.given), set[int]()
    steps: list[Step] = []

    def write(i: int, step: Step) -> None:
        steps.append(step)
        there.update(makes(step))
        done.add(i)

    for i, step in enumerate(program.steps):
        if isinstance(step, Wait):
            for j, other in _work(program.steps, i + 1):
                if j not in done and there.issuperset(reads(other)):
                    write(j, other)
        if i not in done:
            write(i, step)
    return replace(program, steps=tuple(steps))


def _work(steps: tuple[Step, ...], first: int) -> Iterator[tuple[int, Compute]]:
    """The arithmetic among the next steps."""
    left = HOIST
    for j in range(first, len(steps)):
        step = steps[j]
        if isinstance(step, Start | Wait):
            continue
        if isinstance(step, Compute) and step.flops:
            yield j, step
        left -= 1
        if not left:
            return
