"""Which variables of a program hold the same value: the same op on the same values makes the same."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from shardlib.compiler.program.nested_args import rebuild
from shardlib.compiler.program.steps import TIERS, Compute, Copy, Program, Start, Var


class Alike:
    """Tells what holds the same value, as one variable after the other is made.

    `first` has for each of them the first one that is known to hold its value: a key of what made it names these, so
    that it stays short however much went before.
    """

    def __init__(self) -> None:
        self.first: dict[Var, Var] = {}
        self._made: dict[Hashable, tuple[Var | None, ...]] = {}

    def note(self, outs: tuple[Var | None, ...], *what: Any) -> None:
        """Variables that `what` makes: the same ones each time."""
        key = frozen(rebuild(what, lambda x: self.first.get(x, x) if isinstance(x, Var) else x))
        before = self._made.setdefault(key, outs)
        for out, same in zip(outs, before, strict=True):
            if out is not None:
                self.first[out] = out if same is None else self.first.get(same, same)


def firsts(program: Program) -> dict[Var, Var]:
    """For each variable that a step makes, the first one that is known to hold its value.

    What is not pure, as draws of keys are not, makes another one each time.
    """
    alike = Alike()
    for step in program.steps:
        if isinstance(step, Compute):
            alike.note(step.outs, step.target, step.args, dict(step.kwargs), *([] if step.is_pure else [id(step)]))
        elif isinstance(step, Start):
            for c in step.moves:
                if c.kind in TIERS:
                    alike.first[c.out] = alike.first.get(c.source, c.source)
                    continue
                alike.note((c.out,), c.kind, c.axes, c.source, dict(c.params), c.reduce)
        elif isinstance(step, Copy):
            alike.first[step.out] = alike.first.get(step.source, step.source)
    return alike.first


def frozen(x: Any) -> Hashable:
    """Arguments as a key that tells apart what ops do."""
    if isinstance(x, dict):
        return tuple((k, frozen(v)) for k, v in x.items())
    if isinstance(x, tuple | list):
        return tuple(map(frozen, x))
    return (type(x), repr(x)) if isinstance(x, bool | float | complex) else x  # 1 is not True, and 0.0 is not -0.0
