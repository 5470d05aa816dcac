"""What a program does a second time: calls of the backward pass on the same values as one of the forward pass."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from shardlib.program.steps import Compute, Copy, Program, Start, Var, makes, rebuild


def recomputed(program: Program) -> set[Compute]:
    """The calls that a checkpoint runs again, found by numbering values: the same op on the same numbers is the same.

    Example:
        >>> import torch, shardlib as sl
        >>> from torch.utils.checkpoint import checkpoint
        >>> def gradient(x, w):
        ...     loss = checkpoint(lambda x: torch.tanh(x @ w).exp(), x, use_reentrant=False).sum()
        ...     return loss, torch.autograd.grad(loss, w)
        >>> with sl.Mesh(data=2):
        ...     step = sl.jit(gradient, in_specs=("b@data _", None))
        ...     plan = step.plan(torch.ones(4, 4), torch.ones(4, 4, requires_grad=True))
        >>> sorted(s.target.__name__ for s in recomputed(plan.compiled.program))
        ['exp.default', 'mm.default', 'tanh.default']
    """
    number: dict[Var, Hashable] = {}  # the first variable that holds the value
    first: dict[Hashable, tuple[Var | None, ...]] = {}
    again: set[Compute] = set()

    def key(*what: Any) -> Hashable:
        return _frozen(rebuild(what, lambda x: number.get(x, x) if isinstance(x, Var) else x))

    for step in program.steps:
        if isinstance(step, Compute):
            mine = key(step.target, step.args, dict(step.kwargs))
            outs = first.setdefault(mine, step.outs)
            if outs is not step.outs:
                number |= {v: number.get(w, w) for v, w in zip(step.outs, outs, strict=True) if v is not None and w}
                if step.backward and step.flops:
                    again.add(step)
        elif isinstance(step, Start):
            for c in step.moves:
                (out,) = first.setdefault(key(c.kind, c.axes, c.source, dict(c.params), c.reduce), (c.out,))
                number[c.out] = number.get(out, out) if out is not None else c.out
        elif isinstance(step, Copy):
            number |= {v: number.get(step.source, step.source) for v in makes(step)}
    return again


def _frozen(x: Any) -> Hashable:
    if isinstance(x, dict):
        return tuple((k, _frozen(v)) for k, v in x.items())
    return tuple(map(_frozen, x)) if isinstance(x, tuple | list) else x
