"""Spreads annotations through the rules: which factors every dim has, and which mesh axes each factor requests.

What is fixed (annotations, placed arguments, output specs) is written down first and locks its factors; then every op's
rule unifies the dims of its operands and results, forward and backward code alike. What comes out says, for every op,
which leaves its factors are, and for every class, which mesh axes some annotation put on it.

Where an annotation chooses the pieces of a dim, the class of the dim has these pieces everywhere; a `shard` that
chooses others begins another class. Another layout that is as it is (a placed argument, a choice of a class that has
one) and does not agree stands *apart*: as a tensor of its own, of which the value is a reshard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.align_chunks import align
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.fused_weights import Met
from shardlib.compiler.propagate.pinned import Key, Parts, opened, set_apart, settle, twin_of, write_down
from shardlib.compiler.propagate.propagation import AxisRequest, Propagation
from shardlib.compiler.propagate.relax_cuts import Loose, tight, wanted
from shardlib.sharding.chunks import ShardSizes
from shardlib.sharding.placement import FixedLayout


def spread_annotations(
    graph: Graph,
    fixed: Mapping[Value, FixedLayout],
    outputs: Mapping[int, FixedLayout],
    doors: Mapping[Op, FixedLayout],
    loose: Loose = MappingProxyType({}),
    met: Met = MappingProxyType({}),
) -> Propagation:
    """Spreads the annotations through all ops.

    `fixed` holds inputs with specs and results of constraints, `outputs` the output specs, `doors` the specs of
    arguments of shard_map bodies. Dims of inputs and outputs that are `loose` stand apart as they are fixed. Values
    that inputs are `met` by have the factors of these, whatever the factors of the ops that make them.
    """
    work = _Spreading(graph, fixed, outputs, doors, loose)
    work.f.met = met
    for value, places in met.items():
        work.raw[value] = [work.dims(p[0])[p[1]] if p else [] for p in places]
    work.write_down()  # first, so that locks hold when rules split dims
    work.unify()
    work.name_leaves()
    work.settle()
    _follow(work.f)
    work.open()
    align(graph, work.f)
    work.f.tight = tight(work.f, work.said)
    return work.f


class _Spreading:
    """The state while annotations spread: `raw` has the factors of values, which may still be split, `labels` those of
    ops."""

    def __init__(
        self,
        graph: Graph,
        fixed: Mapping[Value, FixedLayout],
        outputs: Mapping[int, FixedLayout],
        doors: Mapping[Op, FixedLayout],
        loose: Loose,
    ) -> None:
        self.f, self.graph, self.fixed, self.loose = Propagation(loose=loose), graph, fixed, loose
        self.raw: dict[Value, list[list[DimFactor]]] = {}
        self.labels: dict[Op, dict[str, list[DimFactor]]] = {}
        self.owners: dict[Value, list[DimFactor]] = {}
        self.parts: dict[Key, Parts] = {}
        ends: dict[Key, tuple[Value, FixedLayout]] = {op: (op.operands[0], fx) for op, fx in doors.items()}
        ends |= {i: (graph.outputs[i], fx) for i, fx in outputs.items()}
        met = dict.fromkeys(v for v in graph.by_use() if v in fixed)
        self.said: dict[Key, tuple[Value, FixedLayout]] = {value: (value, fixed[value]) for value in met | dict(fixed)}
        self.said |= {key: end for key, end in ends.items() if not end[0].constant}

    def dims(self, value: Value) -> list[list[DimFactor]]:
        if value not in self.raw:
            # Inside a shard_map body nothing is known of dims: they have no leaves, so nothing can cut them.
            self.raw[value] = [[] if value.manual else self.f.dims.new(n) for n in value.shape]
        return self.raw[value]

    def write_down(self) -> None:
        """Lock what is fixed. An end in other factors than an annotation of the same value is a reshard of it."""
        for key, (value, fx) in self.said.items():
            if key not in self.loose:
                self.parts[key] = write_down(self.f.dims, self.dims(value), fx.layout)
            if key in self.loose or (None in self.parts[key] and not isinstance(key, Value)):
                apart = self.f.apart[key] = twin_of(self.f, value)
                self.parts[key] = write_down(self.f.dims, self.dims(apart), fx.layout)
                if key in self.loose:
                    self.join(key)

    def unify(self) -> None:
        """Make one what rules say is one."""
        f = self.f
        f.dims.refused.clear()
        for value in self.graph.by_use():
            self.dims(value)
        for op in self.graph.ops:
            if op.constrains and f.dims.chosen and not op.constant:
                f.moves[op] = self.moved(op)
            if op.rule is not None and not op.constant:
                self.unify_op(op)
            for result in op.results:
                if result is not None and not result.constant:
                    self.dims(result)
        for value in self.graph.values():
            if value.like is not None and not value.constant:
                for mine, theirs in zip(self.raw[value], self.raw[value.like], strict=True):
                    f.dims.unify(mine, theirs)
        for key in f.apart:
            self.join(key)

    def join(self, key: Key) -> None:
        """Make the dims of what stands apart those of its value, but for those that are loose."""
        apart, loose = self.f.apart[key], self.loose.get(key, ())
        for d, (mine, theirs) in enumerate(zip(self.raw[apart], self.dims(self.f.twins[apart]), strict=True)):
            if d not in loose:
                self.f.dims.unify(mine, theirs)

    def name_leaves(self) -> None:
        """No leaf is split any more."""
        leaves = self.f.dims.leaves
        self.f.value |= {value: tuple(tuple(leaves(d)) for d in dims) for value, dims in self.raw.items()}
        _relate(self.f)
        self.f.owners |= {ends: tuple(leaves(found)) for ends, found in self.owners.items()}
        for op, labels in self.labels.items():
            self.f.labels[op] = {name: tuple(leaves(found)) for name, found in labels.items()}

    def settle(self) -> None:
        """What is fixed, on these leaves, and what their classes want therefore."""
        f = self.f
        asked: dict[int, list[tuple[DimFactor, AxisRequest]]] = defaultdict(list)  # by the bytes of what was annotated
        for key, (value, fx) in self.said.items():
            cut = settle(f, fx, self.parts[key], asked[value.nbytes])
            if f.dims.chosen:
                set_apart(f, key, f.apart.get(key, value), fx, self.parts[key])
            if key in self.loose:
                asked[value.nbytes] += wanted(f, value, self.loose[key], fx)
            if isinstance(key, Value):
                f.fixed[f.apart[key] if key in self.loose else key] = (cut, fx)
            elif isinstance(key, int):
                f.outputs[key] = (cut, fx)
            else:
                f.doors[key] = (cut, fx)
        # The largest tensor says which axis is major: it would cost most to cut it in another order.
        for _, requests in sorted(asked.items(), key=lambda of: -of[0]):
            for leaf, want in requests:
                have = f.requests.setdefault(leaf, [])
                have += [want] if all(w.axis != want.axis for w in have) else []

    def open(self) -> None:
        """Give open dims what their classes want."""
        f = self.f
        for value, (cut, fx) in list(f.fixed.items()):
            f.fixed[value] = (opened(f, f.value[value], cut, fx), fx)
        for i, (cut, fx) in list(f.outputs.items()):
            f.outputs[i] = (opened(f, f.value[f.apart.get(i, self.graph.outputs[i])], cut, fx), fx)

    def moved(self, op: Op) -> set[int]:
        """The dims that a `shard` cuts into other pieces than it finds them in: what follows is another class."""
        (source,), (result,) = op.operands, op.results
        assert result is not None
        moved = set()
        for d, (mine, theirs) in enumerate(zip(self.raw[source], self.raw[result], strict=True)):
            before, after = ([self.f.dims.size(x) for x in self.f.dims.leaves(dim)] for dim in (mine, theirs))
            if before != after and _chosen(before, self.fixed.get(source), d) and _chosen(after, self.fixed[result], d):
                moved.add(d)
        return moved

    def unify_op(self, op: Op) -> None:
        """Make the dims that share a factor one; the first dim that has a factor to itself is that factor."""
        f, raw, rule = self.f, self.raw, op.rule
        assert rule is not None
        labels: dict[str, list[DimFactor]] = {}
        whole = set(rule.whole)
        moved = f.moves.get(op, ())

        def leaves_of(names: Sequence[str]) -> list[DimFactor]:
            for name in names:
                if name not in labels:
                    labels[name] = f.dims.new(rule.sizes[name])
            return [leaf for name in names for leaf in labels[name]]

        for value, dims in (*zip(op.operands, rule.operands, strict=True), *zip(op.results, rule.results, strict=True)):
            value = value.like if value is not None and value.constant else value
            if value is None:
                continue
            if value not in raw:
                raw[value] = [leaves_of(names) for names in dims]
                continue
            for d, (leaves, names) in enumerate(zip(raw[value], dims, strict=True)):
                if d in moved and value is op.results[0]:
                    continue
                if len(names) == 1 and names[0] not in labels:
                    labels[names[0]] = leaves
                elif names and not f.dims.unify(leaves_of(names), leaves):
                    whole.update(names)
        leaves_of(tuple(rule.sizes))
        if op.owns is not None:
            owner = self.owners.setdefault(op.owns.ends, labels[op.owns.factor])
            if not f.dims.unify(owner, labels[op.owns.factor]):
                whole.add(op.owns.factor)
        self.labels[op] = labels
        f.whole[op] = frozenset(whole)


def _chosen(sizes: Sequence[int], said: FixedLayout | None, d: int) -> bool:
    """Returns whether somebody chose the pieces of a dim; it may be that they are chunks."""
    if any(isinstance(n, ShardSizes) for n in sizes):
        return True
    cut = said is not None and any(factor.axes for factor in said.layout.dims[d])
    return cut and said is not None and said.exact[d]


def _relate(f: Propagation) -> None:
    """What differs in its pieces only, now that no leaf is split any more."""
    for op, moved in f.moves.items():
        result = op.results[0]
        assert result is not None
        for d in moved:
            mine, theirs = f.value[op.operands[0]][d], f.value[result][d]
            if [int(f.dims.size(x)) for x in mine] == [int(f.dims.size(x)) for x in theirs]:
                for x, y in zip(mine, theirs, strict=True):
                    to, old = f.kin.get(x, x), f.kin.get(y, y)
                    f.kin |= {z: to for z in (y, *f.kin) if f.kin.get(z, z) == old}


def _follow(f: Propagation) -> None:
    """Copies the requests of a factor to the factors that follow it, and to those that it follows."""
    tied: dict[DimFactor, dict[DimFactor, None]] = {}
    for op, labels in f.labels.items():
        assert op.rule is not None
        for pair in op.rule.ties.follows.items():
            if not f.whole[op] & set(pair):
                a, b = (labels[x][0] for x in pair)
                tied.setdefault(a, {})[b] = None
                tied.setdefault(b, {})[a] = None
    queue = [leaf for leaf in tied if leaf in f.requests]
    while queue:
        leaf = queue.pop()
        for other in tied[leaf]:
            have = f.requests.setdefault(other, [])
            new = [w for w in f.requests[leaf] if all(w.axis != h.axis for h in have)]
            if new:
                have += new
                queue.append(other)
            if leaf in f.names:
                f.names.setdefault(other, f.names[leaf])
