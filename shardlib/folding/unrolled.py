"""The program of a folded graph, written out: the steps of one layer once more for every layer that was left out.

Steps are for an op, an input or a result, and so for its layer. What the two inner layers of the short graph came to is
compared first, step by step: each has to read of its own layer and of its neighbours what the other reads of its own.
Then any layer between them is the same once more, with variables of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from shardlib.folding.folded import Folded, Layer
from shardlib.graph import Op, Value
from shardlib.lower.lowering import Part
from shardlib.program.nested import rebuild
from shardlib.program.steps import Asked, Collective, Compute, Inside, Program, Start, Step, Var, Wait
from shardlib.propagate import Propagated
from shardlib.random.draw import COUNTER

# Where reasons and notes name an op or a value: `x is [4@t], mm needs [4]`, `mm needs of x ...`, `part of mm`.
_NAMED = re.compile(r"(?:^part of |^|, (?=[\w.]+ needs )|(?<= needs of ))([A-Za-z_][\w.]*)")
_NUMBER = re.compile(r"_\d+$")


class _For(NamedTuple):
    """A step, and what it is for."""

    of: Op | Value | int
    step: Step


@dataclass(frozen=True)
class _Block:
    """Steps that follow each other, all for one layer, or all for none."""

    layer: Layer
    steps: tuple[_For, ...]


class _Spot(NamedTuple):
    """Which variable of a layer: the number of those that are made for the same part of it."""

    part: Any
    number: int


def unroll(
    folded: Folded, propagated: Propagated, program: Program, parts: Sequence[Part]
) -> tuple[Program, list[Part]] | None:
    """The program of the whole graph, and what its steps are for; None where the inner layers came out differently."""
    unroller = _Unroller(folded, propagated, program, parts)
    return unroller.written() if unroller.is_steady() else None


class _Unroller:
    def __init__(self, folded: Folded, propagated: Propagated, program: Program, parts: Sequence[Part]) -> None:
        self.folded, self.program, self.near, self.far = folded, program, folded.near, folded.far
        self.apart = {twin: key for key, twin in propagated.flood.apart.items()} | propagated.flood.copies
        self.blocks = list(_blocks(folded, program, parts))
        self.pairs = dict(_pairs(self.blocks, self.near, self.far))
        self.inputs = dict(zip(folded.graph.inputs, program.inputs, strict=True))
        self.spot: dict[Var, tuple[int, _Spot]] = {}  # the layer of a variable, and which it is there
        self.at: dict[tuple[int, _Spot], Var] = {}
        self._find_spots()
        self.stays: dict[Step, tuple[bool, ...]] = {}  # of steps of the near layer: which variables are one for all
        self.items = {x.name: x for x in folded.original if not isinstance(x, int)}
        self.draws = {op.node.args[at]: op for op in folded.graph.ops if (at := COUNTER.get(op.target)) is not None}
        self.made: dict[tuple[Var, Layer], Var] = {}
        self.names: dict[str, int] = {}
        made = (v for block in self.blocks for mine in block.steps for v in _made(mine.step))
        self.called = {v.name: v for v in (*program.given, *made)}

    def _find_spots(self) -> None:
        numbers: Counter[tuple[int, Any]] = Counter()

        def note(var: Var, layer: Layer, of: Op | Value | int) -> None:
            if layer is not None:
                part = self.folded.part(of)
                spot = _Spot(part, numbers[layer, part])
                numbers[layer, part] += 1
                self.spot[var], self.at[layer, spot] = (layer, spot), var

        for value, var in self.inputs.items():
            note(var, self.folded.layer(value), value)
        for block in self.blocks:
            for of, step in block.steps:
                for var in _made(step):
                    own = var.value if block.layer is None and self.folded.is_handed_out(var.value) else None
                    note(var, block.layer if own is None else self.folded.layer(own), of if own is None else own)

    def _layer(self, var: Var) -> Layer:
        return self.spot[var][0] if var in self.spot else None

    # Whether the inner layers are alike ------------------------------------------------------------------------------

    def is_steady(self) -> bool:
        """Whether the near layer came to the same as the far one, each time next to it."""
        inner = sum(block.layer in (self.near, self.far) for block in self.blocks)
        handed = [v for b in self.blocks if b.layer is None for mine in b.steps for v in _made(mine.step)]
        given = [v for v in (*self.program.inputs, *handed) if self._layer(v) == self.near]
        return (
            2 * len(self.pairs) == inner
            and all(self._are_alike(v, self._next(v)) for v in given)
            and all(self._match(near, far) for near, far in self.pairs.values())
            and all(self._returns_alike(i) for i in range(len(self.program.outputs)))
            and all(self._sees_all(block.layer, mine) for block in self.blocks for mine in block.steps)
        )

    def _match(self, near: _Block, far: _Block) -> bool:
        same = zip(near.steps, far.steps, strict=False)
        return len(near.steps) == len(far.steps) and all(self._same(a, b) for a, b in same)

    def _same(self, a: _For, b: _For) -> bool:
        """Whether a step of the near layer is the same as one of the far layer, seen from each."""
        mine, theirs = _reads(a.step), _reads(b.step)
        if (
            self.folded.part(a.of) != self.folded.part(b.of)
            or len(mine) != len(theirs)
            or _told(a.step) != _told(b.step)
        ):
            return False
        stays = [x is y and self._layer(x) not in (self.near, self.far) for x, y in zip(mine, theirs, strict=True)]
        self.stays[a.step] = tuple(stays)
        if _renamed(_note(a.step), self._next_name) != _note(b.step):
            return False
        moves = all(stay or self._moves(x, y) for x, y, stay in zip(mine, theirs, stays, strict=True))
        return moves and all(map(self._are_alike, _made(a.step), _made(b.step)))

    def _moves(self, x: Var, y: Var) -> bool:
        """Whether one variable is for the near layer what another is for the far one."""
        return self._layer(x) in self.folded.kept[:3] and self._next(x) is y

    def _are_alike(self, a: Var, b: Var | None) -> bool:
        """Whether two variables have the same form, and stand at the same place."""
        if b is None or self._next(a) is not b:
            return False
        return (a.layout, a.dtype, a.shape, a.placement, a.host) == (b.layout, b.dtype, b.shape, b.placement, b.host)

    def _next(self, var: Var) -> Var | None:
        """What stands in the next layer of the short graph where a variable does in its own."""
        layer, spot = self.spot.get(var, (None, None))
        if spot is None or layer not in self.folded.kept[:3]:
            return None
        return self.at.get((self.folded.kept[self.folded.kept.index(layer) + 1], spot))

    def _next_name(self, name: str) -> str:
        """What is called so in the near layer, in the far one."""
        layer = self.folded.layer(self.items[name]) if name in self.items else None
        if layer not in self.folded.kept[:3]:
            return name
        there = self.folded.in_layer(self.items[name], self.folded.kept[self.folded.kept.index(layer) + 1])
        return there.name if isinstance(there, Op | Value) else name

    def _returns_alike(self, i: int) -> bool:
        if self.folded.layer(i) != self.near:
            return True
        mine, theirs = (
            self.program.outputs[self.folded.short[self.folded.in_layer(i, x)]] for x in (self.near, self.far)
        )
        return isinstance(mine, Var) and isinstance(theirs, Var) and self._moves(mine, theirs)

    def _sees_all(self, layer: Layer, mine: _For) -> bool:
        """Whether a step of an outer layer reads of no inner one but that beside it; and one of no layer of none, or of
        all of them what its op reads, in order."""
        read, of = _reads(mine.step), mine.of
        if layer is None and any(self._layer(v) is not None for v in _made(mine.step)):
            if not (isinstance(of, Op) and isinstance(mine.step, Compute)):
                return False
            if [v and v.value for v in mine.step.outs] != [*of.results]:  # it hands out all that it makes
                return False
        inner = {self._layer(x) for x in read} & {self.near, self.far}
        if layer is not None or not inner:
            first, _, _, last = self.folded.kept
            return not (self.far in inner and layer == first) and not (self.near in inner and layer == last)
        if not (isinstance(of, Op) and isinstance(mine.step, Compute)) or [x.value for x in read] != [*of.operands]:
            return False
        found = dict(zip(of.operands, read, strict=True))
        near = [value for value in found if self.folded.layer(value) == self.near]
        there = (self.folded.short[self.folded.in_layer(value, self.far)] for value in near)
        return all(found.get(y) is self._next(found[x]) for x, y in zip(near, there, strict=True))

    # The whole program ----------------------------------------------------------------------------------------------

    def written(self) -> tuple[Program, list[Part]]:
        """All steps, in the order in which they would have been lowered."""
        whole, steps, parts = self.folded.whole, list[Step](), list[Part]()

        def write(mine: _For, of: Layer, layer: Layer) -> None:
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

    def _step(self, mine: _For, of: Layer, layer: Layer) -> Step:
        """A step for layer `of` of the short graph, in the whole: as it is there (None), or for a layer left out."""
        collected = self._collected(mine) if of is None else []
        step, stays = mine.step, iter(self.stays[mine.step] if layer is not None else ())

        def read(x: Var) -> Var:
            where = self._layer(x)
            if collected:
                return self._beside(x, *collected.pop(0))
            return self._in(x, where if layer is not None and next(stays) else self.folded.where(of, where, layer))

        if isinstance(step, Compute):
            args, kwargs = rebuild((step.args, step.kwargs), lambda x: read(x) if isinstance(x, Var) else x)
            if (at := COUNTER.get(step.target)) is not None:
                args = _at(args, at, self.folded.seen(self.draws[args[at]], of, layer).node.args[at])
            outs, inside = self._outs(mine, step, of, layer), step.inside
            if inside and layer is not None and not isinstance(mine.of, int):
                op = self.folded.seen(mine.of, of, layer)
                inside = op.node.meta.get("modules", ()) if isinstance(op, Op) else inside
            note = _renamed(step.note, lambda name: self._name(name, of, layer))
            return replace(step, args=args, kwargs=kwargs, outs=outs, inside=inside, note=note)
        if isinstance(step, Start):
            return Start(tuple(self._move(c, read(c.source), of, layer) for c in step.moves))
        assert isinstance(step, Wait), "nothing else is lowered"
        return Wait(tuple(self._var(v, layer) for v in step.outs))

    def _outs(self, mine: _For, step: Compute, of: Layer, layer: Layer) -> tuple[Var | None, ...]:
        """The results of a call; one of no layer may hand out some to each."""
        op = self.folded.original[mine.of]
        if of is not None or not any(self._layer(v) is not None for v in step.made):
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

    def _collected(self, mine: _For) -> list[tuple[Value, Value]]:
        """What a step of no layer reads of all, in the short graph and in the whole."""
        inner = any(self._layer(x) in (self.near, self.far) for x in _reads(mine.step))
        op = self.folded.original[mine.of] if inner else None
        if not (isinstance(op, Op) and isinstance(mine.of, Op)):
            return []
        return [*zip(mine.of.operands, op.operands, strict=True)]

    def _move(self, c: Collective, source: Var, of: Layer, layer: Layer) -> Collective:
        because, reason = c.because, _renamed(c.reason, lambda name: self._name(name, of, layer))
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
        where, of, place = self._layer(x), self.folded.layer(mine), self.folded.place(theirs)
        if where is None or of is None or place is None:
            return self._var(x, None)
        return self._in(x, place.layer + self.folded.kept.index(where) - self.folded.kept.index(of))

    def _in(self, x: Var, layer: Layer) -> Var:
        """What stands in a layer of the whole where `x` does in its own."""
        if layer is None or layer == self._layer(x):
            return self._var(x, None)
        if layer in self.folded.kept:
            return self._var(self.at[layer, self.spot[x][1]], None)
        return self._var(self.at[self.near, self.spot[x][1]], layer)

    def _var(self, x: Var, layer: Layer) -> Var:
        """A variable in the whole: as it is (None), or one of the near layer in a layer that is left out."""
        if (known := self.made.get((x, layer))) is not None:
            return known
        of, value = self._layer(x), x.value
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
            where = self._layer(x)
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


def _blocks(folded: Folded, program: Program, parts: Sequence[Part]) -> Iterator[_Block]:
    """The steps of a program, by layer."""
    steps = iter(program.steps)
    each = ((folded.layer(part.of), _For(part.of, next(steps))) for part in parts for _ in range(part.steps))
    for layer, some in groupby(each, key=lambda of: of[0]):
        yield _Block(layer, tuple(mine for _, mine in some))


def _pairs(blocks: Sequence[_Block], near: int, far: int) -> Iterator[tuple[int, tuple[_Block, _Block]]]:
    """Blocks of the near and the far layer, in this order, that stand side by side, by the number of the first."""
    i = 0
    while i + 1 < len(blocks):
        a, b = blocks[i : i + 2]
        if {a.layer, b.layer} == {near, far}:
            yield i, ((a, b) if a.layer == near else (b, a))
            i += 1
        i += 1


def _reads(step: Step) -> tuple[Var, ...]:
    if isinstance(step, Compute):
        return step.operands
    return step.sources if isinstance(step, Start) else ()


def _made(step: Step) -> tuple[Var, ...]:
    """What comes into being with a step, if only in flight."""
    if isinstance(step, Compute):
        return step.made
    return step.outs if isinstance(step, Start) else ()


def _at(args: tuple[Any, ...], at: int, new: Any) -> tuple[Any, ...]:
    return (*args[:at], new, *args[at + 1 :])


def _renamed(text: str, name: Callable[[str], str]) -> str:
    return _NAMED.sub(lambda m: m[0][: m.start(1) - m.start()] + name(m[1]), text) if text else ""


def _note(step: Step) -> str:
    return step.note if isinstance(step, Compute) else ""


def _told(step: Step) -> Any:
    """All that a step is told, but for its variables."""
    if isinstance(step, Compute):
        args = rebuild((step.args, step.kwargs), lambda x: Var if isinstance(x, Var) else x)
        if (at := COUNTER.get(step.target)) is not None:
            args = _at(args[0], at, None), args[1]
        outs = [v is None for v in step.outs]
        said = step.line, step.backward, step.flops, step.work, step.over, step.copies
        return step.target, args, outs, said
    if isinstance(step, Start):
        return [(c.kind, c.axes, c.params, c.bytes, c.reduce, c.line, c.backward) for c in step.moves]
    return Wait
