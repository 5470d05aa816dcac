"""Redundant work: steps whose results do not differ along some mesh axis, so that several devices do them identically.

The final program says along which axes values differ (`compiler/program/replication`), so every cause counts: an axis
left unused, whole arguments, an op without a rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.compiler.plan.names import op_name
from shardlib.compiler.program.replication import primes, varying
from shardlib.compiler.program.steps import Compute, Program
from shardlib.compiler.simulate.timeline import called
from shardlib.core.source_lines import format_path_line
from shardlib.core.text_tables import format_si
from shardlib.sharding.mesh.axis import Axis, group_size

WORTH = 0.05  # the least share of a plan's FLOPs that its text reports


@dataclass(frozen=True)
class Redundant:
    """Calls of one op at one line that `copies` devices along `axes` make on the same numbers.

    `flops` and `bytes` (of results) are those that one device would save if each did its part: a share of
    1 - 1 / copies. Both are sums over `times` calls; the results need not be live at once. `line` is the user's source
    line, or, if `backward`, the line that this gradient belongs to.
    """

    op: str
    line: str
    backward: bool
    flops: float
    bytes: int
    copies: int
    axes: tuple[str, ...]
    times: int = 1

    def __str__(self) -> str:
        times = f"{self.times} times " if self.times > 1 else ""
        back = "in the backward of" if self.backward else "at"
        return (
            f"{self.op} {times}{back} {self.line}: {format_si(self.flops, 'FLOP')} and {format_si(self.bytes, 'B')} "
            f"beyond its share, alike on {self.copies} devices along {' '.join(self.axes)}"
        )


def redundant(program: Program) -> tuple[Redundant, ...]:
    """Lists work that devices do identically, by op, line and axes; most FLOPs first, then most bytes.

    An op of unknown cost counts by its bytes only. Results of collectives do not count, since a plan lists these.
    """
    work: defaultdict[tuple[Any, ...], list[tuple[float, int]]] = defaultdict(list)
    for step, axes in _repeated(program):
        held = sum(v.nbytes for v in step.out_vars if step.copies or v not in step.shown)
        if step.flops or held:
            work[_op_of(step), format_path_line(step.line), step.backward, axes].append((step.flops, held))
    records = []
    for (op, line, backward, axes), costs in work.items():
        copies = group_size(axes)
        flops, held = (sum(cost) * (1 - 1 / copies) for cost in zip(*costs, strict=True))
        records.append(Redundant(op, line, backward, flops, round(held), copies, tuple(map(str, axes)), len(costs)))
    return tuple(sorted(records, key=lambda r: (-r.flops, -r.bytes)))


def sentence(records: Sequence[Redundant], flops: float) -> str:
    """Returns the line of a plan on redundant work; empty below 5 % of the plan's FLOPs."""
    twice = sum(r.flops for r in records)
    if not records or twice < WORTH * flops or not twice:
        return ""
    most, held = records[0], sum(r.bytes for r in records)
    where = f"{most.op} {'in the backward of' if most.backward else 'at'} {most.line} ({' '.join(most.axes)})"
    share = f"{format_si(twice, 'FLOP')} of {format_si(flops, 'FLOP')} per device"
    return f"redundant: {share}, {format_si(held, 'B')} of results; most in {where}"


def _repeated(program: Program) -> Iterator[tuple[Compute, tuple[Axis, ...]]]:
    """Yields calls with equal results on several devices, and the axes along which they are equal."""
    differ = varying(program)
    everywhere = [p for name in program.mesh.axis_names for p in program.mesh.axis(name).primes()]
    for step in program.steps:
        if isinstance(step, Compute) and step.out_vars:
            # All results of a call differ where its operands do. Shards of one value count as different, though their
            # numbers may be equal, as in a constant.
            layouts = [v.layout for v in step.out_vars if v.layout is not None]
            apart = {*differ[step.out_vars[0]], *primes(a for x in layouts for a in (*x.axes, *x.pending_axes))}
            if alike := [p for p in everywhere if p not in apart]:
                yield step, Axis.merge(alike)


def _op_of(step: Compute) -> str:
    """Returns the name of the graph's op that a call belongs to."""
    op = next((v.value.op for v in step.out_vars if v.value is not None and v.value.op is not None), None)
    return called(step) if op is None else op_name(op)
