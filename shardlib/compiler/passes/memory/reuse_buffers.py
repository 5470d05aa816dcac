"""Whose memory a result has: that of an operand which nobody reads again, or its own.

A pointwise result may take over the memory of an operand of its shape and dtype, and so may one of which only some
places are new: that saves fresh memory for every residual add, parameter update and gradient of a table. Whoever shares
that memory (views of it, results of collectives) counts as a reader.
What a result of the program shows of other memory (of an argument, a captured tensor, another result) is copied at the
end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardlib.compiler.program.buffers import blurred, owners_in
from shardlib.compiler.program.inplace_ops import takes
from shardlib.compiler.program.steps import Compute, Copy, Program, Start, Step, Var, reads


def reuse(program: Program) -> Program:
    """The program with in-place calls and copied results."""
    memory = _Memory.of(program)
    steps: list[Step] = [memory.in_place(i, step) for i, step in enumerate(program.steps)]
    copies = {var: replace(var, name=f"{var.name}.own") for var in _borrowed(program, memory)}
    steps += [Copy(var, own) for var, own in copies.items()]
    own = len(program.outputs) if program.owned is None else program.owned
    homes = set(program.replaced.values())
    outputs = [
        copies.get(x, x) if isinstance(x, Var) and i < own and i not in homes else x
        for i, x in enumerate(program.outputs)
    ]
    return replace(program, steps=tuple(steps), outputs=tuple(outputs))


@dataclass
class _Memory:
    """Who owns the memory of each value, which owners nobody may write over, and where each memory is last read."""

    owner: Mapping[Var, Var]
    kept: set[Var]
    last: Mapping[Var, int]

    @staticmethod
    def of(program: Program) -> _Memory:
        owner = owners_in(program)
        given = program.given - {program.inputs[i] for i in program.donated}
        messages = (v for step in program.steps if isinstance(step, Start) for v in reads(step))
        kept = {owner.get(v, v) for v in (*given, *program.results, *messages)} | blurred(program.steps, owner)
        last = {owner.get(v, v): i for i, step in enumerate(program.steps) for v in reads(step)}
        return _Memory(owner, kept, last)

    def in_place(self, i: int, step: Step) -> Step:
        """The step, in place of operands where it may be."""
        if not isinstance(step, Compute) or step.over or not (every := takes(step)):
            return step
        over = tuple(
            next((k for k in places if self._may(i, step, out, k)), None)
            for out, places in zip(step.outs, every, strict=True)
        )
        return replace(step, over=over) if any(k is not None for k in over) else step

    def _may(self, i: int, step: Compute, out: Var | None, k: int) -> bool:
        x = step.args[k] if k < len(step.args) else None
        if out is None or not isinstance(x, Var) or not alike(x, out):
            return False
        alone = sum(self.owner.get(v, v) is x for v in reads(step)) == 1  # none shows the same memory: x + x.t()
        return alone and self.owner.get(x, x) is x and self.last[x] == i and x not in self.kept


def _borrowed(program: Program, memory: _Memory) -> list[Var]:
    """Results that show memory of an argument that is not donated, of a captured tensor, or of an earlier result."""
    donated = {program.inputs[i] for i in program.donated}
    others = {*(program.given - donated), *blurred(program.steps, memory.owner)}
    homes = set(program.replaced.values())
    out: list[Var] = []
    for var in dict.fromkeys(
        v for i, v in enumerate(program.outputs[: program.owned]) if isinstance(v, Var) and i not in homes
    ):
        root = memory.owner.get(var, var)
        if root in others:
            out.append(var)
        others.add(root)
    return out


def alike(x: Var, y: Var) -> bool:
    """Returns whether two values fill the same memory."""
    return x.layout is not None and (x.layout, x.dtype, _shape(x)) == (y.layout, y.dtype, _shape(y))


def _shape(var: Var) -> Any:
    return None if var.value is None else var.value.shape
