"""Merges the programs of all stages into one that runs them in turn: on virtual devices, and in plans.

The merge is the model check of what will run, after all passes: each stage runs until it waits for a message that is
not sent yet. If all stages wait, they would wait for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeGuard

from shardlib.compiler.program.steps import Compute, Copy, Program, Step, Var, makes, reads
from shardlib.compiler.stages.cut import Staged
from shardlib.core.errors import ShardingError
from shardlib.ops.transfers import RECEIVE, SEND, TRANSFER


def merge(staged: Staged) -> Program:
    """Returns the program of all stages; raises `ShardingError`, with the fragments, if stages wait for each other."""
    programs = _with_common_inputs(staged.programs)
    programs = _with_own_names(programs)
    copies, programs = _with_own_state(programs)
    steps: list[Step] = [*copies]
    received = {s.args[1]: s.out_vars for p in programs for s in p.steps if _calls(s, RECEIVE)}
    sent: set[int] = set()
    at = [0] * len(programs)
    progress = True
    while progress:
        progress = False
        for stage, program in enumerate(programs):
            while at[stage] < len(program.steps):
                step = program.steps[at[stage]]
                if _calls(step, RECEIVE):
                    if step.args[1] not in sent:
                        break
                elif _calls(step, SEND):
                    x, receiver, number = step.args
                    sent.add(number)
                    steps.append(replace(step, target=TRANSFER, args=(x, stage, receiver), outs=received[number]))
                else:
                    steps.append(step)
                at[stage] += 1
                progress = True
    if any(n < len(program.steps) for n, program in zip(at, programs, strict=True)):
        raise _deadlock(staged, [p.steps[n] for n, p in zip(at, programs, strict=True) if n < len(p.steps)])
    first = programs[0]
    results = zip(staged.homes, zip(*(p.outputs for p in programs), strict=True), strict=True)
    outputs = tuple(values[home or 0] for home, values in results)
    replaced = {i: out for p in programs for i, out in p.replaced.items()}
    return replace(first, steps=tuple(steps), outputs=outputs, replaced=replaced)


def _deadlock(staged: Staged, waiting: list[Step]) -> ShardingError:
    messages = [staged.by_number[step.args[1]] for step in waiting if isinstance(step, Compute)]
    return ShardingError(
        "the schedule is a deadlock: its stages wait for each other",
        [f"{m.target!r} waits for {m.var.name} of {m.source!r}" for m in messages],
        rule="each stage runs its fragments in order, and a fragment runs after all fragments that it needs",
    )


def _with_common_inputs(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Gives all programs the input variables of the first one."""
    first = [*programs[0].inputs, *(v for v, _ in programs[0].captured)]
    result = [programs[0]]
    for p in programs[1:]:
        own = [*p.inputs, *(v for v, _ in p.captured)]
        result.append(p.with_vars({v: x for v, x in zip(own, first, strict=True) if v is not x}))
    return tuple(result)


def _with_own_names(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Renames values so that no two stages make one variable, or use one name."""
    counts = Counter(v.name for p in programs for v in dict.fromkeys(_made(p)))
    names = {v.name for v in programs[0].entry_values}
    made: set[Var] = set()
    result = []
    for stage, p in enumerate(programs):
        twice = [v for v in dict.fromkeys(_made(p)) if counts[v.name] > 1 or v in made or v.name in names]
        p = p.with_vars({v: replace(v, name=f"{v.name}.s{stage}") for v in twice})
        made.update(_made(p))
        result.append(p)
    return tuple(result)


def _with_own_state(programs: tuple[Program, ...]) -> tuple[list[Step], tuple[Program, ...]]:
    """Gives every stage but the first a copy of inputs that several stages read and one overwrites."""
    read = Counter(v for p in programs for v in {v for s in p.steps for v in reads(s)} & {*p.inputs})
    shared = [v for i, v in enumerate(programs[0].inputs) if read[v] > 1 and any(i in p.replaced for p in programs)]
    copies: list[Step] = []
    result = [programs[0]]
    for stage, p in enumerate(programs[1:], 1):
        own = {v: replace(v, name=f"{v.name}.s{stage}") for v in shared if any(v in reads(s) for s in p.steps)}
        copies += [Copy(v, x) for v, x in own.items()]
        positions = {i for i, v in enumerate(p.inputs) if v in own}
        p = replace(p.with_vars(own), inputs=programs[0].inputs)
        result.append(replace(p, replaced={i: at for i, at in p.replaced.items() if i not in positions}))
    return copies, tuple(result)


def _calls(step: Step, target: Any) -> TypeGuard[Compute]:
    return isinstance(step, Compute) and step.target is target


def _made(program: Program) -> Iterator[Var]:
    return (v for step in program.steps for v in makes(step))
