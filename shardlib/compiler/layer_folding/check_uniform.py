"""Compares the steps of the two inner layers of a short graph.

Relative to its own layer, each must read equal items. Then every layer between them can repeat their steps.
"""

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

# Ops and values in reasons and notes: `x is [4@t], mm needs [4]`, `mm needs of x ...`, `part of mm`.
_NAMED = re.compile(r"(?:^part of |^|, (?=[\w.]+ needs )|(?<= needs of ))([A-Za-z_][\w.]*)")


class OwnedStep(NamedTuple):
    """A step, and the op, value or result that it belongs to."""

    owner: Op | Value | int
    step: Step


@dataclass(frozen=True)
class Block:
    """Successive steps of one layer, or of none."""

    layer: Layer
    steps: tuple[OwnedStep, ...]


class Spot(NamedTuple):
    """The place of a variable in its layer: the part that it belongs to, and its rank there."""

    part: Any
    number: int


class LayeredProgram:
    """A program of a short graph, with its steps and variables by layer.

    `pairs` are adjacent blocks of the two inner layers, by the index of the first. `stays` tells for each step of the
    near layer which of its operands are shared by all layers.
    """

    def __init__(self, folded: Folded, program: Program, parts: Sequence[Part]) -> None:
        self.folded, self.program, self.near, self.far = folded, program, folded.near, folded.far
        self.blocks = list(_blocks(folded, program, parts))
        self.pairs = dict(_pairs(self.blocks, self.near, self.far))
        self.inputs = dict(zip(folded.graph.inputs, program.inputs, strict=True))
        self.spot: dict[Var, tuple[int, Spot]] = {}  # the layer of a variable, and its place there
        self.at: dict[tuple[int, Spot], Var] = {}
        self._find_spots()
        self.stays: dict[Step, tuple[bool, ...]] = {}
        self.items = {x.name: x for x in folded.original if not isinstance(x, int)}

    def _find_spots(self) -> None:
        numbers: Counter[tuple[int, Any]] = Counter()

        def note(var: Var, layer: Layer, owner: Op | Value | int) -> None:
            if layer is not None:
                part = self.folded.part(owner)
                spot = Spot(part, numbers[layer, part])
                numbers[layer, part] += 1
                self.spot[var], self.at[layer, spot] = (layer, spot), var

        for value, var in self.inputs.items():
            note(var, self.folded.layer(value), value)
        for block in self.blocks:
            for owner, step in block.steps:
                for var in started(step):
                    own = var.value if block.layer is None and self.folded.is_handed_out(var.value) else None
                    note(var, block.layer if own is None else self.folded.layer(own), owner if own is None else own)

    def layer(self, var: Var) -> Layer:
        return self.spot[var][0] if var in self.spot else None

    # Comparing the inner layers --------------------------------------------------------------------------------------

    def is_steady(self) -> bool:
        """True if the near layer has the same steps as the far one, in adjacent blocks."""
        inner = sum(block.layer in (self.near, self.far) for block in self.blocks)
        handed = [v for b in self.blocks if b.layer is None for mine in b.steps for v in started(mine.step)]
        external = [v for v in (*self.program.inputs, *handed) if self.layer(v) == self.near]
        return (
            2 * len(self.pairs) == inner
            and all(self._are_alike(v, self.following(v)) for v in external)
            and all(self._is_equal_block(near, far) for near, far in self.pairs.values())
            and all(self._returns_alike(i) for i in range(len(self.program.outputs)))
            and all(self._reads_neighbors(block.layer, mine) for block in self.blocks for mine in block.steps)
        )

    def _is_equal_block(self, near: Block, far: Block) -> bool:
        same = zip(near.steps, far.steps, strict=False)
        return len(near.steps) == len(far.steps) and all(self._is_equal_step(a, b) for a, b in same)

    def _is_equal_step(self, a: OwnedStep, b: OwnedStep) -> bool:
        """True if a step of the near layer equals one of the far layer, relative to their layers."""
        mine, theirs = reads(a.step), reads(b.step)
        if (
            self.folded.part(a.owner) != self.folded.part(b.owner)
            or len(mine) != len(theirs)
            or _constants(a.step) != _constants(b.step)
        ):
            return False
        stays = [x is y and self.layer(x) not in (self.near, self.far) for x, y in zip(mine, theirs, strict=True)]
        self.stays[a.step] = tuple(stays)
        if renamed(_note(a.step), self._next_name) != _note(b.step):
            return False
        moves = all(stay or self._moves(x, y) for x, y, stay in zip(mine, theirs, stays, strict=True))
        return moves and all(map(self._are_alike, started(a.step), started(b.step)))

    def _moves(self, x: Var, y: Var) -> bool:
        """True if one variable is to the near layer what another is to the far one."""
        return self.layer(x) in self.folded.kept[:3] and self.following(x) is y

    def _are_alike(self, a: Var, b: Var | None) -> bool:
        """True if two variables have the same form, and the same place in successive layers."""
        if b is None or self.following(a) is not b:
            return False
        return (a.layout, a.dtype, a.shape, a.placement, a.host) == (b.layout, b.dtype, b.shape, b.placement, b.host)

    def following(self, var: Var) -> Var | None:
        """Returns the variable at the same place in the next layer of the short graph."""
        layer, spot = self.spot.get(var, (None, None))
        if spot is None or layer not in self.folded.kept[:3]:
            return None
        return self.at.get((self.folded.kept[self.folded.kept.index(layer) + 1], spot))

    def _next_name(self, name: str) -> str:
        """Returns the name of the same item in the next layer of the short graph."""
        kept, layer = self.folded.kept, self.folded.layer(self.items[name]) if name in self.items else None
        if layer not in kept[:3]:
            return name
        item = self.folded.in_layer(self.items[name], kept[kept.index(layer) + 1])
        return item.name if isinstance(item, Op | Value) else name

    def _returns_alike(self, i: int) -> bool:
        if self.folded.layer(i) != self.near:
            return True
        mine, theirs = (
            self.program.outputs[self.folded.short[self.folded.in_layer(i, x)]] for x in (self.near, self.far)
        )
        return isinstance(mine, Var) and isinstance(theirs, Var) and self._moves(mine, theirs)

    def _reads_neighbors(self, layer: Layer, mine: OwnedStep) -> bool:
        """True if a step of an outer layer reads of no inner layer but its neighbor.

        A step without a layer must read of no inner layer, or exactly its op's operands, of all layers.
        """
        read, op = reads(mine.step), mine.owner
        if layer is None and any(self.layer(v) is not None for v in started(mine.step)):
            if not (isinstance(op, Op) and isinstance(mine.step, Compute)):
                return False
            if [v and v.value for v in mine.step.outs] != [*op.results]:  # it hands out all its results
                return False
        inner = {self.layer(x) for x in read} & {self.near, self.far}
        if layer is not None or not inner:
            first, _, _, last = self.folded.kept
            return not (self.far in inner and layer == first) and not (self.near in inner and layer == last)
        if not (isinstance(op, Op) and isinstance(mine.step, Compute)) or [x.value for x in read] != [*op.operands]:
            return False
        var = dict(zip(op.operands, read, strict=True))
        near = [value for value in var if self.folded.layer(value) == self.near]
        far = (self.folded.short[self.folded.in_layer(value, self.far)] for value in near)
        return all(var.get(y) is self.following(var[x]) for x, y in zip(near, far, strict=True))


def _blocks(folded: Folded, program: Program, parts: Sequence[Part]) -> Iterator[Block]:
    """Groups the steps of a program by layer."""
    steps = iter(program.steps)
    by_layer = (
        (folded.layer(part.reader), OwnedStep(part.reader, next(steps))) for part in parts for _ in range(part.steps)
    )
    for layer, group in groupby(by_layer, key=lambda pair: pair[0]):
        yield Block(layer, tuple(mine for _, mine in group))


def _pairs(blocks: Sequence[Block], near: int, far: int) -> Iterator[tuple[int, tuple[Block, Block]]]:
    """Yields adjacent blocks of the near and the far layer, in this order, by the index of the first."""
    i = 0
    while i + 1 < len(blocks):
        a, b = blocks[i : i + 2]
        if {a.layer, b.layer} == {near, far}:
            yield i, ((a, b) if a.layer == near else (b, a))
            i += 1
        i += 1


def started(step: Step) -> tuple[Var, ...]:
    """Returns the variables that a step makes, or sends on their way."""
    if isinstance(step, Compute):
        return step.out_vars
    return step.outs if isinstance(step, Start) else ()


def renamed(text: str, name: Callable[[str], str]) -> str:
    return _NAMED.sub(lambda m: m[0][: m.start(1) - m.start()] + name(m[1]), text) if text else ""


def _note(step: Step) -> str:
    return step.note if isinstance(step, Compute) else ""


def _constants(step: Step) -> Any:
    """Returns everything about a step but its variables."""
    if isinstance(step, Compute):
        args = rebuild((step.args, step.kwargs), lambda x: Var if isinstance(x, Var) else x)
        if (at := COUNTER.get(step.target)) is not None:
            args = (*args[0][:at], None, *args[0][at + 1 :]), args[1]
        outs = [v is None for v in step.outs]
        line = step.line and step.line.untagged
        return step.target, args, outs, line, step.backward, step.flops, step.work, step.over, step.copies
    if isinstance(step, Start):
        lines = [c.line and c.line.untagged for c in step.moves]
        return lines, [(c.kind, c.axes, c.params, c.bytes, c.reduce, c.backward) for c in step.moves]
    return Wait
