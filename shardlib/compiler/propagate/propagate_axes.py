"""Propagates annotations through the rules: which factors every dim has, and which mesh axes each factor requests.

Pins are written down first, and lock their factors. Then every op's rule unifies the dims of its operands and results,
in forward and backward code alike. The result says which factors each op has, and which mesh axes annotations request
for each factor class.

Where an annotation chooses the shard sizes of a dim, the dim's class has these sizes everywhere. A `shard` that chooses
other sizes begins another class. Any other pin that disagrees with its class, such as a placed argument, gets a *twin*:
a value of its own, which the program reshards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import MappingProxyType

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.align_chunks import align_shards
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.lock_pins import Parts, add_twin, fill_open_dims, lock_layout, make_twin, read_pin
from shardlib.compiler.propagate.pins import PinKey, Pins
from shardlib.compiler.propagate.propagation import AxisRequest, BorrowedDims, Propagation, RelaxedDims
from shardlib.compiler.propagate.relax_pins import request_elsewhere
from shardlib.sharding.chunks import ShardSizes
from shardlib.sharding.placement import FixedLayout


def propagate_annotations(
    graph: Graph,
    pins: Pins,
    relaxed: RelaxedDims = MappingProxyType({}),
    borrowed: BorrowedDims = MappingProxyType({}),
) -> Propagation:
    """Propagates the annotations through all ops.

    A pin with `relaxed` dims gets a twin, whose factors in these dims are its own. A value with `borrowed` dims has the
    factors of these input dims, whatever the factors of the op that computes it.
    """
    state = _AxisPropagation(graph, pins, relaxed, borrowed)
    state.lock_pins()  # first, so that locks hold when rules split dims
    state.unify()
    state.resolve_factors()
    state.read_pins()
    _copy_requests(state.propagation)
    state.fill_open_dims()
    align_shards(graph, state.propagation)
    return state.propagation


class _AxisPropagation:
    """The state of the propagation.

    `raw` has the factors of values, `labels` those of ops, and `group_factors` those that count groups; all may still
    be split. `parts` has the factors of pins.
    """

    def __init__(self, graph: Graph, pins: Pins, relaxed: RelaxedDims, borrowed: BorrowedDims) -> None:
        self.graph, self.pins, self.propagation = graph, pins, Propagation(relaxed, borrowed)
        self.raw: dict[Value, list[list[DimFactor]]] = {}
        self.labels: dict[Op, dict[str, list[DimFactor]]] = {}
        self.group_factors: dict[Value, list[DimFactor]] = {}
        self.resharded_dims: dict[Op, set[int]] = {}  # dims for which a `shard` chooses other shard sizes
        self.parts: dict[PinKey, Parts] = {}
        in_order = dict.fromkeys(v for v in graph.by_use() if v in pins.values) | dict(pins.values)
        ends: list[tuple[PinKey, Value, FixedLayout]] = [(op, op.operands[0], x) for op, x in pins.body_inputs.items()]
        ends += [(i, graph.outputs[i], x) for i, x in pins.outputs.items()]
        self.pinned: dict[PinKey, tuple[Value, FixedLayout]] = {v: (v, pins.values[v]) for v in in_order}
        self.pinned |= {key: (value, x) for key, value, x in ends if not value.constant}
        for value, places in borrowed.items():
            self.raw[value] = [self.dims(place[0])[place[1]] if place else [] for place in places]

    def dims(self, value: Value) -> list[list[DimFactor]]:
        if value not in self.raw:
            # Dims inside a shard_map body have no factors, so nothing can shard them.
            self.raw[value] = [[] if value.manual else self.propagation.dims.new(n) for n in value.shape]
        return self.raw[value]

    def lock_pins(self) -> None:
        """Locks the factors of pins. A pin in other factors than an earlier one of the same value gets a twin."""
        propagation = self.propagation
        for key, (value, fixed) in self.pinned.items():
            if key not in propagation.relaxed:
                self.parts[key] = lock_layout(propagation.dims, self.dims(value), fixed.layout)
            if key in propagation.relaxed or (None in self.parts[key] and not isinstance(key, Value)):
                twin = propagation.pin_twins[key] = make_twin(propagation, value)
                self.parts[key] = lock_layout(propagation.dims, self.dims(twin), fixed.layout)
                if key in propagation.relaxed:
                    self.unify_twin(key)

    def unify(self) -> None:
        """Unifies the dims that rules identify."""
        propagation = self.propagation
        propagation.dims.refused.clear()
        for value in self.graph.by_use():
            self.dims(value)
        for op in self.graph.ops:
            if op.constrains and propagation.dims.chosen and not op.constant:
                self.resharded_dims[op] = self.find_resharded_dims(op)
            if op.rule is not None and not op.constant:
                self.unify_op(op)
            for result in op.results:
                if result is not None and not result.constant:
                    self.dims(result)
        for value in self.graph.values():
            if value.like is not None and not value.constant:
                for mine, theirs in zip(self.raw[value], self.raw[value.like], strict=True):
                    propagation.dims.unify(mine, theirs)
        for key in propagation.pin_twins:
            self.unify_twin(key)

    def unify_twin(self, key: PinKey) -> None:
        """Unifies the dims of a twin with those of its value, except relaxed ones."""
        propagation = self.propagation
        twin, relaxed = propagation.pin_twins[key], propagation.relaxed.get(key, ())
        for d, (mine, theirs) in enumerate(zip(self.raw[twin], self.dims(propagation.twins[twin]), strict=True)):
            if d not in relaxed:
                propagation.dims.unify(mine, theirs)

    def resolve_factors(self) -> None:
        """Writes down the final factors; none is split from here on."""
        propagation, resolve = self.propagation, self.propagation.dims.resolve
        propagation.value.update({value: tuple(tuple(resolve(d)) for d in dims) for value, dims in self.raw.items()})
        self.relate_resized()
        for ends, factors in self.group_factors.items():
            propagation.group_factors[ends] = tuple(resolve(factors))
        for op, labels in self.labels.items():
            propagation.labels[op] = {name: tuple(resolve(factors)) for name, factors in labels.items()}

    def relate_resized(self) -> None:
        """Relates the factors that differ only in the shard sizes that a `shard` chose."""
        propagation, resized = self.propagation, self.propagation.resized
        for op, dims in self.resharded_dims.items():
            result = op.results[0]
            assert result is not None
            for d in dims:
                mine, theirs = propagation.value[op.operands[0]][d], propagation.value[result][d]
                if [int(propagation.dims.size(x)) for x in mine] == [int(propagation.dims.size(x)) for x in theirs]:
                    for x, y in zip(mine, theirs, strict=True):
                        to, old = resized.get(x, x), resized.get(y, y)
                        resized.update({z: to for z in (y, *resized) if resized.get(z, z) == old})

    def read_pins(self) -> None:
        """Reads the pins in the final factors, and collects the requests of their factor classes."""
        propagation = self.propagation
        by_bytes: dict[int, list[tuple[DimFactor, AxisRequest]]] = defaultdict(list)
        for key, (value, fixed) in self.pinned.items():
            axes = read_pin(propagation, fixed, self.parts[key], by_bytes[value.nbytes])
            if propagation.dims.chosen:
                add_twin(propagation, key, propagation.pin_twins.get(key, value), fixed, self.parts[key])
            if key in propagation.relaxed:
                by_bytes[value.nbytes] += request_elsewhere(propagation, value, propagation.relaxed[key], fixed)
            if isinstance(key, Value):
                pinned = propagation.pin_twins[key] if key in propagation.relaxed else key
                propagation.pinned_values[pinned] = axes, fixed
            elif isinstance(key, int):
                propagation.outputs[key] = (axes, fixed)
            else:
                propagation.body_inputs[key] = (axes, fixed)
        # The largest tensor says which axis is major: it would cost most to shard it in another order.
        for _, requests in sorted(by_bytes.items(), key=lambda item: -item[0]):
            for factor, request in requests:
                have = propagation.requests.setdefault(factor, [])
                have += [request] if all(x.axis != request.axis for x in have) else []

    def fill_open_dims(self) -> None:
        """Gives open dims of pins the axes that their classes request."""
        propagation = self.propagation
        for value, (axes, fixed) in list(propagation.pinned_values.items()):
            axes = fill_open_dims(propagation, propagation.value[value], axes, fixed)
            propagation.pinned_values[value] = axes, fixed
        for i, (axes, fixed) in list(propagation.outputs.items()):
            dims = propagation.value[propagation.pin_twins.get(i, self.graph.outputs[i])]
            propagation.outputs[i] = (fill_open_dims(propagation, dims, axes, fixed), fixed)

    def find_resharded_dims(self, op: Op) -> set[int]:
        """Returns the dims for which a `shard` chooses other shard sizes: its result has another class there."""
        (source,), (result,) = op.operands, op.results
        assert result is not None
        classes, before, after = self.propagation.dims, self.pins.values.get(source), self.pins.values[result]
        resharded = set()
        for d, (mine, theirs) in enumerate(zip(self.raw[source], self.raw[result], strict=True)):
            sizes, new_sizes = ([classes.size(x) for x in classes.resolve(dim)] for dim in (mine, theirs))
            if sizes != new_sizes and _has_chosen_sizes(sizes, before, d) and _has_chosen_sizes(new_sizes, after, d):
                resharded.add(d)
        return resharded

    def unify_op(self, op: Op) -> None:
        """Unifies the dims that share a factor; the first dim that consists of one factor stands for the factor."""
        propagation, raw, rule = self.propagation, self.raw, op.required_rule
        labels: dict[str, list[DimFactor]] = {}
        whole = set(rule.whole)
        resharded = self.resharded_dims.get(op, ())

        def factors_of(names: Sequence[str]) -> list[DimFactor]:
            for name in names:
                if name not in labels:
                    labels[name] = propagation.dims.new(rule.sizes[name])
            return [factor for name in names for factor in labels[name]]

        for value, dims in (*zip(op.operands, rule.operands, strict=True), *zip(op.results, rule.results, strict=True)):
            value = value.like if value is not None and value.constant else value
            if value is None:
                continue
            if value not in raw:
                raw[value] = [factors_of(names) for names in dims]
                continue
            for d, (factors, names) in enumerate(zip(raw[value], dims, strict=True)):
                if d in resharded and value is op.results[0]:
                    continue
                if len(names) == 1 and names[0] not in labels:
                    labels[names[0]] = factors
                elif names and not propagation.dims.unify(factors_of(names), factors):
                    whole.update(names)
        factors_of(tuple(rule.sizes))
        if op.owns is not None:
            groups = self.group_factors.setdefault(op.owns.ends, labels[op.owns.factor])
            if not propagation.dims.unify(groups, labels[op.owns.factor]):
                whole.add(op.owns.factor)
        self.labels[op] = labels
        propagation.whole[op] = frozenset(whole)


def _has_chosen_sizes(sizes: Sequence[int], fixed: FixedLayout | None, d: int) -> bool:
    """Returns whether a user or a placed argument chose the shard sizes of a dim, which may equal those of chunks."""
    if any(isinstance(n, ShardSizes) for n in sizes):
        return True
    is_sharded = fixed is not None and any(factor.axes for factor in fixed.layout.dims[d])
    return is_sharded and fixed is not None and fixed.exact[d]


def _copy_requests(propagation: Propagation) -> None:
    """Copies the requests of a factor to the factors that follow it, and to those that it follows."""
    tied: dict[DimFactor, dict[DimFactor, None]] = {}
    for op, labels in propagation.labels.items():
        for pair in op.required_rule.ties.follows.items():
            if not propagation.whole[op] & set(pair):
                a, b = (labels[x][0] for x in pair)
                tied.setdefault(a, {})[b] = None
                tied.setdefault(b, {})[a] = None
    queue = [factor for factor in tied if factor in propagation.requests]
    while queue:
        factor = queue.pop()
        for other in tied[factor]:
            have = propagation.requests.setdefault(other, [])
            new = [x for x in propagation.requests[factor] if all(x.axis != h.axis for h in have)]
            if new:
                have += new
                queue.append(other)
            if factor in propagation.names:
                propagation.names.setdefault(other, propagation.names[factor])
