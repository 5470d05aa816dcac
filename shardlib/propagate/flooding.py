"""Annotations flood through the rules: which leaves every dim has, and which mesh axes each class of leaves wants.

What is fixed (annotations, placed arguments, output specs) is written down first and locks its factors; then every op's
rule unifies the dims of its operands and results, forward and backward code alike. What comes out says, for every op,
which leaves its factors are, and for every class, which mesh axes some annotation put on it.

Where an annotation chooses the pieces of a dim, the class of the dim has these pieces everywhere; a `shard` that
chooses others begins another class. Another layout that is as it is (a placed argument, a choice of a class that has
one) and does not agree stands *apart*: as a tensor of its own, of which the value is a reshard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from shardlib.graph import Graph, Op, Value
from shardlib.meshes.axis import Axis
from shardlib.propagate.aligning import align
from shardlib.propagate.dims import Dims, Leaf, shares
from shardlib.propagate.flood import Flood, Want
from shardlib.reshard import Cut
from shardlib.specs.fixed import Fixed
from shardlib.specs.layout import Factor, Layout
from shardlib.specs.pieces import Pieces, over

Key = Value | int | Op  # what is fixed: an input or a constraint's result, an output by its number, the door of a body
Parts = list[list[list[Leaf]] | None]  # per dim, per factor of a fixed layout: its leaves; None where it has no factor


def flood(graph: Graph, fixed: Mapping[Value, Fixed], outputs: Mapping[int, Fixed], doors: Mapping[Op, Fixed]) -> Flood:
    """Run the flood.

    `fixed` holds inputs with specs and results of constraints, `outputs` the output specs, `doors` the specs of
    arguments of shard_map bodies.
    """
    work = _Flooding(graph, fixed, outputs, doors)
    work.write_down()  # first, so that locks hold when rules split dims
    work.unify()
    work.name_leaves()
    work.settle()
    _follow(work.f)
    work.open()
    align(graph, work.f)
    return work.f


class _Flooding:
    """A flood that runs: `raw` are the leaves of values, which may still be split; `labels` those of ops' factors."""

    def __init__(
        self, graph: Graph, fixed: Mapping[Value, Fixed], outputs: Mapping[int, Fixed], doors: Mapping[Op, Fixed]
    ) -> None:
        self.f, self.graph, self.fixed = Flood(), graph, fixed
        self.raw: dict[Value, list[list[Leaf]]] = {}
        self.labels: dict[Op, dict[str, list[Leaf]]] = {}
        self.owners: dict[Value, list[Leaf]] = {}
        self.parts: dict[Key, Parts] = {}
        ends: dict[Key, tuple[Value, Fixed]] = {op: (op.operands[0], fx) for op, fx in doors.items()}
        ends |= {i: (graph.outputs[i], fx) for i, fx in outputs.items()}
        met = dict.fromkeys(v for v in graph.by_use() if v in fixed)
        self.said: dict[Key, tuple[Value, Fixed]] = {value: (value, fixed[value]) for value in met | dict(fixed)}
        self.said |= {key: end for key, end in ends.items() if not end[0].constant}

    def dims(self, value: Value) -> list[list[Leaf]]:
        if value not in self.raw:
            # Inside a shard_map body nothing is known of dims: they have no leaves, so nothing can cut them.
            self.raw[value] = [[] if value.manual else self.f.dims.new(n) for n in value.shape]
        return self.raw[value]

    def write_down(self) -> None:
        """Lock what is fixed. An end in other factors than an annotation of the same value is a reshard of it."""
        for key, (value, fx) in self.said.items():
            self.parts[key] = write_down(self.f.dims, self.dims(value), fx.layout)
            if None in self.parts[key] and not isinstance(key, Value):
                apart = self.f.apart[key] = _twin(self.f, value)
                self.parts[key] = write_down(self.f.dims, self.dims(apart), fx.layout)

    def unify(self) -> None:
        """Make one what rules say is one."""
        f = self.f
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
        for apart in f.apart.values():
            for mine, theirs in zip(self.raw[apart], self.raw[f.twins[apart]], strict=True):
                f.dims.unify(mine, theirs)

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
        asked: dict[int, list[tuple[Leaf, Want]]] = defaultdict(list)  # by the bytes of what was annotated
        for key, (value, fx) in self.said.items():
            cut = _settle(f, fx, self.parts[key], asked[value.nbytes])
            if f.dims.chosen:
                _set_apart(f, key, f.apart.get(key, value), fx, self.parts[key])
            if isinstance(key, Value):
                f.fixed[key] = (cut, fx)
            elif isinstance(key, int):
                f.outputs[key] = (cut, fx)
            else:
                f.doors[key] = (cut, fx)
        # The largest tensor says which axis is major: it would cost most to cut it in another order.
        for _, wants in sorted(asked.items(), key=lambda of: -of[0]):
            for leaf, want in wants:
                have = f.wants.setdefault(leaf, [])
                have += [want] if all(w.axis != want.axis for w in have) else []
        f.turned |= _turned(f, asked)

    def open(self) -> None:
        """Give open dims what their classes want."""
        f = self.f
        for value, (cut, fx) in list(f.fixed.items()):
            f.fixed[value] = (_open(f, f.value[value], cut, fx), fx)
        for i, (cut, fx) in list(f.outputs.items()):
            f.outputs[i] = (_open(f, f.value[f.apart.get(i, self.graph.outputs[i])], cut, fx), fx)

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
        labels: dict[str, list[Leaf]] = {}
        whole = set(rule.whole)
        moved = f.moves.get(op, ())

        def leaves_of(names: Sequence[str]) -> list[Leaf]:
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


def _chosen(sizes: Sequence[int], said: Fixed | None, d: int) -> bool:
    """Whether somebody chose the pieces of a dim; it may be that they are chunks."""
    if any(isinstance(n, Pieces) for n in sizes):
        return True
    cut = said is not None and any(factor.axes for factor in said.layout.dims[d])
    return cut and said is not None and said.exact[d]


def _relate(f: Flood) -> None:
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


def _twin(f: Flood, value: Value) -> Value:
    twin = Value(value.name, value.shape, value.dtype, None)
    f.twins[twin] = f.twins.get(value, value)
    return twin


def _set_apart(f: Flood, key: Key, value: Value, fx: Fixed, parts: Parts) -> None:
    """Where the pieces of a fixed layout are not those of the classes of its dims, give it a value of its own."""
    dims = []
    for d, (groups, factors) in enumerate(zip(parts, fx.layout.dims, strict=True)):
        dim: list[Leaf] = []
        for group, factor in zip(groups or (), factors, strict=True):
            for leaf, axes, size in shared_out(f.dims, group, factor):
                if axes and fx.exact[d] and over(f.dims.size(leaf), axes) != over(size, axes):
                    (other,) = f.dims.new(int(size))
                    if isinstance(size, Pieces):
                        f.dims.choose(other, size, 0)
                    f.same[other], leaf = leaf, other
                dim.append(leaf)
        dims.append(tuple(dim))
    if tuple(dims) != f.value[value]:
        twin = f.apart[key] = _twin(f, value)
        f.value[twin] = tuple(dims)


def shared_out(dims: Dims, group: Sequence[Leaf], factor: Factor) -> Iterator[tuple[Leaf, tuple[Axis, ...], int]]:
    """The leaves of a factor that is fixed: what cuts each, and its size as the factor has it."""
    leaves = dims.leaves(group)
    primes = [p for a in factor.axes for p in a.primes()]
    pieces = factor.size if isinstance(factor.size, Pieces) else None
    locks = shares([dims.size(x) for x in leaves], (tuple(p.size for p in primes), pieces)) if leaves else []
    assert locks is not None, "a locked factor was split where its cut does not allow it"
    feed = iter(primes)
    for leaf, (ways, size) in zip(leaves, locks, strict=True):
        yield leaf, tuple(next(feed) for _ in ways), int(dims.size(leaf)) if size is None else size


def write_down(dims: Dims, raw: list[list[Leaf]], layout: Layout) -> Parts:
    """Split a value's dims as a layout says and lock them; leaves per factor, None where one cannot.

    Pieces that the layout has chosen are its classes', unless an earlier one has chosen others.
    """
    out: Parts = []
    for leaves, factors in zip(raw, layout.dims, strict=True):
        parts = dims.refine(leaves, [x.size for x in factors])
        out.append(parts)
        for part, factor in zip(parts or [], factors, strict=bool(parts)):
            ways = [p.size for a in factor.axes for p in a.primes()]
            leaves_of_part = dims.leaves(part)
            pieces = factor.size if isinstance(factor.size, Pieces) else None
            locks = shares([dims.size(x) for x in leaves_of_part], (tuple(ways), pieces)) if ways else None
            if ways and leaves_of_part and locks is None:
                out[-1] = None
            for leaf, (mine, size) in zip(leaves_of_part, locks or [], strict=bool(locks)):
                if mine:
                    dims.lock(leaf, mine, size)
                if size is not None:
                    dims.choose(leaf, size, next(dims.order))
    return out


def _settle(f: Flood, fixed: Fixed, parts: Parts, asked: list[tuple[Leaf, Want]]) -> Cut:
    """The fixed layout on the final leaves; records names, and in `asked` what it wants."""
    cut: list[tuple[Axis, ...]] = []
    for d, (groups, factors) in enumerate(zip(parts, fixed.layout.dims, strict=True)):
        assert groups is not None, f"{fixed.source}: dim {d} is not made of its own factors"
        for group, factor, name in zip(groups, factors, fixed.names[d] or (None,) * len(factors), strict=True):
            leaves = f.dims.leaves(group)
            for leaf, axes, _ in shared_out(f.dims, group, factor):
                cut.append(axes)
                asked += [(leaf, Want(a, fixed.source)) for a in axes]
            if name and len(leaves) == 1:
                f.names.setdefault(leaves[0], name)
    return tuple(cut)


def _turned(f: Flood, asked: Mapping[int, Sequence[tuple[Leaf, Want]]]) -> dict[Leaf, tuple[Axis, ...]]:
    """For leaves that are annotated in several orders of their axes: that of the largest tensor with another order."""
    turned: dict[Leaf, tuple[Axis, ...]] = {}
    for _, wants in sorted(asked.items(), key=lambda of: -of[0]):
        said: dict[tuple[Leaf, str], list[Axis]] = defaultdict(list)
        for leaf, want in wants:
            said[leaf, want.source].append(want.axis)
        for (leaf, _), axes in said.items():
            if axes != [w.axis for w in f.wants[leaf] if w.axis in axes]:
                turned.setdefault(leaf, tuple(axes))
    return turned


def _follow(f: Flood) -> None:
    """Who wants a factor cut wants those cut that follow it, and those that it follows."""
    tied: dict[Leaf, dict[Leaf, None]] = {}
    for op, labels in f.labels.items():
        assert op.rule is not None
        for pair in op.rule.follows.items():
            if not f.whole[op] & set(pair):
                a, b = (labels[x][0] for x in pair)
                tied.setdefault(a, {})[b] = None
                tied.setdefault(b, {})[a] = None
    queue = [leaf for leaf in tied if leaf in f.wants]
    while queue:
        leaf = queue.pop()
        for other in tied[leaf]:
            have = f.wants.setdefault(other, [])
            new = [w for w in f.wants[leaf] if all(w.axis != h.axis for h in have)]
            if new:
                have += new
                queue.append(other)
            if leaf in f.names:
                f.names.setdefault(other, f.names[leaf])


def _open(f: Flood, dims: tuple[tuple[Leaf, ...], ...], cut: Cut, fixed: Fixed) -> Cut:
    """Give open dims what their classes want, as far as the tensor has not used it already."""
    if not any(fixed.open):
        return cut
    used = {a for axes in cut for a in axes}
    flat = [(d, leaf) for d, leaves in enumerate(dims) for leaf in leaves]
    out = []
    for (d, leaf), axes in zip(flat, cut, strict=True):
        if fixed.open[d]:
            for want in f.wants.get(f.same.get(leaf, leaf), ()):
                ways = want.axis.size
                for a in axes:
                    ways *= a.size
                if want.axis not in used and f.dims.size(leaf) >= ways:
                    axes = (*axes, want.axis)
                    used.add(want.axis)
        out.append(axes)
    return tuple(out)
