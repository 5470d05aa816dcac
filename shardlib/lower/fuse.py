"""Peepholes on the finished program: two instructions that torch has as one."""

from __future__ import annotations

from collections import Counter

import torch

from shardlib.lower.program import Instr, Program, Var, reads
from shardlib.scalar import Scalar

aten = torch.ops.aten


def fuse(program: Program) -> Program:
    """`x + c * y` and `x - c * y` become one pass over memory (torch's `alpha`), as in every parameter update."""
    uses = Counter(v for step in program.steps for v in reads(step))
    uses.update(v for v in program.outputs if isinstance(v, Var))
    scaled: dict[Var, Instr] = {}
    dropped: set[Instr] = set()
    for step in program.steps:
        if not isinstance(step, Instr):
            continue
        if _scales(step):
            assert step.outs[0] is not None
            scaled[step.outs[0]] = step
        elif step.target in (aten.add.Tensor, aten.sub.Tensor) and len(step.args) == 2 and not step.kwargs:
            x, y = step.args
            mul = scaled.get(y) if isinstance(y, Var) else None
            if mul is not None and isinstance(x, Var) and uses[y] == 1 and x.dtype == y.dtype == mul.args[0].dtype:
                step.args, step.kwargs = (x, mul.args[0]), {"alpha": mul.args[1]}
                dropped.add(mul)
    program.steps = [s for s in program.steps if s not in dropped]
    return program


def _scales(step: Instr) -> bool:
    """Whether this multiplies a floating tensor by a Python number."""
    if step.target is not aten.mul.Tensor or len(step.args) != 2:
        return False
    x, c = step.args
    number = isinstance(c, int | float | Scalar) and not isinstance(c, bool)
    return number and isinstance(x, Var) and x.dtype.is_floating_point
