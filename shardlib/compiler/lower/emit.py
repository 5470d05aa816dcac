"""Emits an op as steps on local tensors: the plain call, or the local form of its rule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardlib.compiler.graph.ir import Op
from shardlib.compiler.graph.local_sort import Noted
from shardlib.compiler.lower.arguments import put, substitute
from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.lower.local_forms.local_builder import LocalForm
from shardlib.compiler.program.abstract_device import Device
from shardlib.compiler.program.check_order import refuse
from shardlib.compiler.program.steps import Compute, Step, Var, reads
from shardlib.compiler.program.sym_int import Sym, local_size, most, product
from shardlib.compiler.propagate.propagation import Assignment, OpFactor, Propagation
from shardlib.core.source_lines import format_path_line
from shardlib.rules.rule import Rule
from shardlib.sharding.mesh.axis import Axis, group_size

_LITTLE = 8  # a call on a tensor this many times smaller than the largest does little of the work


class Emitter:
    """Writes ops of the graph as steps of the program; with `counts_messages`, only its messages are right."""

    def __init__(self, builder: Builder, propagation: Propagation, *, counts_messages: bool = False) -> None:
        self.builder, self.propagation, self.counts_messages = builder, propagation, counts_messages
        self.noted: list[Noted] = []  # shardings of the values that belong to a sort

    def op(
        self, op: Op, rule: Rule, assignment: Assignment, operands: Sequence[Var], outs: Sequence[Var | None]
    ) -> None:
        """Emits an op whose factors `assignment` shards, with these results.

        Raises `ProgramError` for shardings that its rule forbids: the search must not decide them.
        """
        refuse([f"{op.kind} at {format_path_line(op.line)}: {fault}" for fault in _forbidden(rule, assignment)])
        self._note(op, assignment)
        args, kwargs = substitute(op.node, operands)
        sharded_labels = {x[0] for x, axes in assignment.items() if axes}
        for path, (k, names) in rule.ints.items() if sharded_labels else ():
            # Every size is replaced: a -1 in a shape is ambiguous where another size is an empty shard's 0.
            size = product([self.label_size(op, n, assignment) for n in names])
            args, kwargs = put(args, kwargs, path, size * k)
        tied = {*rule.ties.required}
        if op.owns is not None and not op.owns.begins:
            tied.add(op.owns.factor)  # every device computes rows of other devices, too
        flops, work = self._share(op, rule, {x: axes for x, axes in assignment.items() if axes and x[0] not in tied})
        if rule.local.emit is not None and sharded_labels & rule.local.factors:
            before, steps = len(self.builder.steps), self.builder.steps
            results = rule.local.emit(LocalForm(self, op, assignment, args, kwargs))
            steps[before:] = _counted(steps[before:], op.target, flops, work, self.builder.first)
            for var, out in zip(results if isinstance(results, tuple | list) else [results], outs, strict=True):
                if out is not None:
                    self.builder.become(var, out, first=before)
            return
        self.builder.compute(op.target, args, kwargs, outs, flops=flops, work=work)

    def _note(self, op: Op, assignment: Assignment) -> None:
        """Records the sharding of an op that belongs to a sort."""
        counted = next((r.counted for r in op.results if r is not None and r.counted), None)
        name = counted if op.ordered is None else op.ordered.name
        if name is not None:
            labels, rows = self.propagation.labels[op], None if op.ordered is None else op.ordered.rows
            sharded = {
                labels[f][k]: axes for (f, k), axes in assignment.items() if axes and (rows is None or f in rows)
            }
            self.noted.append(Noted(name, sharded, rows is not None))

    def _share(self, op: Op, rule: Rule, sharded: Assignment) -> tuple[float, Sym | None]:
        """Returns the FLOPs of the busiest device, and each device's work where shards are uneven."""
        if not rule.flops:
            return 0.0, None
        sizes = [self.leaf_size(op, x) for x in sharded]
        work = product([local_size(size, axes) for size, axes in zip(sizes, sharded.values(), strict=True)])
        if not isinstance(work, Sym) or not most(work):
            return rule.flops / math.prod(map(group_size, sharded.values())), None
        return rule.flops * most(work) / math.prod(sizes), work

    def factors(self, op: Op, names: Sequence[str]) -> list[OpFactor]:
        return [(n, k) for n in names for k in range(len(self.propagation.labels[op][n]))]

    def leaf_size(self, op: Op, x: OpFactor) -> int:
        return self.propagation.dims.size(self.propagation.labels[op][x[0]][x[1]])

    def label_size(self, op: Op, label: str, assignment: Assignment) -> Sym | int:
        return product([local_size(self.leaf_size(op, x), assignment.get(x, ())) for x in self.factors(op, [label])])


def _forbidden(rule: Rule, assignment: Assignment) -> Iterator[str]:
    """Yields the shardings that a rule forbids; `Placements.result_form` checks the factors that results lack."""
    axes: dict[str, list[Axis]] = {}
    for (f, _), over in assignment.items():
        axes.setdefault(f, []).extend(p for a in over for p in a.primes())
    sharded, tied = {f for f, over in axes.items() if over}, rule.ties.required
    yield from (f"{f} is cut, and has to be whole" for f in sorted(sharded & rule.whole))
    yield from (f"{f} is cut, and {tied[f]} is not" for f in sorted(sharded & tied.keys()) if tied[f] not in sharded)
    alone = [p for f in sharded - tied.keys() for p in axes[f]]
    if len({*alone}) < len(alone):
        yield f"{', '.join(sorted(sharded))} are cut over one axis"


def _counted(steps: Sequence[Step], target: Any, flops: float, work: Sym | None, device: Device) -> list[Step]:
    """Returns the steps of a local form with the op's FLOPs, split among the calls that do the work.

    Those are the calls of the op itself on large tensors, or else the calls on the largest tensors. Statistics that
    every device computes alike count as nothing.
    """

    def size(step: Compute) -> int:
        tensors = (device.held(v) for v in (*reads(step), *step.out_vars))
        return max((math.prod(x.shape) for x in tensors if x is not None), default=0)

    calls = [s for s in steps if isinstance(s, Compute)]
    largest = max(map(size, calls), default=0)
    same_op = [s for s in calls if s.target is target and size(s) * _LITTLE >= largest]
    workers = same_op or [s for s in calls if size(s) == largest]
    return [
        replace(s, flops=flops / len(workers), work=work) if isinstance(s, Compute) and s in workers else s
        for s in steps
    ]
