"""The phase of every step: forward, backward, or the optimizer's."""

from __future__ import annotations

from shardlib.compiler.program.steps import Compute, Free, Program, Start, Step, Var, Wait, makes, reads

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


def phases(program: Program) -> list[str]:
    """Returns the phase of each step: code that reads gradients, and is no backward code itself, is the optimizer's.

    A step without operands belongs to the phase before it, and so do waits and frees.
    """
    derived: set[Var] = set()  # gradients, and all that depends on them
    phase, out = FORWARD, list[str]()
    for step in program.steps:
        if _is_backward(step):
            phase = BACKWARD
        elif not isinstance(step, Wait | Free) and reads(step):
            phase = FORWARD if derived.isdisjoint(reads(step)) else OPTIMIZER
        if phase != FORWARD and not isinstance(step, Wait | Free):
            derived.update(step.outs if isinstance(step, Start) else makes(step))
        out.append(phase)
    return out


def _is_backward(step: Step) -> bool:
    first = step.first if isinstance(step, Start) else step
    return bool(getattr(first, "backward", False)) if isinstance(step, Compute | Start) else False
