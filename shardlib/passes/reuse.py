"""Whose memory a result has: that of an operand which nobody reads again, or its own.

A pointwise result may take over the memory of an operand of its shape and dtype, and so may one of which only some
places are new: that saves fresh memory for every residual add, parameter update and gradient of a table. Whoever shares
that memory (views of it, results of collectives) counts as a reader.
What a result of the program shows of other memory (of an argument, a captured tensor, another result) is copied at the
end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardlib.aten.traits import has
from shardlib.internals import schema_of
from shardlib.program.steps import Compute, Copy, Program, Start, Step, Var, reads
from shardlib.program.storage import blurred, owners


def reuse(program: Program) -> Program:
    """The program with in-place calls and copied results."""
    memory = _Memory.of(program)
    steps: list[Step] = [memory.in_place(i, step) for i, step in enumerate(program.steps)]
    copies = {var: replace(var, name=f"{var.name}.own") for var in _borrowed(program, memory)}
    steps += [Copy(var, own) for var, own in copies.items()]
    own = len(program.outputs) if program.owned is None else program.owned
    outputs = [copies.get(x, x) if isinstance(x, Var) and i < own else x for i, x in enumerate(program.outputs)]
    return replace(program, steps=tuple(steps), outputs=tuple(outputs))


@dataclass
class _Memory:
    """Who owns the memory of each value, which owners nobody may write over, and where each memory is last read."""

    owner: Mapping[Var, Var]
    kept: set[Var]
    last: Mapping[Var, int]

    @staticmethod
    def of(program: Program) -> _Memory:
        owner = owners(program.steps)
        given = program.given - {program.inputs[i] for i in program.donated}
        messages = (v for step in program.steps if isinstance(step, Start) for v in reads(step))
        kept = {owner.get(v, v) for v in (*given, *program.results, *messages)} | blurred(program.steps, owner)
        last = {owner.get(v, v): i for i, step in enumerate(program.steps) for v in reads(step)}
        return _Memory(owner, kept, last)

    def in_place(self, i: int, step: Step) -> Step:
        """The step, in place of an operand where it may be."""
        if not isinstance(step, Compute) or in_place_form(step.target) is None or len(step.outs) != 1:
            return step
        return next((replace(step, over=k) for k in self._candidates(step) if self._may(i, step, k)), step)

    def _candidates(self, step: Compute) -> Iterator[int]:
        for k in (0, 1) if has(step.target, "commutes") and not step.kwargs else (0,):
            if k < len(step.args) and isinstance(step.args[k], Var):
                yield k

    def _may(self, i: int, step: Compute, k: int) -> bool:
        x, (out,) = step.args[k], step.outs
        if out is None or x.layout is None or (x.layout, x.dtype, _shape(x)) != (out.layout, out.dtype, _shape(out)):
            return False
        alone = sum(self.owner.get(v, v) is x for v in reads(step)) == 1  # none shows the same memory: x + x.t()
        return alone and self.owner.get(x, x) is x and self.last[x] == i and x not in self.kept


def _borrowed(program: Program, memory: _Memory) -> list[Var]:
    """Results that show memory of an argument that is not donated, of a captured tensor, or of an earlier result."""
    donated = {program.inputs[i] for i in program.donated}
    others = {*(program.given - donated), *blurred(program.steps, memory.owner)}
    out: list[Var] = []
    for var in dict.fromkeys(v for v in program.outputs[: program.owned] if isinstance(v, Var)):
        root = memory.owner.get(var, var)
        if root in others:
            out.append(var)
        others.add(root)
    return out


def in_place_form(target: Any) -> Any:
    """The op that writes a result over the first operand, place by place; None if there is none."""
    if torch.Tag.pointwise not in getattr(target, "tags", ()) and not has(target, "writes places"):
        return None
    packet = getattr(torch.ops.aten, schema_of(target).name.removeprefix("aten::") + "_", None)
    return getattr(packet, schema_of(target).overload_name or "default", None) if packet is not None else None


def _shape(var: Var) -> Any:
    return None if var.value is None else var.value.shape
