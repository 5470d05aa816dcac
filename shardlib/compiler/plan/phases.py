"""Forward, backward or optimizer: the phase of every op of a graph, and of every step of a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.compiler.graph.ir import Op
from shardlib.compiler.program.steps import Compute, Copy, Free, Program, Start, Step, Wait, makes, reads

FORWARD, BACKWARD, OPTIMIZER = PHASES = "forward", "backward", "optimizer"


@dataclass(frozen=True)
class _Call:
    """An op or a step: the values that it `reads` and `makes`. A carrier (a message, a copy) computes nothing."""

    reads: Sequence[Any]
    makes: Sequence[Any]
    is_backward: bool
    in_module: bool = False
    is_carrier: bool = False


def op_phases(ops: Sequence[Op]) -> dict[Op, str]:
    """Returns the phase of each op of a graph, in its order.

    Code outside of modules is the optimizer's if it reads gradients, or values of the optimizer, without being backward
    code; and if only the optimizer computes with its results: weight decay, and the count of steps.
    """
    calls = [
        _Call(op.operands, [v for v in op.results if v is not None], op.backward, bool(op.node.meta.get("modules")))
        for op in ops
    ]
    return dict(zip(ops, _find_phases(calls), strict=True))


def step_phases(program: Program) -> list[str]:
    """Returns the phase of each step, as `op_phases` does for ops; a view has the phase of its reader.

    Messages and copies belong to the phase of their values. Waits, frees, and steps without operands that the optimizer
    does not read belong to the phase before them.
    """
    phases, before = list[str](), FORWARD
    for step, phase in zip(program.steps, _find_phases([_call(s) for s in program.steps]), strict=True):
        is_free = isinstance(step, Wait | Free) or (phase == FORWARD and not reads(step))
        before = before if is_free else phase
        phases.append(before)
    return phases


def _call(step: Step) -> _Call:
    if isinstance(step, Start):
        return _Call(step.sources, step.outs, step.first.backward, is_carrier=True)
    if isinstance(step, Compute):
        return _Call(step.operands, step.out_vars, step.backward, bool(step.inside))
    return _Call(reads(step), makes(step) if isinstance(step, Copy) else (), is_backward=False, is_carrier=True)


def _find_phases(calls: Sequence[_Call]) -> list[str]:
    phases = _spread_forward(calls, [BACKWARD if call.is_backward else FORWARD for call in calls])
    readers: dict[Any, set[str]] = defaultdict(set)  # the phases of the calls that read a value
    for i, call in reversed([*enumerate(calls)]):
        read_in = {phase for v in call.makes for phase in readers.get(v, ())}
        is_free = phases[i] == FORWARD and not call.in_module
        if is_free and read_in == {OPTIMIZER}:
            phases[i] = OPTIMIZER
        if read_in or not (is_free and call.makes):  # a result that nothing else reads says nothing of its operands
            for v in call.reads:
                readers[v].add(phases[i])
    return _spread_forward(calls, phases)


def _spread_forward(calls: Sequence[_Call], phases: Sequence[str]) -> list[str]:
    """Returns the phases, where forward code outside of modules that reads values of other phases has a later one."""
    phase_of: dict[Any, str] = {}  # of values
    result = []
    for call, phase in zip(calls, phases, strict=True):
        if phase == FORWARD and not call.in_module:
            derived = [phase_of[v] for v in call.reads if v in phase_of]
            phase = FORWARD if not derived else derived[0] if call.is_carrier else OPTIMIZER
        phase_of |= dict.fromkeys(call.makes, phase) if phase != FORWARD else {}
        result.append(phase)
    return result
