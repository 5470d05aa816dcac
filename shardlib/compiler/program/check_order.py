"""Checks the order of a program's steps; it runs between any two passes.

Each value is made once, before it is read, and not freed or written over by then. Every message is waited for, and the
tensors that it carries stay until then. Groups are parts of the mesh; a reduction settles partial sums over them.
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
    """A stage made a program that cannot run: a bug of ours."""


def check(program: Program) -> Program:
    """Returns the program; raises `ProgramError`, with all faults, if its steps cannot run in this order."""
    refuse(faults(program))
    return program


_CORRECT: weakref.WeakSet[Program] = weakref.WeakSet()  # programs without faults: they are frozen


def refuse(faults: Sequence[str]) -> None:
    if faults:
        raise ProgramError("\n  * ".join(["a program is wrong:", *dict.fromkeys(faults)]))


def faults(program: Program) -> list[str]:
    """Lists what is wrong with the order of a program's steps; a program without faults is checked once."""
    if program in _CORRECT:
        return []
    writers = [s for s in program.steps if isinstance(s, Compute) and s.over]
    if not (faults := list(_wrong_positions(program, writers))):
        faults = list(_OrderCheck(program, writers).faults())
    if not faults:
        _CORRECT.add(program)
    return faults


class _OrderCheck:
    """Follows the steps, and which values can be read after each."""

    def __init__(self, program: Program, writers: Sequence[Compute]) -> None:
        self.program = program
        # Per value: "" if it can be read, else why it cannot, or which step wrote over it.
        self.state: dict[Var, str | Compute] = dict.fromkeys(program.entry_values, "")
        self.flying: dict[Var, tuple[Var, ...]] = {}  # value in flight -> all results of its message
        self.carried: dict[tuple[Var, ...], tuple[Var, ...]] = {}  # results of a message -> its sources
        self.held, self.roots = Counter[Var](), Counter[Var]()  # how many messages carry a value, or its memory
        owner = self.owner = owners_in(program)
        given_up = {program.inputs[i] for i in (*program.donated, *program.replaced)}
        self.fixed = {owner.get(v, v) for v in program.entry_values} - given_up
        self.shown = {owner.get(v, v): list[Var]() for s in writers for v in s.overwritten.values()}
        self.written, self.lent = set[Var](), set[Var]()
        self.message_faults: dict[object, tuple[str, ...]] = {}  # by what equal collectives have in common

    def faults(self) -> Iterator[str]:
        program, state = self.program, self.state
        if len(state) < len(program.inputs) + len(program.captured):
            yield "an input stands twice"
        for step in program.steps:
            if isinstance(step, Free):
                yield from self._free(step)
                continue
            for v in step.operands if isinstance(step, Compute) else reads(step):
                if v not in state or state[v]:
                    yield f"{describe(step)} reads {v}, which{self._missing(v)}"
                if v.host and not (isinstance(step, Start) and step.first.kind == "to_device"):
                    yield f"{describe(step)} reads {v}, which is in the host's memory"
            if isinstance(step, Compute):
                if step.over:
                    yield from self._write_over(step)
            elif isinstance(step, Start):
                yield from self._start(step)
            elif isinstance(step, Wait):
                yield from self._wait(step)
            elif isinstance(step, Copy) and _form(step.out) != _form(step.source):
                yield f"{describe(step)} is another tensor than {step.source}"
            for out in step.out_vars if isinstance(step, Compute) else makes(step):
                if out in state:
                    yield f"{describe(step)} makes {out}, which is there"
                state[out] = ""
                if self.shown and (root := self.owner.get(out, out)) in self.shown:
                    self.shown[root].append(out)
        yield from self._end()

    def _missing(self, var: Var) -> str:
        why = self.state.get(var, " is in flight" if var in self.flying else " is not made yet")
        return f"{_OVER} {describe(why)}" if isinstance(why, Compute) else why

    def _count(self, sources: Sequence[Var], by: int) -> None:
        for v in sources:
            self.held[v] += by
            self.roots[self.owner.get(v, v)] += by

    def _free(self, step: Free) -> Iterator[str]:
        for v in step.vars:
            why = " is in flight" if self.held.get(v) else self.state.get(v, "?")
            if why and not isinstance(why, Compute):
                yield f"{v} is freed, and it{why if self.held[v] else self._missing(v)}"
        self.state |= dict.fromkeys(step.vars, " is freed")

    def _write_over(self, step: Compute) -> Iterator[str]:
        for over in step.overwritten.values():
            root = self.owner.get(over, over)
            self.written.add(root)
            if root in self.fixed or self.roots.get(root) or root in self.lent:
                yield f"{describe(step)} writes over {over}, which others hold"
            self.state.update((v, step) for v in (root, over, *self.shown[root]))
            self.shown[root].clear()  # each is reported once

    def _start(self, step: Start) -> Iterator[str]:
        if not step.moves:
            yield "a message of nothing begins"
            return
        if len(step.moves) > 1 and len({(c.kind, c.axes, c.reduce) for c in step.moves}) > 1:
            yield f"{describe(step)} begins collectives of several kinds or groups together"
        for c in step.moves:
            key = c.kind, c.axes, c.reduce, id(c.source.layout), id(c.out.layout)
            if key not in self.message_faults:
                self.message_faults[key] = tuple(message_faults(self.program.mesh, c))
            yield from (f"{c.kind} of {c.source} {fault}" for fault in self.message_faults[key])
        for v in step.outs:
            if v in self.state or v in self.flying:
                yield f"{describe(step)} brings {v}, which is there"
        self.flying |= dict.fromkeys(step.outs, step.outs)
        self.carried[step.outs] = reads(step)
        self.lent |= handed_on([step], self.owner)
        self._count(self.carried[step.outs], 1)

    def _wait(self, step: Wait) -> Iterator[str]:
        if not step.outs or any(self.flying.get(v) != step.outs for v in step.outs):
            yield f"{describe(step)} waits for what did not begin together"
        self._count(self.carried.pop(step.outs, ()), -1)
        for v in step.outs:
            self.flying.pop(v, None)

    def _end(self) -> Iterator[str]:
        program = self.program
        yield from (f"{v} is in flight, and no step waits for it" for v in self.flying)
        yield from (f"{v} is a result, and it{why}" for v in program.results if (why := self._missing(v)))
        for i, at in program.replaced.items():
            x, new = program.inputs[i], program.outputs[at]
            if x in self.written and self.owner.get(new, new) is not x:
                yield f"{x} is written over, and {new}, which replaces it, is elsewhere"


def _wrong_positions(program: Program, writers: Sequence[Compute]) -> Iterator[str]:
    """Reports positions of inputs, results and operands that do not exist."""
    inputs, outputs = range(len(program.inputs)), range(len(program.outputs))
    if not {*program.donated, *program.replaced} <= {*inputs}:
        yield "an input is given up that is none"
    if not {*program.replaced.values()} <= {*outputs} or (program.owned_outputs or 0) > len(outputs):
        yield "a result is spoken of that is none"
    for step in writers:
        n = len(step.args)
        if any(k is not None and (k >= n or not isinstance(step.args[k], Var)) for k in step.over):
            yield f"{describe(step)} writes over an operand that it has not"


def _form(v: Var) -> tuple[object, ...]:
    return v.layout, v.shape, v.dtype, v.host


def describe(step: Step | Collective) -> str:
    if isinstance(step, Collective):
        return f"{step.out} = {step.kind}"
    if isinstance(step, Compute):
        return f"{', '.join('_' if v is None else str(v) for v in step.outs)} = {step.target}"
    if isinstance(step, Copy):
        return f"{step.out} = copy"
    names = ", ".join(map(str, step.vars if isinstance(step, Free) else step.outs))
    return f"start of {names}" if isinstance(step, Start) else f"{type(step).__name__.lower()} of {names}"
