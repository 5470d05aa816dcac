"""Which variables of a program hold the same value: the same op on the same values makes the same."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from shardlib.program.nested import rebuild
from shardlib.program.steps import Compute, Copy, Program, Start, Var


def firsts(program: Program) -> dict[Var, Var]:
    """For each variable that a step makes, the first one that is known to hold its value.

    What is not pure, as draws of keys are not, makes another one each time.
    """
    first: dict[Var, Var] = {}
    made: dict[Hashable, tuple[Var | None, ...]] = {}

    def key(*what: Any) -> Hashable:
        return frozen(rebuild(what, lambda x: first.get(x, x) if isinstance(x, Var) else x))

    def note(outs: tuple[Var | None, ...], *what: Any) -> None:
        before = made.setdefault(key(*what), outs)
        for out, same in zip(outs, before, strict=True):
            if out is not None:
                first[out] = out if same is None else first.get(same, same)

    for step in program.steps:
        if isinstance(step, Compute):
            note(step.outs, step.target, step.args, dict(step.kwargs), *([] if step.is_pure else [id(step)]))
        elif isinstance(step, Start):
            for c in step.moves:
                note((c.out,), c.kind, c.axes, c.source, dict(c.params), c.reduce)
        elif isinstance(step, Copy):
            first[step.out] = first.get(step.source, step.source)
    return first


def frozen(x: Any) -> Hashable:
    """Arguments as a key that tells apart what ops do."""
    if isinstance(x, dict):
        return tuple((k, frozen(v)) for k, v in x.items())
    if isinstance(x, tuple | list):
        return tuple(map(frozen, x))
    return (type(x), repr(x)) if isinstance(x, bool | float | complex) else x  # 1 is not True, and 0.0 is not -0.0
