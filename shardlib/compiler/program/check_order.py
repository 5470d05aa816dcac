"""Checks the order of a program's steps; it stands between any two passes.

Each value is made once, before it is read, and not freed or written over by then; what is in flight is waited for, and
what a message carries stays until then; groups are parts of the mesh; a reduction settles what was pending over them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence

from shardlib.compiler.program.buffers import handed_on, owners_in
from shardlib.compiler.program.layout_transfer import message_faults
from shardlib.compiler.program.steps import (
    Collective,
    Compute,
    Copy,
    Free,
    Program,
    Start,
    Step,
    Var,
    Wait,
    makes,
    reads,
)

_OVER = " was written over by"


class ProgramError(AssertionError):
    """A program that a stage should not have made."""


def check(program: Program) -> Program:
    """The program; raises `ProgramError`, with all faults, where its steps cannot run in this order."""
    refuse(faults(program))
    return program


_RIGHT: weakref.WeakSet[Program] = weakref.WeakSet()  # what was found to have none: all of it is frozen


def refuse(faults: Sequence[str]) -> None:
    if faults:
        raise ProgramError("\n  * ".join(["a program is wrong:", *dict.fromkeys(faults)]))


def faults(program: Program) -> list[str]:
    """What is wrong with the order of its steps; who asks again gets it for nothing."""
    if program in _RIGHT:
        return []
    found = list(_faults(program))
    if not found:
        _RIGHT.add(program)
    return found


def _faults(program: Program) -> Iterator[str]:
    """What is read before it is made, or when it is gone; what is made twice; who is in a group; what is pending."""
    writers = [s for s in program.steps if isinstance(s, Compute) and s.over]
    if wrong := list(_nowhere(program, writers)):
        yield from wrong
        return
    # "", or why it cannot be read any more, or who wrote over it.
    there: dict[Var, str | Compute] = dict.fromkeys(program.given, "")
    flying: dict[Var, tuple[Var, ...]] = {}  # what is in flight -> all that began with it
    carried: dict[tuple[Var, ...], tuple[Var, ...]] = {}  # all that began together -> what the messages are of
    held, roots = Counter[Var](), Counter[Var]()  # how many messages are of a value, or of its memory
    owner = owners_in(program)
    fixed = {owner.get(v, v) for v in program.given} - {
        program.inputs[i] for i in (*program.donated, *program.replaced)
    }
    shown = {owner.get(v, v): list[Var]() for s in writers for v in s.overwritten.values()}
    written, lent = set[Var](), set[Var]()
    if len(there) < len(program.inputs) + len(program.captured):
        yield "an input stands twice"

    def missing(var: Var) -> str:
        why = there.get(var, " is in flight" if var in flying else " is not made yet")
        return f"{_OVER} {said(why)}" if isinstance(why, Compute) else why

    def count(sources: Sequence[Var], by: int) -> None:
        for v in sources:
            held[v] += by
            roots[owner.get(v, v)] += by

    grouped: dict[object, tuple[str, ...]] = {}  # faults of collectives that are alike
    for step in program.steps:
        if isinstance(step, Free):
            for v in step.vars:
                why = " is in flight" if held.get(v) else there.get(v, "?")
                if why and not isinstance(why, Compute):
                    yield f"{v} is freed, and it{why if held[v] else missing(v)}"
            there |= dict.fromkeys(step.vars, " is freed")
            continue
        for v in step.operands if isinstance(step, Compute) else reads(step):
            if v not in there or there[v]:
                yield f"{said(step)} reads {v}, which{missing(v)}"
            if v.host and not (isinstance(step, Start) and step.first.kind == "to_device"):
                yield f"{said(step)} reads {v}, which is in the host's memory"
        if isinstance(step, Compute):
            for over in step.overwritten.values() if step.over else ():
                root = owner.get(over, over)
                written.add(root)
                if root in fixed or roots.get(root) or root in lent:
                    yield f"{said(step)} writes over {over}, which others hold"
                there.update((v, step) for v in (root, over, *shown[root]))
                shown[root].clear()  # it is said of them once
        elif isinstance(step, Start):
            if not step.moves:
                yield "a message of nothing begins"
                continue
            if len(step.moves) > 1 and len({(c.kind, c.axes, c.reduce) for c in step.moves}) > 1:
                yield f"{said(step)} begins collectives of several kinds or groups together"
            for c in step.moves:
                key = c.kind, c.axes, c.reduce, id(c.source.layout), id(c.out.layout)
                if key not in grouped:
                    grouped[key] = tuple(message_faults(program.mesh, c))
                yield from (f"{c.kind} of {c.source} {fault}" for fault in grouped[key])
            yield from (f"{said(step)} brings {v}, which is there" for v in step.outs if v in there or v in flying)
            flying |= dict.fromkeys(step.outs, step.outs)
            carried[step.outs] = reads(step)
            lent |= handed_on([step], owner)
            count(carried[step.outs], 1)
        elif isinstance(step, Wait):
            if not step.outs or any(flying.get(v) != step.outs for v in step.outs):
                yield f"{said(step)} waits for what did not begin together"
            count(carried.pop(step.outs, ()), -1)
            for v in step.outs:
                flying.pop(v, None)
        elif isinstance(step, Copy) and _form(step.out) != _form(step.source):
            yield f"{said(step)} is another tensor than {step.source}"
        for out in step.made if isinstance(step, Compute) else makes(step):
            if out in there:
                yield f"{said(step)} makes {out}, which is there"
            there[out] = ""
            if shown and (root := owner.get(out, out)) in shown:
                shown[root].append(out)
    yield from (f"{v} is in flight, and nobody waits for it" for v in flying)
    yield from (f"{v} is a result, and it{why}" for v in program.results if (why := missing(v)))
    for i, at in program.replaced.items():
        x, new = program.inputs[i], program.outputs[at]
        if x in written and owner.get(new, new) is not x:
            yield f"{x} is written over, and {new}, which replaces it, is elsewhere"


def _nowhere(program: Program, writers: Sequence[Compute]) -> Iterator[str]:
    """Positions, of inputs, of results and of operands, where nothing is."""
    inputs, outputs = range(len(program.inputs)), range(len(program.outputs))
    if not {*program.donated, *program.replaced} <= {*inputs}:
        yield "an input is given up that is none"
    if not {*program.replaced.values()} <= {*outputs} or (program.owned or 0) > len(outputs):
        yield "a result is spoken of that is none"
    for step in writers:
        n = len(step.args)
        if any(k is not None and (k >= n or not isinstance(step.args[k], Var)) for k in step.over):
            yield f"{said(step)} writes over an operand that it has not"


def _form(v: Var) -> tuple[object, ...]:
    return v.layout, v.shape, v.dtype, v.host


def said(step: Step | Collective) -> str:
    if isinstance(step, Collective):
        return f"{step.out} = {step.kind}"
    if isinstance(step, Compute):
        return f"{', '.join('_' if v is None else str(v) for v in step.outs)} = {step.target}"
    if isinstance(step, Copy):
        return f"{step.out} = copy"
    what = ", ".join(map(str, step.vars if isinstance(step, Free) else step.outs))
    return f"start of {what}" if isinstance(step, Start) else f"{type(step).__name__.lower()} of {what}"
