"""A joint program of forward and backward, as two: what the results need, and the rest. Only saved values cross."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlib.compiler.program.replication import varying
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, makes, reads, swapped
from shardlib.core.aten.op_traits import is_view


@dataclass(frozen=True)
class Halves:
    """`forward` takes the program's own inputs, and returns its results but the gradients, then `saved`.

    `backward` takes `saved`, then the cotangents, and returns the gradients. Where none of the cotangents that a
    gradient `needs` is given, there is none, as in torch.
    """

    forward: Program
    backward: Program
    saved: tuple[Var, ...]
    needs: tuple[frozenset[int], ...]  # for each gradient, the cotangents that it depends on, by position

    @property
    def joint(self) -> Program:
        """Both, one after the other."""
        first, second, saved = self.forward, self.backward, len(self.saved)
        crossing = zip(second.inputs[:saved], first.outputs[len(first.outputs) - saved :], strict=True)
        second = second.with_vars({v: other for v, other in crossing if v is not other})  # where it is in another tier
        return replace(
            first,
            steps=first.steps + second.steps,
            inputs=first.inputs + second.inputs[saved:],
            outputs=first.outputs[: len(first.outputs) - saved] + second.outputs,
        )

    @property
    def own(self) -> int:
        """How many results are the program's own; those behind them are saved."""
        return len(self.forward.outputs) - len(self.saved)


def split(program: Program, cotangents: int, gradients: int, *, whole: bool = False) -> Halves:
    """Cut `program`, of whose inputs the last ones are cotangents and of whose outputs the last ones are gradients.

    Where views of a value cross, it crosses itself if that is to be `whole`, and the views are taken again.
    """
    inputs, given = program.inputs[:-cotangents], program.inputs[-cotangents:]
    own, results = program.outputs[:-gradients], program.outputs[-gradients:]
    needed = {v for v in own if isinstance(v, Var)}
    late = set(given)  # what depends on a cotangent
    first: list[Step] = []
    second: list[Step] = []
    for step in program.steps:
        if any(v in late for v in needs(step)):
            late |= {*gives(step)}
    for step in reversed(program.steps):
        outs = set(gives(step))
        if outs & needed or (stays(step) and late.isdisjoint((*needs(step), *outs))):
            first.append(step)
            needed |= set(needs(step))
        else:
            second.append(step)
    first.reverse()
    second.reverse()
    if whole:
        second, results = _viewed(first, second, results)
    there = {*program.inputs, *(v for s in first for v in makes(s))} - set(given)
    wanted = dict.fromkeys(v for s in second for v in reads(s))
    wanted |= dict.fromkeys(v for v in results if isinstance(v, Var))
    saved = tuple(v for v in wanted if v in there)
    forward = replace(program, steps=tuple(first), inputs=inputs, outputs=(*own, *saved), owned=len(own))
    varies = varying(program)
    known = {v: varies[v] for v in saved}
    backward = Program(program.mesh, tuple(second), (*saved, *given), program.captured, results, varies=known)
    from_: dict[Var, frozenset[int]] = {v: frozenset({i}) for i, v in enumerate(given)}
    for step in second:
        origins = frozenset[int]().union(*(from_.get(v, ()) for v in needs(step)))
        from_ |= dict.fromkeys(gives(step), origins)
    reached = tuple(from_.get(v, frozenset()) if isinstance(v, Var) else frozenset() for v in results)
    return Halves(forward, backward, saved, reached)


def _viewed(
    first: Sequence[Step], second: Sequence[Step], results: Sequence[Any]
) -> tuple[list[Step], tuple[Any, ...]]:
    """The second half, and its results, with views of its own."""
    maker = {v: step for step in first for v in makes(step)}
    steps: list[Step] = []
    again: dict[Var, Var] = {}

    def take(v: Var) -> None:
        step = maker.get(v)
        if v not in again and isinstance(step, Compute) and is_view(step.target) and not step.copies:
            take(step.operands[0])
            again.update({w: replace(w, name=f"{w.name}.again") for w in step.made})
            steps.append(swapped(step, again))

    for v in (*(v for step in second for v in reads(step)), *(v for v in results if isinstance(v, Var))):
        take(v)
    steps += [swapped(step, again) for step in second]
    return steps, tuple(again.get(v, v) if isinstance(v, Var) else v for v in results)


def needs(step: Step) -> Iterable[Var]:
    """What a step reads; a wait, the message that it is for."""
    return step.outs if isinstance(step, Wait) else reads(step)


def gives(step: Step) -> tuple[Var, ...]:
    """What a step makes; what is in flight, where it starts."""
    return step.outs if isinstance(step, Start) else makes(step)


def stays(step: Step) -> bool:
    """Returns whether a step belongs to where it is, whoever reads it: draws of keys, and what may be there for its
    effect."""
    return isinstance(step, Compute) and not step.is_pure
