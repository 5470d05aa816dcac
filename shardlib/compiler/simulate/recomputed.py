"""Finds recomputation: calls of the backward pass that repeat one of the forward pass on the same values."""

from __future__ import annotations

from shardlib.compiler.program.steps import Compute, Program
from shardlib.compiler.program.value_numbering import firsts


def recomputed(program: Program) -> set[Compute]:
    """Returns the calls that run again, in a checkpoint or by `remat`.

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
    first = firsts(program)
    calls = (s for s in program.steps if isinstance(s, Compute) and s.backward and s.flops)
    return {s for s in calls if s.out_vars and all(first[v] is not v for v in s.out_vars)}
