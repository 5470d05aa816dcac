"""Fuses `x + c * y` and `x - c * y` into one call (torch's `alpha`), as in every parameter update."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shardlib.compiler.program.steps import Compute, Program, Step, Var, reads
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.call_scalar import Scalar


def fuse(program: Program) -> Program:
    """Fuses products by a number into the sums that read them."""
    uses = Counter(v for step in program.steps for v in reads(step))
    uses.update(program.results)
    scaled: dict[Var, Compute] = {}
    steps: list[Step] = []
    dropped: set[Step] = set()
    for step in program.steps:
        if isinstance(step, Compute) and _scales(step):
            assert step.outs[0] is not None
            scaled[step.outs[0]] = step
        elif isinstance(step, Compute) and (mul := _scaled_operand(step, scaled, uses)) is not None:
            dropped.add(mul)
            step = replace(step, args=(step.args[0], mul.args[0]), kwargs={"alpha": mul.args[1]})
        steps.append(step)
    return replace(program, steps=tuple(s for s in steps if s not in dropped)) if dropped else program


def _scaled_operand(step: Compute, scaled: dict[Var, Compute], uses: Counter[Var]) -> Compute | None:
    """Returns the product that is a sum's second operand, if the sum is its only reader."""
    if not has_trait(step.target, "takes_alpha") or len(step.args) != 2 or step.kwargs:
        return None
    x, y = step.args
    mul = scaled.get(y) if isinstance(y, Var) else None
    if mul is None or not isinstance(x, Var) or uses[y] != 1 or not x.dtype == y.dtype == mul.args[0].dtype:
        return None
    return mul


def _scales(step: Compute) -> bool:
    """Returns whether a call multiplies a floating tensor by a Python number."""
    if not has_trait(step.target, "multiplies") or len(step.args) != 2:
        return False
    x, c = step.args
    number = isinstance(c, int | float | Scalar) and not isinstance(c, bool)
    return number and isinstance(x, Var) and x.dtype.is_floating_point
