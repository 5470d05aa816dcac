"""Ops on local tensors -> instructions: plain calls, and the local forms of rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardlib import reshard
from shardlib.graph import Op, Value
from shardlib.lines import Line
from shardlib.lower.arguments import put, substitute
from shardlib.lower.local import Assignment, LocalForm
from shardlib.lower.program import Instr, Program, Step, Var
from shardlib.lower.sym import Sym, local_size, product
from shardlib.propagate.flood import Factor as OpFactor
from shardlib.propagate.flood import Flood
from shardlib.rules.rule import Rule
from shardlib.specs.layout import Layout


class Emitter:
    """Appends instructions to a program, in the name of the line that is being lowered."""

    def __init__(self, program: Program, flood: Flood) -> None:
        self.program, self.flood = program, flood
        self.line: Line | None = None
        self.backward = False

    def op(self, op: Op, rule: Rule, assignment: Assignment, operands: Sequence[Var]) -> list[Any]:
        args, kwargs = substitute(op.node, operands)
        cut_labels = {x[0] for x, axes in assignment.items() if axes}
        for path, (k, names) in rule.ints.items() if cut_labels else ():
            # All of them: beside an empty shard's 0, a -1 left over in a shape would mean nothing.
            size = product([self.label_size(op, n, assignment) for n in names])
            args, kwargs = put(args, kwargs, path, size * k)
        tied = {*rule.rounds, *rule.follows}
        flops = rule.flops / math.prod(reshard.ways(axes) for x, axes in assignment.items() if x[0] not in tied)
        if rule.local is not None and (cut_labels & rule.local_factors or rule.dense):
            before = len(self.program.steps)
            out = rule.local(LocalForm(self, op, assignment, args, kwargs))
            _count(self.program.steps[before:], op.target, flops)
            return list(out) if isinstance(out, tuple | list) else [out]
        return self.call(op.target, args, kwargs, op.results, flops=flops)

    def call(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        results: Sequence[Value | None],
        *,
        note: str = "",
        flops: float = 0.0,
    ) -> list[Any]:
        outs = tuple(None if r is None else Var(r.name, Layout.replicated(r.shape), r.dtype, r) for r in results)
        self.program.steps.append(Instr(target, args, kwargs, outs, self.line, self.backward, note, flops))
        return list(outs)

    def factors(self, op: Op, names: Sequence[str]) -> list[OpFactor]:
        return [(n, k) for n in names for k in range(len(self.flood.labels[op][n]))]

    def leaf_size(self, op: Op, x: OpFactor) -> int:
        return self.flood.dims.size(self.flood.labels[op][x[0]][x[1]])

    def label_size(self, op: Op, label: str, assignment: Assignment) -> Sym | int:
        return product([local_size(self.leaf_size(op, x), assignment.get(x, ())) for x in self.factors(op, [label])])


def _count(steps: Sequence[Step], target: Any, flops: float) -> None:
    """Book an op's arithmetic on the steps of its local form: those that call the op itself, if there are such."""
    calls = [s for s in steps if isinstance(s, Instr)]
    for step in (same := [s for s in calls if s.target is target] or calls):
        step.flops = flops / len(same)
