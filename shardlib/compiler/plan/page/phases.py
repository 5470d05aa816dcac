"""The phase of every step: forward, backward, or the optimizer's."""

from __future__ import annotations

from shardlib.compiler.program.steps import Compute, Free, Program, Start, Var, Wait, makes, reads

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


def phases(program: Program) -> list[str]:
    """Returns the phase of each step: calls that read gradients, and are no backward code, are the optimizer's.

    Messages and copies belong to the phase of their values. Waits, frees, and steps without operands belong to the
    phase before them.
    """
    phase_of: dict[Var, str] = {}  # of gradients, and all that depends on them
    phase, out = FORWARD, list[str]()
    for step in program.steps:
        if not isinstance(step, Wait | Free) and reads(step):
            derived = [phase_of[v] for v in reads(step) if v in phase_of]
            if step.first.backward if isinstance(step, Start) else isinstance(step, Compute) and step.backward:
                phase = BACKWARD
            elif not derived:
                phase = FORWARD
            else:
                phase = OPTIMIZER if isinstance(step, Compute) else derived[0]
        if phase != FORWARD and not isinstance(step, Wait | Free):
            phase_of |= dict.fromkeys(step.outs if isinstance(step, Start) else makes(step), phase)
        out.append(phase)
    return out
