"""Unrolls the program of a folded graph: repeats the steps of one layer for every layer that was left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.layer_folding.check_uniform import LayeredProgram, OwnedStep, renamed, started
from shardlib.compiler.layer_folding.fold_graph import Folded, Layer
from shardlib.compiler.lower.lowering import Part
from shardlib.compiler.program.nested_args import rebuild
from shardlib.compiler.program.steps import Asked, Collective, Compute, Inside, Program, Start, Step, Var, Wait, reads
from shardlib.compiler.propagate import Decisions
from shardlib.core.source_lines import Line, Module
from shardlib.primitives.random.keys import COUNTER

_NUMBER = re.compile(r"_\d+$")


def unroll(
    folded: Folded, propagated: Decisions, program: Program, parts: Sequence[Part]
) -> tuple[Program, list[Part]] | None:
    """Returns the program of the whole graph, and its parts; None if the inner layers were lowered differently."""
    unroller = _Unroller(folded, propagated, program, parts)
    return unroller.unrolled() if unroller.is_steady() else None


class _Unroller(LayeredProgram):
    def __init__(self, folded: Folded, propagated: Decisions, program: Program, parts: Sequence[Part]) -> None:
        super().__init__(folded, program, parts)
        self.apart = {twin: key for key, twin in propagated.propagation.pin_twins.items()}
        self.apart |= propagated.propagation.copies
        self.draws = {op.node.args[at]: op for op in folded.graph.ops if (at := COUNTER.get(op.target)) is not None}
        self.vars: dict[tuple[Var, Layer], Var] = {}
        self.names: dict[str, int] = {}
        variables = (v for block in self.blocks for mine in block.steps for v in started(mine.step))
        self.by_name = {v.name: v for v in (*program.entry_values, *variables)}

    def unrolled(self) -> tuple[Program, list[Part]]:
        """Writes all steps in the order in which the whole graph would have been lowered."""
        whole, steps, parts = self.folded.whole, list[Step](), list[Part]()

        def write(mine: OwnedStep, own: Layer, layer: Layer) -> None:
            steps.append(self._step(mine, own, layer))
            parts.append(Part(self.folded.seen(mine.owner, own, layer), 1))

        inputs = tuple(map(self._input, whole.inputs))
        captured = tuple((self._var(v, None), x) for v, x in self.program.captured)
        for at, block in enumerate(self.blocks):
            for mine in block.steps:
                write(mine, block.layer, None)
            if at in self.pairs:
                near, _ = self.pairs[at]
                order = self.folded.left_out if near is block else reversed(self.folded.left_out)
                for layer in order:
                    for mine in near.steps:
                        write(mine, self.near, layer)
        outputs = tuple(map(self._output, range(len(whole.outputs))))
        program = replace(self.program, steps=tuple(steps), inputs=inputs, captured=captured, outputs=outputs)
        return program, parts

    def _input(self, value: Value) -> Var:
        mine, layer = self.folded.representative(value)
        return self._var(self.inputs[mine], layer)

    def _output(self, i: int) -> Any:
        mine, _ = self.folded.representative(i)
        x = self.program.outputs[mine]
        return self._translated(x, mine, i) if isinstance(x, Var) else x

    def _step(self, mine: OwnedStep, own: Layer, layer: Layer) -> Step:
        """Returns a step of the short graph's layer `own` in the whole: unchanged (None), or for a layer left out."""
        collected = self._collected(mine) if own is None else []
        step, stays = mine.step, iter(self.stays[mine.step] if layer is not None else ())
        is_repeated = layer is not None and isinstance(mine.owner, Op)
        op: Op | None = self.folded.seen(mine.owner, own, layer) if is_repeated else None

        def read(x: Var) -> Var:
            where = self.layer(x)
            if collected:
                return self._translated(x, *collected.pop(0))
            return self._in(x, where if layer is not None and next(stays) else self.folded.where(own, where, layer))

        if isinstance(step, Compute):
            args, kwargs = rebuild((step.args, step.kwargs), lambda x: read(x) if isinstance(x, Var) else x)
            if (at := COUNTER.get(step.target)) is not None:
                number = self.folded.seen(self.draws[args[at]], own, layer).node.args[at]
                args = (*args[:at], number, *args[at + 1 :])
            outs, inside, line = self._outs(mine, step, own, layer), step.inside, step.line
            if op is not None:
                inside, line = _modules(mine, op, outs), _tagged(line, op)
            note = renamed(step.note, lambda name: self._name(name, own, layer))
            return replace(step, args=args, kwargs=kwargs, outs=outs, line=line, inside=inside, note=note)
        if isinstance(step, Start):
            moves = (self._move(c, read(c.source), own, layer) for c in step.moves)
            return Start(tuple(moves if op is None else (replace(c, line=_tagged(c.line, op)) for c in moves)))
        assert isinstance(step, Wait), "nothing else is lowered"
        return Wait(tuple(self._var(v, layer) for v in step.outs))

    def _outs(self, mine: OwnedStep, step: Compute, own: Layer, layer: Layer) -> tuple[Var | None, ...]:
        """Returns the results of a call; a call without a layer may hand out results to every layer."""
        op = self.folded.original[mine.owner]
        if own is not None or not any(self.layer(v) is not None for v in step.out_vars):
            return tuple(v and self._var(v, layer) for v in step.outs)
        assert isinstance(op, Op)
        outs: list[Var | None] = []
        for value, out in zip(op.results, step.outs, strict=True):
            if value is None or self.folded.stays(value):
                outs.append(out and self._var(out, None))
            else:
                like, left_out = self.folded.representative(value)
                outs.append(self._var(next(v for v in step.out_vars if v.value is like), left_out))
        return tuple(outs)

    def _collected(self, mine: OwnedStep) -> list[tuple[Value, Value]]:
        """Pairs the operands of a step that reads from all layers, in the short graph and in the whole."""
        inner = any(self.layer(x) in (self.near, self.far) for x in reads(mine.step))
        op = self.folded.original[mine.owner] if inner else None
        if not (isinstance(op, Op) and isinstance(mine.owner, Op)):
            return []
        return [*zip(mine.owner.operands, op.operands, strict=True)]

    def _move(self, c: Collective, source: Var, own: Layer, layer: Layer) -> Collective:
        because, reason = c.because, renamed(c.reason, lambda name: self._name(name, own, layer))
        if isinstance(because, Inside):
            because = replace(because, op=self.folded.seen(because.op, own, layer))
        elif because is not None and because.by is not None:
            by = self.folded.seen(because.by, own, layer)
            reason = reason.replace(f"output {because.by}", f"output {by}") if isinstance(by, int) else reason
            because = Asked(by)
        return replace(c, source=source, out=self._var(c.out, layer), reason=reason, because=because)

    def _name(self, name: str, own: Layer, layer: Layer) -> str:
        return self.folded.seen(self.items[name], own, layer).name if name in self.items else name

    def _translated(self, x: Var, mine: Value | int, theirs: Value | int) -> Var:
        """Returns the variable that relates to `theirs`, an item of the whole, as `x` relates to `mine`."""
        where, own, place = self.layer(x), self.folded.layer(mine), self.folded.place(theirs)
        if where is None or own is None or place is None:
            return self._var(x, None)
        return self._in(x, place.layer + self.folded.kept.index(where) - self.folded.kept.index(own))

    def _in(self, x: Var, layer: Layer) -> Var:
        """Returns the variable at the place of `x` in a layer of the whole."""
        if layer is None or layer == self.layer(x):
            return self._var(x, None)
        if layer in self.folded.kept:
            return self._var(self.at[layer, self.spot[x][1]], None)
        return self._var(self.at[self.near, self.spot[x][1]], layer)

    def _var(self, x: Var, layer: Layer) -> Var:
        """Returns a variable of the whole: `x` itself (None), or its copy for a layer that is left out."""
        if (copy := self.vars.get((x, layer))) is not None:
            return copy
        own, value = self.layer(x), x.value
        if value is None:
            name = self._numbered(x.name, own, layer)
        else:
            of_twin = value in self.apart
            theirs = self.folded.seen(self.apart[value] if of_twin else value, own, layer)
            value = self.folded.twin(theirs) if of_twin else theirs
            name = value.name
        copy = self.vars[x, layer] = replace(x, name=self._free(name), value=value)
        return copy

    def _numbered(self, name: str, own: Layer, layer: Layer) -> str:
        """Returns the name of a local form's variable, after a variable, an op or a value: `x.sent_1`.

        The number stays if others of that name belong to the same layer, or to none.
        """
        base = _NUMBER.sub("", name)
        head, dot, rest = base.partition(".")
        if (x := self.by_name.get(head)) is not None:
            where = self.layer(x)
            is_one = where is None or (self.near, self.spot[x][1]) not in self.at  # for all layers
            stem = self._in(x, where if is_one else self.folded.where(own, where, layer)).name
        else:
            while head not in self.items and (shorter := _NUMBER.sub("", head)) != head:
                head = shorter
            where = self.folded.layer(self.items[head]) if head in self.items else None
            stem = self._name(head, own, layer)
        return stem + dot + rest + (name[len(base) :] if own is None or where is not None else "")

    def _free(self, base: str) -> str:
        """Returns an unused name, numbered as `Builder` does."""
        n = self.names[base] = self.names.get(base, -1) + 1
        return base if n == 0 else self._free(f"{base}_{n}")


def _modules(mine: OwnedStep, op: Op, outs: Sequence[Var | None]) -> tuple[Module, ...]:
    """Returns the modules of a repeated call: those of its op, or, for a view that its reader lowers, of the view."""
    step, owner = mine.step, mine.owner
    assert isinstance(step, Compute)
    assert isinstance(owner, Op)
    view = next((v.value.op for v in outs if v is not None and v.value is not None), None)
    source = op if view is None or step.inside == owner.node.meta.get("modules", ()) else view
    modules: tuple[Module, ...] = source.node.meta.get("modules", ())
    return modules


def _tagged(line: Line | None, op: Op) -> Line | None:
    """Returns a line with the stage and the microbatch of an op."""
    return line if line is None or op.line is None else line._replace(tag=op.line.tag)
