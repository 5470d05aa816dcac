"""The program of a folded graph, written out: the steps of one layer once more for every layer that was left out, with
variables of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.layer_folding.check_uniform import Compared, For, made_by, renamed
from shardlib.compiler.layer_folding.fold_graph import Folded, Layer
from shardlib.compiler.lower.lowering import Part
from shardlib.compiler.program.nested_args import rebuild
from shardlib.compiler.program.steps import Asked, Collective, Compute, Inside, Program, Start, Step, Var, Wait, reads
from shardlib.compiler.propagate import Propagated
from shardlib.primitives.random.keys import COUNTER

_NUMBER = re.compile(r"_\d+$")


def unroll(
    folded: Folded, propagated: Propagated, program: Program, parts: Sequence[Part]
) -> tuple[Program, list[Part]] | None:
    """The program of the whole graph, and what its steps are for; None where the inner layers came out differently."""
    unroller = _Unroller(folded, propagated, program, parts)
    return unroller.written() if unroller.is_steady() else None


class _Unroller(Compared):
    def __init__(self, folded: Folded, propagated: Propagated, program: Program, parts: Sequence[Part]) -> None:
        super().__init__(folded, program, parts)
        self.apart = {twin: key for key, twin in propagated.flood.apart.items()} | propagated.flood.copies
        self.draws = {op.node.args[at]: op for op in folded.graph.ops if (at := COUNTER.get(op.target)) is not None}
        self.made: dict[tuple[Var, Layer], Var] = {}
        self.names: dict[str, int] = {}
        made = (v for block in self.blocks for mine in block.steps for v in made_by(mine.step))
        self.called = {v.name: v for v in (*program.given, *made)}

    def written(self) -> tuple[Program, list[Part]]:
        """All steps, in the order in which they would have been lowered."""
        whole, steps, parts = self.folded.whole, list[Step](), list[Part]()

        def write(mine: For, of: Layer, layer: Layer) -> None:
            steps.append(self._step(mine, of, layer))
            parts.append(Part(self.folded.seen(mine.of, of, layer), 1))

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
        mine, layer = self.folded.stands_for(value)
        return self._var(self.inputs[mine], layer)

    def _output(self, i: int) -> Any:
        mine, _ = self.folded.stands_for(i)
        x = self.program.outputs[mine]
        return self._beside(x, mine, i) if isinstance(x, Var) else x

    def _step(self, mine: For, of: Layer, layer: Layer) -> Step:
        """A step for layer `of` of the short graph, in the whole: as it is there (None), or for a layer left out."""
        collected = self._collected(mine) if of is None else []
        step, stays = mine.step, iter(self.stays[mine.step] if layer is not None else ())

        def read(x: Var) -> Var:
            where = self.layer(x)
            if collected:
                return self._beside(x, *collected.pop(0))
            return self._in(x, where if layer is not None and next(stays) else self.folded.where(of, where, layer))

        if isinstance(step, Compute):
            args, kwargs = rebuild((step.args, step.kwargs), lambda x: read(x) if isinstance(x, Var) else x)
            if (at := COUNTER.get(step.target)) is not None:
                number = self.folded.seen(self.draws[args[at]], of, layer).node.args[at]
                args = (*args[:at], number, *args[at + 1 :])
            outs, inside = self._outs(mine, step, of, layer), step.inside
            if inside and layer is not None and not isinstance(mine.of, int):
                op = self.folded.seen(mine.of, of, layer)
                inside = op.node.meta.get("modules", ()) if isinstance(op, Op) else inside
            note = renamed(step.note, lambda name: self._name(name, of, layer))
            return replace(step, args=args, kwargs=kwargs, outs=outs, inside=inside, note=note)
        if isinstance(step, Start):
            return Start(tuple(self._move(c, read(c.source), of, layer) for c in step.moves))
        assert isinstance(step, Wait), "nothing else is lowered"
        return Wait(tuple(self._var(v, layer) for v in step.outs))

    def _outs(self, mine: For, step: Compute, of: Layer, layer: Layer) -> tuple[Var | None, ...]:
        """The results of a call; one of no layer may hand out some to each."""
        op = self.folded.original[mine.of]
        if of is not None or not any(self.layer(v) is not None for v in step.made):
            return tuple(v and self._var(v, layer) for v in step.outs)
        assert isinstance(op, Op)
        outs: list[Var | None] = []
        for value, out in zip(op.results, step.outs, strict=True):
            if value is None or self.folded.stays(value):
                outs.append(out and self._var(out, None))
            else:
                like, there = self.folded.stands_for(value)
                outs.append(self._var(next(v for v in step.made if v.value is like), there))
        return tuple(outs)

    def _collected(self, mine: For) -> list[tuple[Value, Value]]:
        """What a step of no layer reads of all, in the short graph and in the whole."""
        inner = any(self.layer(x) in (self.near, self.far) for x in reads(mine.step))
        op = self.folded.original[mine.of] if inner else None
        if not (isinstance(op, Op) and isinstance(mine.of, Op)):
            return []
        return [*zip(mine.of.operands, op.operands, strict=True)]

    def _move(self, c: Collective, source: Var, of: Layer, layer: Layer) -> Collective:
        because, reason = c.because, renamed(c.reason, lambda name: self._name(name, of, layer))
        if isinstance(because, Inside):
            because = replace(because, op=self.folded.seen(because.op, of, layer))
        elif because is not None and because.by is not None:
            by = self.folded.seen(because.by, of, layer)
            reason = reason.replace(f"output {because.by}", f"output {by}") if isinstance(by, int) else reason
            because = Asked(by)
        return replace(c, source=source, out=self._var(c.out, layer), reason=reason, because=because)

    def _name(self, name: str, of: Layer, layer: Layer) -> str:
        return self.folded.seen(self.items[name], of, layer).name if name in self.items else name

    def _beside(self, x: Var, mine: Value | int, theirs: Value | int) -> Var:
        """What is to something of the whole as a variable is to what stands for that, both of layers, maybe two."""
        where, of, place = self.layer(x), self.folded.layer(mine), self.folded.place(theirs)
        if where is None or of is None or place is None:
            return self._var(x, None)
        return self._in(x, place.layer + self.folded.kept.index(where) - self.folded.kept.index(of))

    def _in(self, x: Var, layer: Layer) -> Var:
        """What stands in a layer of the whole where `x` does in its own."""
        if layer is None or layer == self.layer(x):
            return self._var(x, None)
        if layer in self.folded.kept:
            return self._var(self.at[layer, self.spot[x][1]], None)
        return self._var(self.at[self.near, self.spot[x][1]], layer)

    def _var(self, x: Var, layer: Layer) -> Var:
        """A variable in the whole: as it is (None), or one of the near layer in a layer that is left out."""
        if (known := self.made.get((x, layer))) is not None:
            return known
        of, value = self.layer(x), x.value
        if value is None:
            name = self._numbered(x.name, of, layer)
        else:
            of_twin = value in self.apart
            theirs = self.folded.seen(self.apart[value] if of_twin else value, of, layer)
            value = self.folded.twin(theirs) if of_twin else theirs
            name = value.name
        made = self.made[x, layer] = replace(x, name=self._free(name), value=value)
        return made

    def _numbered(self, name: str, of: Layer, layer: Layer) -> str:
        """The name of what a local form made, after a variable, an op or a value: `x.sent_1`. Its number stays where
        others of that name are of the same layer, or of none."""
        base = _NUMBER.sub("", name)
        head, dot, rest = base.partition(".")
        if (x := self.called.get(head)) is not None:
            where = self.layer(x)
            is_one = where is None or (self.near, self.spot[x][1]) not in self.at  # for all layers
            found = self._in(x, where if is_one else self.folded.where(of, where, layer)).name
        else:
            while head not in self.items and (shorter := _NUMBER.sub("", head)) != head:
                head = shorter
            where = self.folded.layer(self.items[head]) if head in self.items else None
            found = self._name(head, of, layer)
        return found + dot + rest + (name[len(base) :] if of is None or where is not None else "")

    def _free(self, base: str) -> str:
        """A name that no variable has, as `Builder` gives them."""
        n = self.names[base] = self.names.get(base, -1) + 1
        return base if n == 0 else self._free(f"{base}_{n}")
