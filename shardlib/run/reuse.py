"""Who owns the memory of a program's values: which instructions may write over an operand, which results are copied.

A pointwise result may take the memory of an operand of its shape and dtype that nobody reads again: that saves fresh
memory for every residual add and parameter update. Whoever shares that memory (views of it, results of collectives)
counts as a reader, and so does a device that computes later from a value which several devices share. What a result
shows of other memory (of an argument, of a captured tensor, of another result) is copied at the end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shardlib.aten.traits import has, is_view, may_show
from shardlib.lower.program import Collective, Instr, Program, Var, reads
from shardlib.meshes.axis import Axis

_FRESH = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")  # the others may hand on what they are given
Event = Instr | tuple[Collective, ...]


def overwrites(
    program: Program, events: Sequence[Event], varies: Mapping[Var, tuple[Axis, ...]], donated: Collection[Var]
) -> dict[Instr, int]:
    """Instructions that may run in place, with the operand (0 or 1) that they overwrite.

    `events` is the order in which the program runs, `varies` on which axes values differ between devices, `donated` the
    inputs that may be overwritten.
    """
    owner = _owners(events, donated)
    kept = _blurred(events, owner)
    kept |= {owner.get(v, v) for v in program.outputs if isinstance(v, Var)}
    kept |= {owner.get(v, v) for v in program.inputs if v not in donated}
    kept |= {owner.get(v, v) for v, _ in program.captured}
    last: dict[Var, int] = {}
    shared: set[Var] = set()
    for i, event in enumerate(events):
        steps = event if isinstance(event, tuple) else (event,)
        for step in steps:
            for var in reads(step):
                root = owner.get(var, var)
                last[root] = i
                if isinstance(step, Collective):
                    kept.add(root)  # it may be in flight for as long as its result is not read
                elif any(out is not None and varies.get(out, ()) != varies.get(root, ()) for out in step.outs):
                    shared.add(root)
    chosen: dict[Instr, int] = {}
    for i, event in enumerate(events):
        if isinstance(event, Instr) and _in_place(event) is not None:
            (out,) = event.outs
            assert out is not None
            for k in (0, 1) if has(event.target, "commutes") and not event.kwargs else (0,):
                operand = event.args[k] if k < len(event.args) else None
                if not isinstance(operand, Var):
                    continue
                root = owner.get(operand, operand)
                if sum(owner.get(v, v) is root for v in reads(event)) != 1:
                    continue  # the other operand shows the same memory: x + x.t()
                same = operand.layout == out.layout is not None and (operand.dtype, _shape(operand)) == (
                    out.dtype,
                    _shape(out),
                )
                if (
                    same
                    and root is operand
                    and root in owner
                    and last[root] == i
                    and root not in kept
                    and root not in shared
                ):
                    chosen[event] = k
                    break
    return chosen


def borrowed(program: Program, events: Sequence[Event], donated: Collection[Var]) -> list[Var]:
    """Results that show memory of an argument that is not donated, of a captured tensor, or of an earlier result."""
    owner = _owners(events, donated)
    others = {v for v in program.inputs if v not in donated} | {v for v, _ in program.captured}
    others |= _blurred(events, owner)
    out: list[Var] = []
    for var in dict.fromkeys(v for v in program.outputs[: program.owned] if isinstance(v, Var)):
        root = owner.get(var, var)
        if root in others:
            out.append(var)
        others.add(root)
    return out


def in_place(target: Any) -> Any:
    """The op that writes its result over its first operand."""
    overload = _in_place_overload(target)
    assert overload is not None
    return overload


def _in_place(step: Instr) -> Any:
    """The in-place form of a pointwise instruction with one result; None if it has none."""
    if len(step.outs) != 1 or step.outs[0] is None or torch.Tag.pointwise not in getattr(step.target, "tags", ()):
        return None
    return _in_place_overload(step.target)


def _in_place_overload(target: Any) -> Any:
    packet = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::") + "_", None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _owners(events: Sequence[Event], donated: Collection[Var]) -> dict[Var, Var]:
    """For every value of known memory, the value that first had that memory; views are owned by what they view."""
    owner: dict[Var, Var] = {}
    for event in events:
        if isinstance(event, tuple):
            for c in event:
                alone = math.prod(a.size for a in c.axes) == 1  # the only member keeps what it has
                owner[c.out] = c.out if c.kind in _FRESH and not alone else owner.setdefault(c.source, c.source)
        elif is_view(event.target):
            source = next(iter(reads(event)))
            for out in event.outs:
                if out is not None:
                    owner[out] = owner.setdefault(source, source)
        else:
            for out in event.outs:
                if out is not None:
                    owner[out] = out
    return owner | {v: owner.get(v, v) for v in donated}


def _blurred(events: Sequence[Event], owner: Mapping[Var, Var]) -> set[Var]:
    """Owners whose memory an op may, or may not, have handed on to its results, and these."""
    blurred: set[Var] = set()
    for event in events:
        if isinstance(event, Instr) and may_show(event.target):
            blurred |= {owner.get(v, v) for v in (*reads(event), *event.outs) if v is not None}
    return blurred


def _shape(var: Var) -> Any:
    return None if var.value is None else var.value.shape
