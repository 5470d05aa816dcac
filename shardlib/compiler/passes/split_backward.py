"""Splits a joint program into a forward one, which computes the results, and a backward one that reads saved values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlib.compiler.program.dependents import find_dependents
from shardlib.compiler.program.replication import varying
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, makes, reads, swapped
from shardlib.core.aten.op_traits import has_trait, is_view


@dataclass(frozen=True)
class Halves:
    """`forward` takes the program's own inputs, and returns its results but the gradients, then `saved`.

    `backward` takes `saved`, then the cotangents, and returns the gradients. A gradient without any of the cotangents
    that it `needs` is None, as in torch.
    """

    forward: Program
    backward: Program
    saved: tuple[Var, ...]
    needs: tuple[frozenset[int], ...]  # for each gradient, the cotangents that it depends on, by position

    @property
    def joint(self) -> Program:
        """Both programs, one after the other."""
        first, second, saved = self.forward, self.backward, len(self.saved)
        crossing = zip(second.inputs[:saved], first.outputs[len(first.outputs) - saved :], strict=True)
        second = second.with_vars(
            {v: other for v, other in crossing if v is not other}
        )  # if the value is in another tier
        return replace(
            first,
            steps=first.steps + second.steps,
            inputs=first.inputs + second.inputs[saved:],
            outputs=first.outputs[: len(first.outputs) - saved] + second.outputs,
        )

    @property
    def own(self) -> int:
        """Number of the program's own results; saved values follow them."""
        return len(self.forward.outputs) - len(self.saved)


def split(program: Program, cotangents: int, gradients: int, *, whole: bool = False) -> Halves:
    """Splits `program`, whose last inputs are cotangents and whose last outputs are gradients.

    If `whole`, the backward program gets saved values in place of their views, and takes the views again.
    """
    inputs, incoming = program.inputs[:-cotangents], program.inputs[-cotangents:]
    own, results = program.outputs[:-gradients], program.outputs[-gradients:]
    needed = {v for v in own if isinstance(v, Var)}
    received = (v for s in program.steps if _brings_gradient(s) for v in makes(s))
    late = find_dependents(((needs(s), gives(s)) for s in program.steps), [*incoming, *received])  # on a cotangent
    first: list[Step] = []
    second: list[Step] = []
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
    available = {*program.inputs, *(v for s in first for v in makes(s))} - set(incoming)
    wanted = dict.fromkeys(v for s in second for v in reads(s))
    wanted |= dict.fromkeys(v for v in results if isinstance(v, Var))
    saved = tuple(v for v in wanted if v in available)
    forward = replace(program, steps=tuple(first), inputs=inputs, outputs=(*own, *saved), owned_outputs=len(own))
    varies = varying(program)
    saved_varies = {v: varies[v] for v in saved}
    backward = Program(program.mesh, tuple(second), (*saved, *incoming), program.captured, results, varies=saved_varies)
    from_: dict[Var, frozenset[int]] = {v: frozenset({i}) for i, v in enumerate(incoming)}
    for step in second:
        origins = frozenset[int]().union(*(from_.get(v, ()) for v in needs(step)))
        from_ |= dict.fromkeys(gives(step), origins)
    reached = tuple(from_.get(v, frozenset()) if isinstance(v, Var) else frozenset() for v in results)
    return Halves(forward, backward, saved, reached)


def _viewed(
    first: Sequence[Step], second: Sequence[Step], results: Sequence[Any]
) -> tuple[list[Step], tuple[Any, ...]]:
    """Returns the second half, and its results, with views taken again."""
    maker = {v: step for step in first for v in makes(step)}
    steps: list[Step] = []
    again: dict[Var, Var] = {}

    def take(v: Var) -> None:
        step = maker.get(v)
        if v not in again and isinstance(step, Compute) and is_view(step.target) and not step.copies:
            take(step.operands[0])
            again.update({w: replace(w, name=f"{w.name}.again") for w in step.out_vars})
            steps.append(swapped(step, again))

    for v in (*(v for step in second for v in reads(step)), *(v for v in results if isinstance(v, Var))):
        take(v)
    steps += [swapped(step, again) for step in second]
    return steps, tuple(again.get(v, v) if isinstance(v, Var) else v for v in results)


def needs(step: Step) -> Iterable[Var]:
    """Returns the values that a step reads; a wait needs the results of its message."""
    return step.outs if isinstance(step, Wait) else reads(step)


def gives(step: Step) -> tuple[Var, ...]:
    """Returns the values that a step makes; a start makes the results of its message."""
    return step.outs if isinstance(step, Start) else makes(step)


def _brings_gradient(step: Step) -> bool:
    """Returns whether a step receives what another stage computes from a cotangent."""
    return isinstance(step, Compute) and step.backward and has_trait(step.target, "receives")


def stays(step: Step) -> bool:
    """Returns whether a step may not move or vanish: it draws a key, or has a side effect."""
    return isinstance(step, Compute) and not step.is_pure
