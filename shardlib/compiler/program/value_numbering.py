"""Value numbering: finds variables that hold the same value, because the same op computed them of the same values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from shardlib.compiler.program.nested_args import rebuild
from shardlib.compiler.program.steps import TIERS, Compute, Copy, Program, Start, Var


class ValueNumbers:
    """Takes one step after the other, and maps each variable to the `first` that holds its value.

    The key of a step names the first variables of its operands, so it does not grow with the steps before.
    """

    def __init__(self) -> None:
        self.first: dict[Var, Var] = {}
        self._results: dict[Hashable, tuple[Var | None, ...]] = {}

    def note(self, outs: tuple[Var | None, ...], *parts: Any) -> None:
        """Notes the results of a step that is described by `parts`: equal parts give equal values."""
        key = frozen(rebuild(parts, lambda x: self.first.get(x, x) if isinstance(x, Var) else x))
        before = self._results.setdefault(key, outs)
        for out, same in zip(outs, before, strict=True):
            if out is not None:
                self.first[out] = out if same is None else self.first.get(same, same)


def firsts(program: Program) -> dict[Var, Var]:
    """Maps each variable that a step makes to the first one that holds its value; impure steps make new values."""
    alike = ValueNumbers()
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
    """Returns arguments as a key, equal only if ops treat them alike."""
    if isinstance(x, dict):
        return tuple((k, frozen(v)) for k, v in x.items())
    if isinstance(x, tuple | list):
        return tuple(map(frozen, x))
    return (type(x), repr(x)) if isinstance(x, bool | float | complex) else x  # 1 is not True, and 0.0 is not -0.0
