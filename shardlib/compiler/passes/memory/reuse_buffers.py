"""Decides whether a result takes the memory of an operand without later readers, or its own.

A pointwise result may take the memory of an operand of its shape and dtype, and so may a result that changes only some
places of an operand. This saves memory for every residual add, parameter update and gradient of a table. Values that
share the memory (views, results of collectives) count as readers. A result of the program that views other memory (of
an argument, a captured tensor, another result) is copied at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardlib.compiler.program.buffers import blurred, owners_in
from shardlib.compiler.program.inplace_ops import takes
from shardlib.compiler.program.steps import Compute, Copy, Program, Start, Step, Var, reads


def reuse(program: Program) -> Program:
    """Turns calls into in-place calls, and copies results that view other memory."""
    memory = _Memory.analyze(program)
    steps: list[Step] = [memory.in_place(i, step) for i, step in enumerate(program.steps)]
    copies = {var: replace(var, name=f"{var.name}.own") for var in _borrowed(program, memory)}
    steps += [Copy(var, own) for var, own in copies.items()]
    own = len(program.outputs) if program.owned_outputs is None else program.owned_outputs
    homes = set(program.replaced.values())
    outputs = [
        copies.get(x, x) if isinstance(x, Var) and i < own and i not in homes else x
        for i, x in enumerate(program.outputs)
    ]
    return replace(program, steps=tuple(steps), outputs=tuple(outputs))


@dataclass
class _Memory:
    """The owner of each value's memory, the owners that must not be overwritten, and each memory's last reader."""

    owner: Mapping[Var, Var]
    kept: set[Var]
    last: Mapping[Var, int]

    @staticmethod
    def analyze(program: Program) -> _Memory:
        owner = owners_in(program)
        borrowed = program.entry_values - {program.inputs[i] for i in program.donated}
        messages = (v for step in program.steps if isinstance(step, Start) for v in reads(step))
        kept = {owner.get(v, v) for v in (*borrowed, *program.results, *messages)} | blurred(program.steps, owner)
        last = {owner.get(v, v): i for i, step in enumerate(program.steps) for v in reads(step)}
        return _Memory(owner, kept, last)

    def in_place(self, i: int, step: Step) -> Step:
        """Returns the step, in place of operands if possible."""
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
        alone = (
            sum(self.owner.get(v, v) is x for v in reads(step)) == 1
        )  # no other operand shares the memory, as in x + x.t()
        return alone and self.owner.get(x, x) is x and self.last[x] == i and x not in self.kept


def _borrowed(program: Program, memory: _Memory) -> list[Var]:
    """Returns results that view memory of an undonated argument, a captured tensor, or an earlier result."""
    donated = {program.inputs[i] for i in program.donated}
    others = {*(program.entry_values - donated), *blurred(program.steps, memory.owner)}
    homes = set(program.replaced.values())
    out: list[Var] = []
    for var in dict.fromkeys(
        v for i, v in enumerate(program.outputs[: program.owned_outputs]) if isinstance(v, Var) and i not in homes
    ):
        root = memory.owner.get(var, var)
        if root in others:
            out.append(var)
        others.add(root)
    return out


def alike(x: Var, y: Var) -> bool:
    """Returns whether two values have the same layout, dtype and shape."""
    return x.layout is not None and (x.layout, x.dtype, _shape(x)) == (y.layout, y.dtype, _shape(y))


def _shape(var: Var) -> Any:
    return None if var.value is None else var.value.shape
