"""A graph with fewer layers, which stands for one with many: all in the middle are alike, and one is there for them.

Of the layers that are alike the outer two stay at each end, so that the inner ones of these have a neighbor on both
sides that is as any other. What is between is left out, and what it read or made is read and made by who is next to it.
One layer then counts for all that are left out (`times`): decisions cost what they cost in the whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardlib.compiler.graph.ir import Graph, Op, Owns, Rows, Value
from shardlib.compiler.layer_folding.find_layers import Item, Layers, Place, layers
from shardlib.sharding.placement import FixedLayout

WORTH = 400  # ops that are left out, or it is not worth it
Layer = int | None  # None: of no layer, or as it is in the short graph


@dataclass
class Folded:
    """`graph` is the short one, of `whole`; `original` says what its ops, values and results (by position) are there.

    `near` is the layer that counts for those left out, `far` the one behind them.
    """

    whole: Graph
    layers: Layers
    graph: Graph = field(init=False)
    original: dict[Item, Item] = field(default_factory=dict)
    short: dict[Item, Any] = field(default_factory=dict)  # the other way round
    twins: dict[Value, Item] = field(default_factory=dict)  # what stands apart in the whole: what of

    def __post_init__(self) -> None:
        whole = self.whole
        inputs = [self._value(v, None) for v in whole.inputs if self.stays(v)]
        captured = [(self._value(v, None), x) for v, x in whole.captured]
        self.graph = Graph([self._op(op) for op in whole.ops if self.stays(op)], inputs, captured, [])
        for i, value in enumerate(whole.outputs):
            if self.stays(i):
                self.original[len(self.graph.outputs)], self.short[i] = i, len(self.graph.outputs)
                self.graph.outputs.append(self._value(value, None) if isinstance(value, Value) else value)
        for mine in [v for v in self.original if isinstance(v, Value)]:
            theirs = self.original[mine]
            assert isinstance(theirs, Value)
            mine.like = theirs.like and self._value(theirs.like, mine)
            if theirs.rows is not None:
                mine.rows = Rows(self._value(theirs.rows.ends, mine), theirs.rows.dim)

    @property
    def near(self) -> int:
        return self.layers.first + 1

    @property
    def far(self) -> int:
        return self.layers.last - 2

    @property
    def kept(self) -> tuple[int, int, int, int]:
        """The layers of the short graph, as they follow each other."""
        return self.near - 1, self.near, self.far, self.far + 1

    @property
    def left_out(self) -> range:
        return range(self.near + 1, self.far)

    def layer(self, item: Item) -> Layer:
        """The layer of something of the short graph."""
        place = self.place(self.original[item])
        return place and place.layer

    def place(self, item: Item) -> Place | None:
        """Where something of the whole is."""
        return self.layers.place(item) if isinstance(item, Value) else self.layers.places.get(item)

    def part(self, item: Item) -> Hashable:
        """Which part of its layer something of the short graph is."""
        theirs = self.original[item]
        place = self.place(theirs)
        assert place is not None
        return place.part, theirs.index if isinstance(theirs, Value) and theirs not in self.layers.places else 0

    def in_layer(self, item: Item, layer: int) -> Item:
        """What stands in another layer of the whole where something of the short graph does in its own."""
        theirs = self.original[item]
        if isinstance(theirs, Value):
            return self.layers.value(theirs, layer)
        return self.layers.items[self.layers.places[theirs]._replace(layer=layer)]

    def where(self, of: Layer, theirs: Layer, layer: Layer) -> Layer:
        """The layer, in the whole, of what layer `of` of the short graph has of `theirs`, if `of` is `layer` there."""
        if layer is None:
            between: dict[tuple[Layer, Layer], Layer] = {(self.near, self.far): self.near + 1}
            between[self.far, self.near] = self.far - 1
            return between.get((of, theirs), theirs)
        return layer + self.kept.index(theirs) - 1 if theirs in self.kept[:3] else theirs

    def seen(self, x: Any, of: Layer, layer: Layer) -> Any:
        """What layer `of` of the short graph sees as `x`, in the whole: as it is there (None), or seen from `layer`."""
        theirs = self.layer(x)
        to = self.where(of, theirs, layer)
        return self.original[x] if to == theirs or to is None else self.in_layer(x, to)

    def twin(self, of: Item) -> Value:
        """A value of the whole in other factors: what stands apart for an input, a constraint, a door or a result."""
        value = self.whole.outputs[of] if isinstance(of, int) else of.operands[0] if isinstance(of, Op) else of
        found = Value(value.name, value.shape, value.dtype, None)
        self.twins[found] = of
        return found

    def stands_for(self, item: Item) -> tuple[Any, Layer]:
        """What of the short graph is something of the whole, or stands for it, then with its layer."""
        if self.stays(item):
            return self.short[item], None
        place = self.place(item)
        assert place is not None
        if isinstance(item, Value):
            return self.short[self.layers.value(item, self.near)], place.layer
        return self.short[self.layers.items[place._replace(layer=self.near)]], place.layer

    def is_handed_out(self, value: Value | None) -> bool:
        """Whether an op of no layer makes a value of the short graph for one of them."""
        theirs = None if value is None else self.original.get(value)
        return isinstance(theirs, Value) and theirs.op is not None and theirs in self.layers.places

    def standing(self, value: Value) -> Value:
        """What is a value of the whole in the short graph, or stands for it."""
        if value.op is None or value in self.layers.places:
            found = self.stands_for(value)[0]
        else:
            found = self.stands_for(value.op)[0].results[value.index]
        assert isinstance(found, Value)
        return found

    def stays(self, item: Item) -> bool:
        """Whether something of the whole graph is in the short one."""
        place = self.place(item)
        return place is None or place.layer not in self.left_out

    def of(self, said: Mapping[Any, FixedLayout]) -> dict[Any, FixedLayout]:
        """What is fixed of the whole, of what is left of it."""
        return {mine: said[theirs] for mine, theirs in self.original.items() if theirs in said}

    def _times(self, item: Item) -> int:
        place, many = self.place(item), 1 if isinstance(item, int) else item.times
        return many * (1 + len(self.left_out)) if place is not None and place.layer == self.near else many

    def _value(self, value: Value, reader: Op | Value | None) -> Value:
        """What stands for a value of the whole: where it is left out, for its reader, that of the next layer."""
        place = self.layers.place(value)
        if place is not None and place.layer in self.left_out:
            is_next = reader is not None and self.layer(reader) == self.near
            value = self.layers.value(value, self.far if is_next else self.near)
        if value not in self.short:
            assert value.op is None, f"{value} is made before it is read"
            made = self.short[value] = Value(
                value.name, value.shape, value.dtype, None, constant=value.constant, manual=value.manual,
                is_output=value.is_output, again=value.again, times=self._times(value),
            )  # fmt: skip
            self.original[made] = value
        found = self.short[value]
        assert isinstance(found, Value)
        return found

    def _op(self, op: Op) -> Op:
        made = Op(op.name, op.call, op.rule, (), (), op.node, op.line, op.backward, times=self._times(op))
        made.ordered = op.ordered
        self.short[op], self.original[made] = made, op
        made.operands = tuple(self._value(v, made) for v in op.operands)
        for i, v in enumerate(made.operands):
            if self.layer(made) is not None or self.stays(op.operands[i]):  # what is collected of all is read once
                v.readers.append((made, i))
        if op.owns is not None:
            made.owns = Owns(op.owns.factor, self._value(op.owns.ends, made), op.owns.reads, op.owns.begins)
        made.results = tuple(
            r and (Value(
                r.name, r.shape, r.dtype, made, r.index, r.constant, r.manual,
                is_output=r.is_output, again=r.again, counted=r.counted, times=self._times(r),
            ) if self.stays(r) else None)
            for r in op.results
        )  # fmt: skip
        for mine, theirs in zip(made.results, op.results, strict=True):
            if mine is not None and theirs is not None:
                self.short[theirs], self.original[mine] = mine, theirs
        return made


def fold(
    graph: Graph,
    fixed: Mapping[Value, FixedLayout],
    outputs: Mapping[int, FixedLayout],
    doors: Mapping[Op, FixedLayout],
) -> Folded | None:
    """A short graph for one that repeats itself; None where it would hardly be shorter."""
    if len(graph.ops) < WORTH or (found := layers(graph, fixed, outputs, doors)) is None:
        return None
    left_out = range(found.first + 2, found.last - 2)
    fewer = sum(isinstance(x, Op) and place.layer in left_out for x, place in found.places.items())
    return Folded(graph, found) if fewer >= WORTH else None
