"""Finds the layers of a graph: repeated stretches of ops that read alike of their neighbors.

The forward pass, the backward pass and the update of the parameters each repeat a run of ops. A layer is an equal part
of each: its ops forward and backward, the inputs that they read, the results that they make. Backward runs go through
the layers in reverse, so layers are matched by who reads whom, not by position.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.layer_folding.periodic_runs import MIN_REPEATS, Run, find_runs
from shardlib.compiler.propagate.pins import Pins
from shardlib.primitives.random.keys import COUNTER
from shardlib.sharding.placement import FixedLayout

_WIDEST = 4  # most repeats of one run that make a layer of another
_TRIES = 3  # few microbatches repeat long runs forward and backward, and their layers shorter ones
_AGREED = 0.75  # least share of the connections of a run that lead to neighbors of its layers

Item = Op | Value | int  # an op; an input, or a value that an op hands out to layers; or a result by its position


class Place(NamedTuple):
    """The layer of an item, and its part there, the same in every layer."""

    part: Hashable
    layer: int


@dataclass(frozen=True)
class Layers:
    """Equal layers, from `first` up to `last`, and the places of all items in them; other items have no place.

    An item with a place reads items without one, or items of its own layer and its two neighbors. Its readers are in
    these layers, too, or collect it from all layers.
    """

    places: Mapping[Item, Place]
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @cached_property
    def items(self) -> Mapping[Place, Item]:
        return {place: item for item, place in self.places.items()}

    def place(self, value: Value) -> Place | None:
        """Returns the place of a value, or of its producer."""
        return self.places.get(value) or (self.places.get(value.op) if value.op is not None else None)

    def value(self, value: Value, layer: int) -> Value:
        """Returns the value at the same place in another layer."""
        place = self.place(value)
        assert place is not None, f"{value} is of a layer"
        item = self.items[place._replace(layer=layer)]
        if isinstance(item, Op):
            result = item.results[value.index]
            assert result is not None
            return result
        assert isinstance(item, Value)
        return item


def find_layers(graph: Graph, pins: Pins) -> Layers | None:
    """Returns the layers of a graph, equal in their annotations, too; None if nothing is repeated often enough."""
    number: dict[Hashable, int] = {}
    row = np.array([number.setdefault(_op_key(op), len(number)) for op in graph.ops], dtype=np.int64)
    below = None
    for _ in range(_TRIES):
        if not (runs := find_runs(row, below)):
            return None
        if (layers := _Search(graph, runs, pins).layers()) is not None:
            return layers
        below = runs[0].period
    return None


def _op_key(op: Op) -> Hashable:
    """Returns everything that equal ops of equal layers share, but for their operands."""
    owns = None if op.owns is None else (op.owns.factor, op.owns.reads, op.owns.begins)
    ordered = None if op.ordered is None else op.ordered.rows
    results = tuple([r and (r.again, r.is_output, r.constant, r.manual, r.rows and r.rows.dim) for r in op.results])
    line = op.line and op.line.untagged
    return _call_key(op), op.call.results, line, op.backward, owns, ordered, results


def _call_key(op: Op) -> Hashable:
    """Returns the key of a call, without the counter of a random draw."""
    if (at := COUNTER.get(op.target)) is None:
        return op.call.key
    return replace(op.call, args=(*op.call.args[:at], None, *op.call.args[at + 1 :])).key


class _Search:
    """Finds the layer of every repeat of every run, and the range of layers that read alike."""

    def __init__(self, graph: Graph, runs: Sequence[Run], pins: Pins) -> None:
        self.graph, self.runs, self.pins = graph, [*runs], pins
        self.at: dict[Op, tuple[int, int, int]] = {}  # run, position in it, repeat
        for r, run in enumerate(runs):
            self._place(r, run)
        self.ways: dict[int, tuple[int, int]] = {
            0: (1, 0)
        }  # run -> (sign, offset): its repeats are layers `sign * repeat + offset`
        self.graph_inputs = {*graph.inputs}
        self.inputs: dict[Value, Place] = {}  # inputs of layers: of the graph, or handed out by ops without a layer

    def _place(self, r: int, run: Run) -> None:
        for i in range(run.period * run.times):
            self.at[self.graph.ops[run.start + i]] = r, i % run.period, i // run.period

    def layers(self) -> Layers | None:
        self._join()
        low, high = self._covered()
        self.ways = {r: way for r, way in self.ways.items() if self._ends(r)[0] <= low and high <= self._ends(r)[1]}
        looked_at = (low + (high - low) * n // 4 for n in (2, 1, 3)) if low < high else ()
        alike = (self._alike(low, high, middle) for middle in looked_at)
        if (ends := next(((a, b) for a, b in alike if b - a >= MIN_REPEATS), None)) is None:
            return None
        first, last = ends
        places: dict[Item, Place] = {op: self._op(op) for op in self.at if self._is_inside(op)}
        places = {x: place for x, place in (places | self.inputs).items() if first <= place.layer < last}
        results = self._results(Layers(places, first, last))
        return None if results is None else Layers(places | results, first, last)

    def _op(self, op: Op) -> Place:
        run, position, repeat = self.at[op]
        sign, offset = self.ways[run]
        return Place((run, position), sign * repeat + offset)

    def _ends(self, r: int) -> tuple[int, int]:
        """Returns the range of layers of a run."""
        sign, offset = self.ways[r]
        ends = offset, sign * (self.runs[r].times - 1) + offset
        return min(ends), max(ends) + 1

    def _covered(self) -> tuple[int, int]:
        """Returns the range of layers that most ops cover, the longest of these."""
        ends = {r: self._ends(r) for r in self.ways}
        marks = sorted({end for pair in ends.values() for end in pair})
        ranges = [
            (sum(self.runs[r].period for r, (a, b) in ends.items() if a <= low and high <= b), high - low, low)
            for low, high in itertools.pairwise(marks)
            if high - low >= MIN_REPEATS
        ]
        _, count, low = max(ranges, default=(0, 0, 0))
        return low, low + count

    def _repeats(self, r: int, q: int) -> Iterator[tuple[int, Op]]:
        run = self.runs[r]
        for j in range(run.times):
            yield j, self.graph.ops[run.start + j * run.period + q]

    # Runs that belong together --------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Finds the layers of every run that is connected to one whose layers are known."""
        self._take_inputs(0)
        while True:
            met = defaultdict[int, list[tuple[int, int]]](list)  # run -> (repeat, layer) pairs that are connected
            for op, (r, _, j) in self.at.items():
                for value in op.operands:
                    is_placed, layer = r in self.ways, self._layer(value)
                    source = self.at.get(value.op) if value.op is not None else None
                    if not is_placed and layer is not None:
                        met[r].append((j, layer))
                    elif is_placed and layer is None and source is not None and source[0] not in self.ways:
                        met[source[0]].append((source[2], self._op(op).layer))
            for r, pairs in met.items():
                widened, phase, way, share = _way(pairs)
                self._widen(r, widened, phase)
                if share > _AGREED and self.runs[r].times >= MIN_REPEATS:
                    self.ways[r] = way
                    self._take_inputs(r)
                else:
                    self._leave(r)
            if not met:
                return

    def _widen(self, r: int, times: int, phase: int) -> None:
        """Merges `times` repeats of a run into one, after leaving out the first `phase` repeats."""
        if times == 1:
            return
        run = self._leave(r)
        wide = self.runs[r] = Run(run.start + phase * run.period, run.period * times, (run.times - phase) // times)
        self._place(r, wide)

    def _leave(self, r: int) -> Run:
        """Takes the ops of a run out of it."""
        run = self.runs[r]
        for i in range(run.period * run.times):
            del self.at[self.graph.ops[run.start + i]]
        return run

    def _layer(self, value: Value) -> int | None:
        if value in self.inputs:
            return self.inputs[value].layer
        return self._op(value.op).layer if value.op is not None and self._is_inside(value.op) else None

    def _take_inputs(self, r: int) -> None:
        """Assigns inputs to layers, if every repeat of a run reads its own."""
        for q in range(self.runs[r].period):
            repeats = list(self._repeats(r, q))
            for i in range(len(repeats[0][1].operands)):
                read = [op.operands[i] for _, op in repeats]
                if len({*read}) == len(read) and all(map(self._may_be_input, read)):
                    for (_, op), value in zip(repeats, read, strict=True):
                        self.inputs.setdefault(value, Place((r, q, i), self._op(op).layer))

    def _may_be_input(self, value: Value) -> bool:
        """True for an input of the graph, or one of several results of an op without a layer."""
        return value in self.graph_inputs or (
            value.op is not None and value.op not in self.at and len(value.op.results) > 1
        )

    # Layers that are alike ------------------------------------------------------------------------------------------

    def _alike(self, low: int, high: int, middle: int) -> tuple[int, int]:
        """Returns the range of layers around `middle` that equal it."""
        differing = {*self._differing(low, high, middle)}
        if middle in differing:
            return middle, middle
        first = max((x + 1 for x in differing if x < middle), default=low)
        return max(first, low), min((x for x in differing if x > middle), default=high)

    def _differing(self, low: int, high: int, middle: int) -> Iterator[int]:
        """Yields the layers that differ from `middle`."""
        for r in self.ways:
            for q in range(self.runs[r].period):
                ops = {self._op(op).layer: op for _, op in self._repeats(r, q)}
                alike = self._reads(ops[middle], middle)
                for layer, op in ops.items():
                    if self._reads(op, layer) != alike:
                        yield layer
        for value in (r for op in self.graph.ops if not self._is_inside(op) for r in op.results if r is not None):
            if value.like in self.inputs:
                yield self.inputs[value.like].layer
        parts: dict[Hashable, dict[int, Value]] = defaultdict(dict)
        for value, place in self.inputs.items():
            parts[place.part][place.layer] = value
        for mine in parts.values():
            if middle not in mine:
                yield from mine
                continue
            alike = self._input_key(mine[middle])
            yield from {*range(low, high)} - mine.keys()
            for layer, value in mine.items():
                if self._input_key(value) != alike:
                    yield layer

    def _reads(self, op: Op, layer: int) -> Hashable:
        """Returns an op's operands, the owners of its results, seen from its layer, and the readers without a layer."""
        results = [r for r in op.results if r is not None]
        ends = [r.rows.ends for r in results if r.rows is not None]
        ends += [] if op.owns is None else [op.owns.ends]
        seen = tuple([self._seen(v, layer) for v in (*op.operands, *ends)])
        likes = tuple([r.like and self._seen(r.like, layer) for r in results])
        fixed = tuple([_fixed_key(self.pins.values.get(r)) for r in results]), _fixed_key(self.pins.body_inputs.get(op))
        return seen, likes, fixed, tuple([tuple(self._outside(r)) for r in results])

    def _seen(self, value: Value, layer: int) -> Hashable:
        place = self.inputs.get(value)
        if value.op is not None and self._is_inside(value.op):
            place = self._op(value.op)
        if place is None:
            return value
        away = place.layer - layer
        return (place.part, away, 0 if value in self.inputs else value.index) if -1 <= away <= 1 else value

    def _input_key(self, value: Value) -> Hashable:
        like = value.like and self._seen(value.like, self.inputs[value].layer)
        fixed = _fixed_key(self.pins.values.get(value))
        form = value.shape, value.dtype, value.constant, value.again, value.is_output
        return form, like, fixed, value.op, value.rows, len(value.readers), tuple(self._outside(value))

    def _outside(self, value: Value) -> Iterator[Op]:
        """Returns the readers of a value that have no layer."""
        return (op for op, _ in value.readers if not self._is_inside(op))

    def _is_inside(self, op: Op) -> bool:
        return op in self.at and self.at[op][0] in self.ways

    def _results(self, layers: Layers) -> dict[Item, Place] | None:
        """Returns the places of the program's results; None if layers have unequal ones."""
        places: dict[Item, Place] = {}
        times: Counter[tuple[Place, int]] = Counter()
        fixed: dict[Hashable, dict[int, Hashable]] = defaultdict(dict)
        for i, value in enumerate(self.graph.outputs):
            place = layers.place(value) if isinstance(value, Value) else None
            if place is not None:
                index = 0 if value in self.inputs else value.index
                part = ("result", place.part, index, times[place, index])
                times[place, index] += 1
                places[i] = Place(part, place.layer)
                fixed[part][place.layer] = _fixed_key(self.pins.outputs.get(i))
        alike = all(len(keys) == len(layers) and len({*keys.values()}) == 1 for keys in fixed.values())
        return places if alike else None


def _way(pairs: Sequence[tuple[int, int]]) -> tuple[int, int, tuple[int, int], float]:
    """Votes on how many repeats of a run make a layer, how many come before the first, and the (sign, offset) then.

    Also returns the share of the pairs that are then neighbors: layers inside one microbatch all read that one.
    """
    votes: Counter[tuple[int, int, tuple[int, int]]] = Counter()
    for wide in range(1, _WIDEST + 1):
        for phase in range(wide):
            for repeat, layer in pairs:
                at = (repeat - phase) // wide
                votes[wide, phase, (1, layer - at)] += 1
                votes[wide, phase, (-1, layer + at)] += 1
    wide, phase, (sign, offset) = max(votes, key=lambda way: (votes[way], -way[0]))
    near = sum(abs(sign * ((repeat - phase) // wide) + offset - layer) <= 1 for repeat, layer in pairs)
    return wide, phase, (sign, offset), near / len(pairs)


def _fixed_key(fixed: FixedLayout | None) -> Hashable:
    """Returns a fixed layout, without its source."""
    return fixed and (fixed.layout, fixed.names, fixed.open, fixed.exact)
