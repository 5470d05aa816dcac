"""Folds a graph: a short graph with four equal layers represents a whole graph with many.

The outer two layers stay at each end, so that the inner ones have ordinary neighbors on both sides. The layers between
them are left out; the two inner layers read each other's values in their place. The near one of these counts for all
that are left out (`times`), so decisions cost what they cost in the whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardlib.compiler.graph.ir import Graph, Op, Owns, Rows, Value
from shardlib.compiler.layer_folding.find_layers import Item, Layers, Place, find_layers
from shardlib.compiler.propagate.pins import Pins
from shardlib.sharding.placement import FixedLayout

WORTH = 400  # ops that are left out, or it is not worth it
Layer = int | None  # None: no layer, or the item's own layer in the short graph


@dataclass
class Folded:
    """The short `graph` of `whole`; `original` maps its ops, values and results (by position) to those of the whole.

    `near` is the layer that represents those left out, `far` the one behind them.
    """

    whole: Graph
    layers: Layers
    graph: Graph = field(init=False)
    original: dict[Item, Item] = field(default_factory=dict)
    short: dict[Item, Any] = field(default_factory=dict)  # the inverse of `original`
    twins: dict[Value, Item] = field(default_factory=dict)  # values in other factors -> their items in the whole

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
        """The four layers of the short graph, in order."""
        return self.near - 1, self.near, self.far, self.far + 1

    @property
    def left_out(self) -> range:
        return range(self.near + 1, self.far)

    def layer(self, item: Item) -> Layer:
        """Returns the layer of an item of the short graph."""
        place = self.place(self.original[item])
        return place and place.layer

    def place(self, item: Item) -> Place | None:
        """Returns the place of an item of the whole."""
        return self.layers.place(item) if isinstance(item, Value) else self.layers.places.get(item)

    def part(self, item: Item) -> Hashable:
        """Returns the part of its layer that an item of the short graph is."""
        theirs = self.original[item]
        place = self.place(theirs)
        assert place is not None
        return place.part, theirs.index if isinstance(theirs, Value) and theirs not in self.layers.places else 0

    def in_layer(self, item: Item, layer: int) -> Item:
        """Returns the item of the whole at the same place of another layer as an item of the short graph."""
        theirs = self.original[item]
        if isinstance(theirs, Value):
            return self.layers.value(theirs, layer)
        return self.layers.items[self.layers.places[theirs]._replace(layer=layer)]

    def where(self, own: Layer, theirs: Layer, layer: Layer) -> Layer:
        """Returns the whole's layer of an item that layer `own` reads from layer `theirs`, if `own` becomes `layer`."""
        if layer is None:
            between: dict[tuple[Layer, Layer], Layer] = {(self.near, self.far): self.near + 1}
            between[self.far, self.near] = self.far - 1
            return between.get((own, theirs), theirs)
        return layer + self.kept.index(theirs) - 1 if theirs in self.kept[:3] else theirs

    def seen(self, x: Any, own: Layer, layer: Layer) -> Any:
        """Returns the item of the whole that layer `own` of the short graph reads as `x`, if `own` becomes `layer`."""
        theirs = self.layer(x)
        to = self.where(own, theirs, layer)
        return self.original[x] if to == theirs or to is None else self.in_layer(x, to)

    def twin(self, item: Item) -> Value:
        """Makes a value in other factors for an input, a `shard`, a shard_map operand or a result of the whole."""
        value = self.whole.outputs[item] if isinstance(item, int) else item
        value = value.operands[0] if isinstance(value, Op) else value
        twin = Value(value.name, value.shape, value.dtype, None)
        self.twins[twin] = item
        return twin

    def representative(self, item: Item) -> tuple[Any, Layer]:
        """Returns the short graph's item for one of the whole, with the layer if this was left out."""
        if self.stays(item):
            return self.short[item], None
        place = self.place(item)
        assert place is not None
        if isinstance(item, Value):
            return self.short[self.layers.value(item, self.near)], place.layer
        return self.short[self.layers.items[place._replace(layer=self.near)]], place.layer

    def is_handed_out(self, value: Value | None) -> bool:
        """True if an op without a layer makes this value of the short graph for a layer."""
        theirs = None if value is None else self.original.get(value)
        return isinstance(theirs, Value) and theirs.op is not None and theirs in self.layers.places

    def representative_value(self, value: Value) -> Value:
        """Returns the short graph's value for one of the whole."""
        if value.op is None or value in self.layers.places:
            short = self.representative(value)[0]
        else:
            short = self.representative(value.op)[0].results[value.index]
        assert isinstance(short, Value)
        return short

    def representative_member(self, item: Op | Value) -> Op | Value:
        """Returns the short graph's op or value for one of the whole."""
        if isinstance(item, Value):
            return self.representative_value(item)
        short: Op = self.representative(item)[0]
        return short

    def stays(self, item: Item) -> bool:
        """True if an item of the whole is in the short graph."""
        place = self.place(item)
        return place is None or place.layer not in self.left_out

    def restrict(self, pins: Pins) -> Pins:
        """Returns the pins of the whole graph that the short one has, too."""

        def short(of_whole: Mapping[Any, FixedLayout]) -> dict[Any, FixedLayout]:
            return {mine: of_whole[theirs] for mine, theirs in self.original.items() if theirs in of_whole}

        return Pins(short(pins.values), short(pins.outputs), short(pins.body_inputs))

    def _times(self, item: Item) -> int:
        place, many = self.place(item), 1 if isinstance(item, int) else item.times
        return many * (1 + len(self.left_out)) if place is not None and place.layer == self.near else many

    def _value(self, value: Value, reader: Op | Value | None) -> Value:
        """Returns the short graph's value for one of the whole; for one left out, the reader's neighbor's."""
        place = self.layers.place(value)
        if place is not None and place.layer in self.left_out:
            is_next = reader is not None and self.layer(reader) == self.near
            value = self.layers.value(value, self.far if is_next else self.near)
        if value not in self.short:
            assert value.op is None, f"{value} is made before it is read"
            copy = self.short[value] = self._copy(value, None)
            self.original[copy] = value
        short = self.short[value]
        assert isinstance(short, Value)
        return short

    def _copy(self, value: Value, op: Op | None) -> Value:
        """Copies a value without its readers, and without the marks that name other values of the whole."""
        return replace(value, op=op, readers=[], like=None, rows=None, times=self._times(value))

    def _op(self, op: Op) -> Op:
        copy = replace(op, operands=(), results=(), owns=None, times=self._times(op))
        self.short[op], self.original[copy] = copy, op
        copy.operands = tuple(self._value(v, copy) for v in op.operands)
        for i, v in enumerate(copy.operands):
            if self.layer(copy) is not None or self.stays(
                op.operands[i]
            ):  # an op that collects from all layers reads once
                v.readers.append((copy, i))
        if op.owns is not None:
            copy.owns = Owns(op.owns.factor, self._value(op.owns.ends, copy), op.owns.reads, op.owns.begins)
        copy.results = tuple(self._copy(r, copy) if r is not None and self.stays(r) else None for r in op.results)
        for mine, theirs in zip(copy.results, op.results, strict=True):
            if mine is not None and theirs is not None:
                self.short[theirs], self.original[mine] = mine, theirs
        return copy


def fold(graph: Graph, pins: Pins) -> Folded | None:
    """Returns a short graph for one that repeats itself; None if it would hardly be shorter."""
    if len(graph.ops) < WORTH or (layers := find_layers(graph, pins)) is None:
        return None
    left_out = range(layers.first + 2, layers.last - 2)
    fewer = sum(isinstance(x, Op) and place.layer in left_out for x, place in layers.places.items())
    return Folded(graph, layers) if fewer >= WORTH else None
