"""What the two inner layers of a short graph came to, compared step by step: each has to read of its own layer and of
its neighbors what the other reads of its own. Then any layer between them is the same once more."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.layer_folding.fold_graph import Folded, Layer
from shardlib.compiler.lower.lowering import Part
from shardlib.compiler.program.nested_args import rebuild
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, reads
from shardlib.primitives.random.keys import COUNTER

# Where reasons and notes name an op or a value: `x is [4@t], mm needs [4]`, `mm needs of x ...`, `part of mm`.
_NAMED = re.compile(r"(?:^part of |^|, (?=[\w.]+ needs )|(?<= needs of ))([A-Za-z_][\w.]*)")


class For(NamedTuple):
    """A step, and what it is for."""

    of: Op | Value | int
    step: Step


@dataclass(frozen=True)
class Block:
    """Steps that follow each other, all for one layer, or all for none."""

    layer: Layer
    steps: tuple[For, ...]


class Spot(NamedTuple):
    """Which variable of a layer: the number of those that are made for the same part of it."""

    part: Any
    number: int


class Compared:
    """A program of a short graph, its steps by layer, and the variables of every layer.

    `pairs` are the blocks of the two inner layers that stand side by side, by the number of the first; `stays` says, of
    each step of the near one, which variables it reads that are one for all layers.
    """

    def __init__(self, folded: Folded, program: Program, parts: Sequence[Part]) -> None:
        self.folded, self.program, self.near, self.far = folded, program, folded.near, folded.far
        self.blocks = list(_blocks(folded, program, parts))
        self.pairs = dict(_pairs(self.blocks, self.near, self.far))
        self.inputs = dict(zip(folded.graph.inputs, program.inputs, strict=True))
        self.spot: dict[Var, tuple[int, Spot]] = {}  # the layer of a variable, and which it is there
        self.at: dict[tuple[int, Spot], Var] = {}
        self._find_spots()
        self.stays: dict[Step, tuple[bool, ...]] = {}
        self.items = {x.name: x for x in folded.original if not isinstance(x, int)}

    def _find_spots(self) -> None:
        numbers: Counter[tuple[int, Any]] = Counter()

        def note(var: Var, layer: Layer, of: Op | Value | int) -> None:
            if layer is not None:
                part = self.folded.part(of)
                spot = Spot(part, numbers[layer, part])
                numbers[layer, part] += 1
                self.spot[var], self.at[layer, spot] = (layer, spot), var

        for value, var in self.inputs.items():
            note(var, self.folded.layer(value), value)
        for block in self.blocks:
            for of, step in block.steps:
                for var in made_by(step):
                    own = var.value if block.layer is None and self.folded.is_handed_out(var.value) else None
                    note(var, block.layer if own is None else self.folded.layer(own), of if own is None else own)

    def layer(self, var: Var) -> Layer:
        return self.spot[var][0] if var in self.spot else None

    # Whether the inner layers are alike ------------------------------------------------------------------------------

    def is_steady(self) -> bool:
        """Whether the near layer came to the same as the far one, each time next to it."""
        inner = sum(block.layer in (self.near, self.far) for block in self.blocks)
        handed = [v for b in self.blocks if b.layer is None for mine in b.steps for v in made_by(mine.step)]
        given = [v for v in (*self.program.inputs, *handed) if self.layer(v) == self.near]
        return (
            2 * len(self.pairs) == inner
            and all(self._are_alike(v, self.following(v)) for v in given)
            and all(self._match(near, far) for near, far in self.pairs.values())
            and all(self._returns_alike(i) for i in range(len(self.program.outputs)))
            and all(self._sees_all(block.layer, mine) for block in self.blocks for mine in block.steps)
        )

    def _match(self, near: Block, far: Block) -> bool:
        same = zip(near.steps, far.steps, strict=False)
        return len(near.steps) == len(far.steps) and all(self._same(a, b) for a, b in same)

    def _same(self, a: For, b: For) -> bool:
        """Whether a step of the near layer is the same as one of the far layer, seen from each."""
        mine, theirs = reads(a.step), reads(b.step)
        if (
            self.folded.part(a.of) != self.folded.part(b.of)
            or len(mine) != len(theirs)
            or _told(a.step) != _told(b.step)
        ):
            return False
        stays = [x is y and self.layer(x) not in (self.near, self.far) for x, y in zip(mine, theirs, strict=True)]
        self.stays[a.step] = tuple(stays)
        if renamed(_note(a.step), self._next_name) != _note(b.step):
            return False
        moves = all(stay or self._moves(x, y) for x, y, stay in zip(mine, theirs, stays, strict=True))
        return moves and all(map(self._are_alike, made_by(a.step), made_by(b.step)))

    def _moves(self, x: Var, y: Var) -> bool:
        """Whether one variable is for the near layer what another is for the far one."""
        return self.layer(x) in self.folded.kept[:3] and self.following(x) is y

    def _are_alike(self, a: Var, b: Var | None) -> bool:
        """Whether two variables have the same form, and stand at the same place."""
        if b is None or self.following(a) is not b:
            return False
        return (a.layout, a.dtype, a.shape, a.placement, a.host) == (b.layout, b.dtype, b.shape, b.placement, b.host)

    def following(self, var: Var) -> Var | None:
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

    def _sees_all(self, layer: Layer, mine: For) -> bool:
        """Whether a step of an outer layer reads of no inner one but that beside it; and one of no layer of none, or of
        all of them what its op reads, in order."""
        read, of = reads(mine.step), mine.of
        if layer is None and any(self.layer(v) is not None for v in made_by(mine.step)):
            if not (isinstance(of, Op) and isinstance(mine.step, Compute)):
                return False
            if [v and v.value for v in mine.step.outs] != [*of.results]:  # it hands out all that it makes
                return False
        inner = {self.layer(x) for x in read} & {self.near, self.far}
        if layer is not None or not inner:
            first, _, _, last = self.folded.kept
            return not (self.far in inner and layer == first) and not (self.near in inner and layer == last)
        if not (isinstance(of, Op) and isinstance(mine.step, Compute)) or [x.value for x in read] != [*of.operands]:
            return False
        found = dict(zip(of.operands, read, strict=True))
        near = [value for value in found if self.folded.layer(value) == self.near]
        there = (self.folded.short[self.folded.in_layer(value, self.far)] for value in near)
        return all(found.get(y) is self.following(found[x]) for x, y in zip(near, there, strict=True))


def _blocks(folded: Folded, program: Program, parts: Sequence[Part]) -> Iterator[Block]:
    """The steps of a program, by layer."""
    steps = iter(program.steps)
    each = ((folded.layer(part.of), For(part.of, next(steps))) for part in parts for _ in range(part.steps))
    for layer, some in groupby(each, key=lambda of: of[0]):
        yield Block(layer, tuple(mine for _, mine in some))


def _pairs(blocks: Sequence[Block], near: int, far: int) -> Iterator[tuple[int, tuple[Block, Block]]]:
    """Blocks of the near and the far layer, in this order, that stand side by side, by the number of the first."""
    i = 0
    while i + 1 < len(blocks):
        a, b = blocks[i : i + 2]
        if {a.layer, b.layer} == {near, far}:
            yield i, ((a, b) if a.layer == near else (b, a))
            i += 1
        i += 1


def made_by(step: Step) -> tuple[Var, ...]:
    """What comes into being with a step, if only in flight."""
    if isinstance(step, Compute):
        return step.made
    return step.outs if isinstance(step, Start) else ()


def renamed(text: str, name: Callable[[str], str]) -> str:
    return _NAMED.sub(lambda m: m[0][: m.start(1) - m.start()] + name(m[1]), text) if text else ""


def _note(step: Step) -> str:
    return step.note if isinstance(step, Compute) else ""


def _told(step: Step) -> Any:
    """All that a step is told, but for its variables."""
    if isinstance(step, Compute):
        args = rebuild((step.args, step.kwargs), lambda x: Var if isinstance(x, Var) else x)
        if (at := COUNTER.get(step.target)) is not None:
            args = (*args[0][:at], None, *args[0][at + 1 :]), args[1]
        outs = [v is None for v in step.outs]
        said = step.line, step.backward, step.flops, step.work, step.over, step.copies
        return step.target, args, outs, said
    if isinstance(step, Start):
        return [(c.kind, c.axes, c.params, c.bytes, c.reduce, c.line, c.backward) for c in step.moves]
    return Wait
