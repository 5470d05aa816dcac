"""Merges the programs of all stages into one that runs them in turn: on virtual devices, and in plans.

The merge is the model check of what will run, after all passes: each stage runs until it waits for a message that is
not sent yet, or comes behind another one of the same sender. If all stages wait, they would wait for ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from shardlib.compiler.passes.split_backward import Halves
from shardlib.compiler.program.steps import Compute, Copy, Program, Step, Var, makes, reads
from shardlib.compiler.stages.staged import Staged
from shardlib.core.errors import ShardingError
from shardlib.ops.transfers import RECEIVE, SEND, TRANSFER


def merge(staged: Staged) -> Program:
    """Returns the program of all stages; raises `ShardingError`, with the fragments, if stages wait for each other."""
    return _merge(staged, staged.programs, staged.output_stages, [0] * len(staged.programs))


def merge_halves(staged: Staged, needs: tuple[frozenset[int], ...]) -> Halves:
    """Returns the forward and the backward program of all stages; the values that each stage saves follow each other.

    `needs` are the cotangents that each gradient depends on.
    """
    assert staged.halves is not None, "its results have gradients"
    saved = [len(h.saved) for h in staged.halves]
    own = staged.halves[0].own
    forward = _merge(staged, [h.forward for h in staged.halves], staged.output_stages[:own], [0] * len(saved))
    backward = _merge(staged, [h.backward for h in staged.halves], staged.output_stages[own:], saved)
    return Halves(forward, backward, backward.inputs[: sum(saved)], needs)


def _merge(
    staged: Staged, programs: Sequence[Program], output_stages: Sequence[int | None], own: Sequence[int]
) -> Program:
    """Merges programs. The first inputs of each, `own` many, are its own, and so are its last outputs."""
    programs = _with_common_inputs(programs, own)
    programs = _with_own_names(programs, own)
    copies, programs = _with_own_state(programs)
    steps: list[Step] = [*copies]
    received = {s.args[1]: s.out_vars for p in programs for s in p.steps if _calls(s, RECEIVE)}
    sent = defaultdict[tuple[int, int], deque[int]](deque)  # by sender and receiver: what is not received yet
    at = [0] * len(programs)
    progress = True
    while progress:
        progress = False
        for stage, program in enumerate(programs):
            while at[stage] < len(program.steps):
                step = program.steps[at[stage]]
                if _calls(step, RECEIVE):
                    sender, number = step.args
                    if next(iter(sent[sender, stage]), None) != number:
                        break
                    sent[sender, stage].popleft()
                elif _calls(step, SEND):
                    x, receiver, number = step.args
                    sent[stage, receiver].append(number)
                    steps.append(replace(step, target=TRANSFER, args=(x, stage, receiver), outs=received[number]))
                else:
                    steps.append(step)
                at[stage] += 1
                progress = True
    if any(n < len(p.steps) for n, p in zip(at, programs, strict=True)):
        raise _deadlock(staged, [p.steps[n] for n, p in zip(at, programs, strict=True) if n < len(p.steps)])
    first = programs[0]
    shared = [next(p.outputs[i] for p in programs[owner or 0 :]) for i, owner in enumerate(output_stages)]
    return replace(
        first,
        steps=tuple(steps),
        inputs=(*(v for p, n in zip(programs, own, strict=True) for v in p.inputs[:n]), *first.inputs[own[0] :]),
        outputs=(*shared, *(x for p in programs for x in p.outputs[len(output_stages) :])),
        replaced={i: out for p in programs for i, out in p.replaced.items()},
        varies={v: axes for p in programs for v, axes in p.varies.items()},
    )


def _deadlock(staged: Staged, waiting: list[Step]) -> ShardingError:
    messages = [staged.by_number[step.args[1]] for step in waiting if isinstance(step, Compute)]
    return ShardingError(
        "the schedule is a deadlock: its stages wait for each other",
        [f"{m.place(m.target, m.receiver)} waits for {m.var.name} of {m.place(m.source, m.sender)}" for m in messages],
        rule="each stage runs its fragments in order, and a fragment runs after all fragments that it needs",
    )


def _shared(program: Program, own: int) -> list[Var]:
    return [*program.inputs[own:], *(v for v, _ in program.captured)]


def _with_common_inputs(programs: Sequence[Program], own: Sequence[int]) -> list[Program]:
    """Gives all programs common variables for shared inputs: those of the first stage that holds them."""
    shared = [_shared(p, n) for p, n in zip(programs, own, strict=True)]
    common = [min(some, key=lambda v: v.elsewhere) for some in zip(*shared, strict=True)]
    pairs = (zip(some, common, strict=True) for some in shared)
    return [p.with_vars({v: x for v, x in pair if v is not x}) for p, pair in zip(programs, pairs, strict=True)]


def _with_own_names(programs: Sequence[Program], own: Sequence[int]) -> list[Program]:
    """Renames values so that no two stages have one variable, or use one name."""
    values = [dict.fromkeys((*p.inputs[:n], *_list_results(p))) for p, n in zip(programs, own, strict=True)]
    counts = Counter(v.name for some in values for v in some)
    counts.update(v.name for v in _shared(programs[0], own[0]))
    return [
        p.with_vars({v: replace(v, name=f"{v.name}.s{stage}") for v in some if counts[v.name] > 1})
        for stage, (p, some) in enumerate(zip(programs, values, strict=True))
    ]


def _with_own_state(programs: Sequence[Program]) -> tuple[list[Step], list[Program]]:
    """Gives every stage but the first a copy of inputs that several stages read and one may overwrite."""
    read = Counter(v for p in programs for v in {v for s in p.steps for v in reads(s)} & {*p.inputs})
    given_up = {i for p in programs for i in (*p.replaced, *p.donated)}
    shared = [v for i, v in enumerate(programs[0].inputs) if read[v] > 1 and i in given_up]
    copies: list[Step] = []
    result = [programs[0]]
    for stage, p in enumerate(programs[1:], 1):
        own = {v: replace(v, name=f"{v.name}.s{stage}") for v in shared if any(v in reads(s) for s in p.steps)}
        copies += [Copy(v, x) for v, x in own.items()]
        positions = {i for i, v in enumerate(p.inputs) if v in own}
        result.append(
            replace(
                p.with_vars(own),
                inputs=p.inputs,
                replaced={i: at for i, at in p.replaced.items() if i not in positions},
            )
        )
    return copies, result


def _calls(step: Step, target: Any) -> TypeGuard[Compute]:
    return isinstance(step, Compute) and step.target is target


def _list_results(program: Program) -> Iterator[Var]:
    return (v for step in program.steps for v in makes(step))
