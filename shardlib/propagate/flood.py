"""Annotations flood through the rules: leaves of every dim, classes of leaves, and the mesh axes that each class wants.

Fixed layouts (annotations, placed arguments, output specs) are written down first and lock their factors; then every
op's rule unifies the dims of its operands and results, forward and backward code alike. What comes out says, for every
op, which leaves its factors are, and for every class, which mesh axes some annotation put on it.

Where an annotation chooses the pieces of a dim, the class of the dim has these pieces everywhere; a `shard` that
chooses others begins another class. Another layout that is as it is (a placed argument, a choice of a class that has
one) and does not agree stands *apart*: as a tensor of its own, of which the value is a reshard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardlib.graph import Graph, Op, Value
from shardlib.meshes.axis import Axis
from shardlib.propagate.dims import Dims, Leaf, shares
from shardlib.reshard import Cut
from shardlib.specs.fixed import Fixed
from shardlib.specs.layout import Factor
from shardlib.specs.pieces import Pieces, over

OpFactor = tuple[str, int]  # an op's factor: the rule's label, and which of its leaves


@dataclass
class Want:
    """One mesh axis (a prime part) that a class wants, and the annotation that asked for it."""

    axis: Axis
    source: str


@dataclass
class Flood:
    """The result of flooding; see the fields."""

    dims: Dims = field(default_factory=Dims)
    value: dict[Value, tuple[tuple[Leaf, ...], ...]] = field(default_factory=dict)  # leaves per dim
    labels: dict[Op, dict[str, tuple[Leaf, ...]]] = field(default_factory=dict)  # leaves per factor of the op's rule
    whole: dict[Op, frozenset[str]] = field(default_factory=dict)  # factors that must not be cut here
    wants: dict[Leaf, list[Want]] = field(default_factory=dict)
    names: dict[Leaf, str] = field(default_factory=dict)
    fixed: dict[Value, tuple[Cut, Fixed]] = field(default_factory=dict)  # results of constraints, and fixed inputs
    outputs: dict[int, tuple[Cut, Fixed]] = field(default_factory=dict)  # by output position
    doors: dict[Op, tuple[Cut, Fixed]] = field(default_factory=dict)  # how a shard_map body takes its argument
    # What is fixed in other factors, or other pieces, than its value has: outputs, doors, inputs, constraints' results.
    apart: dict[int | Op | Value, Value] = field(default_factory=dict)
    twins: dict[Value, Value] = field(default_factory=dict)  # what stands apart: the value that it is
    same: dict[Leaf, Leaf] = field(default_factory=dict)  # leaves that differ from another's in their pieces only
    moves: dict[Op, set[int]] = field(default_factory=dict)  # dims that a `shard` cuts into other pieces
    kin: dict[Leaf, Leaf] = field(default_factory=dict)  # one leaf for all that differ in their pieces only
    factors: dict[tuple[Op, int, bool], list[OpFactor | None]] = field(default_factory=dict)  # memo of `value_factors`

    def leaves(self, value: Value) -> tuple[Leaf, ...]:
        return tuple(leaf for dim in self.value[value] for leaf in dim)

    def across(self, cut: Cut, source: Value, target: Value, *, pieces: bool = False) -> Cut:
        """A cut of `source` on a value of the same shape; dims whose factors (or `pieces`) differ are whole."""
        feed: Iterator[tuple[Axis, ...]] = iter(cut)
        out: list[tuple[Axis, ...]] = []
        for mine, theirs in zip(self.value[source], self.value[target], strict=True):
            axes = [next(feed) for _ in mine]
            out += axes if mine == theirs or (not pieces and self.alike(mine, theirs)) else [()] * len(theirs)
        return tuple(out)

    def alike(self, a: Sequence[Leaf], b: Sequence[Leaf]) -> bool:
        """Whether two dims have the same factors, in whatever pieces."""
        return [self._kin(x) for x in a] == [self._kin(x) for x in b]

    def _kin(self, leaf: Leaf) -> Leaf:
        leaf = self.same.get(leaf, leaf)
        return self.kin.get(leaf, leaf)

    def sizes(self, value: Value) -> tuple[tuple[int, ...], ...]:
        """The sizes of the leaves, per dim."""
        return tuple(tuple(self.dims.size(leaf) for leaf in dim) for dim in self.value[value])

    def operand_factors(self, op: Op, position: int, dim: int) -> tuple[OpFactor, ...]:
        """The op's factors, leaf by leaf, along one dim of an operand."""
        assert op.rule is not None
        return self._factors(op, op.rule.operands[position][dim])

    def result_factors(self, op: Op, index: int, dim: int) -> tuple[OpFactor, ...]:
        assert op.rule is not None
        return self._factors(op, op.rule.results[index][dim])

    def _factors(self, op: Op, labels: Sequence[str]) -> tuple[OpFactor, ...]:
        return tuple((label, k) for label in labels for k in range(len(self.labels[op][label])))


def flood(
    graph: Graph, fixed: Mapping[Value, Fixed], fixed_outputs: Mapping[int, Fixed], doors: Mapping[Op, Fixed]
) -> Flood:
    """Run the flood.

    `fixed` holds inputs with specs and results of constraints, `fixed_outputs` the output specs, `doors` the specs of
    arguments of shard_map bodies.
    """
    f = Flood()
    raw: dict[Value, list[list[Leaf]]] = {}

    def dims_of(value: Value) -> list[list[Leaf]]:
        if value not in raw:
            # Inside a shard_map body nothing is known of dims: they have no leaves, so nothing can cut them.
            raw[value] = [[] if value.manual else f.dims.new(n) for n in value.shape]
        return raw[value]

    # What is fixed comes first, so that its locks hold when rules split dims.
    parts = {value: _write_down(f.dims, dims_of(value), fx) for value, fx in fixed.items()}
    ends: dict[int | Op, tuple[Value, Fixed]] = {op: (op.operands[0], fx) for op, fx in doors.items()}
    ends |= {i: (graph.outputs[i], fx) for i, fx in fixed_outputs.items()}
    ends = {key: end for key, end in ends.items() if not end[0].constant}
    end_parts = {}
    for key, (value, fx) in ends.items():
        end_parts[key] = _write_down(f.dims, dims_of(value), fx)
        if None in end_parts[key]:
            # It has other factors than an annotation of the same value: that is a reshard, not a contradiction.
            apart = f.apart[key] = _twin(f, value)
            end_parts[key] = _write_down(f.dims, dims_of(apart), fx)

    raw_labels: dict[Op, dict[str, list[Leaf]]] = {}
    for value in graph.inputs:
        dims_of(value)
    for op in graph.ops:
        if op.constrains and f.dims.chosen and not op.constant:
            f.moves[op] = _moved(f, op, raw, fixed)
        if op.rule is not None and not op.constant:
            _unify(f, op, raw, raw_labels)
        for result in op.results:
            if result is not None and not result.constant:
                dims_of(result)
    for apart in f.apart.values():
        for mine, theirs in zip(raw[apart], raw[f.twins[apart]], strict=True):
            f.dims.unify(mine, theirs)

    for value, dims in raw.items():
        f.value[value] = tuple(tuple(f.dims.leaves(d)) for d in dims)
    _relate(f)
    for op, labels in raw_labels.items():
        f.labels[op] = {name: tuple(f.dims.leaves(leaves)) for name, leaves in labels.items()}
    asked: dict[int, list[tuple[Leaf, Want]]] = defaultdict(list)  # by the bytes of what was annotated
    for value, fx in fixed.items():
        f.fixed[value] = (_settle(f, fx, parts[value], asked[value.nbytes]), fx)
        if f.dims.chosen:
            _set_apart(f, value, value, fx, parts[value])
    for key, (value, fx) in ends.items():
        cut = _settle(f, fx, end_parts[key], asked[value.nbytes])
        if f.dims.chosen:
            _set_apart(f, key, f.apart.get(key, value), fx, end_parts[key])
        if isinstance(key, int):
            f.outputs[key] = (cut, fx)
        else:
            f.doors[key] = (cut, fx)
    # The largest tensor says which axis is major: it would cost most to cut it in another order.
    for _, wants in sorted(asked.items(), key=lambda of: -of[0]):
        for leaf, want in wants:
            have = f.wants.setdefault(leaf, [])
            have += [want] if all(w.axis != want.axis for w in have) else []
    _follow(f)
    for value, (cut, fx) in list(f.fixed.items()):
        f.fixed[value] = (_open(f, f.value[value], cut, fx), fx)
    for i, (cut, fx) in list(f.outputs.items()):
        f.outputs[i] = (_open(f, f.value[f.apart.get(i, graph.outputs[i])], cut, fx), fx)
    return f


def _moved(f: Flood, op: Op, raw: dict[Value, list[list[Leaf]]], fixed: Mapping[Value, Fixed]) -> set[int]:
    """The dims that a `shard` cuts into other pieces than it finds them in: what follows is another class."""
    (source,), (result,) = op.operands, op.results
    assert result is not None
    moved = set()
    for d, (mine, theirs) in enumerate(zip(raw[source], raw[result], strict=True)):
        before, after = ([f.dims.size(x) for x in f.dims.leaves(dim)] for dim in (mine, theirs))
        if before != after and _chosen(before, fixed.get(source), d) and _chosen(after, fixed[result], d):
            moved.add(d)
    return moved


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


def _set_apart(f: Flood, key: int | Op | Value, value: Value, fx: Fixed, parts: list[list[list[Leaf]] | None]) -> None:
    """Where the pieces of a fixed layout are not those of the classes of its dims, give it a value of its own."""
    dims = []
    for d, (groups, factors) in enumerate(zip(parts, fx.layout.dims, strict=True)):
        dim: list[Leaf] = []
        for group, factor in zip(groups or (), factors, strict=True):
            for leaf, axes, size in _shared_out(f.dims, group, factor):
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


def _shared_out(dims: Dims, group: Sequence[Leaf], factor: Factor) -> Iterator[tuple[Leaf, tuple[Axis, ...], int]]:
    """The leaves of a factor that is fixed: what cuts each, and its size as the factor has it."""
    leaves = dims.leaves(group)
    primes = [p for a in factor.axes for p in a.primes()]
    pieces = factor.size if isinstance(factor.size, Pieces) else None
    locks = shares([dims.size(x) for x in leaves], (tuple(p.size for p in primes), pieces)) if leaves else []
    assert locks is not None, "a locked factor was split where its cut does not allow it"
    feed = iter(primes)
    for leaf, (ways, size) in zip(leaves, locks, strict=True):
        yield leaf, tuple(next(feed) for _ in ways), int(dims.size(leaf)) if size is None else size


def _write_down(dims: Dims, raw: list[list[Leaf]], fixed: Fixed) -> list[list[list[Leaf]] | None]:
    """Split a value's dims as its fixed layout says and lock them; leaves per factor, None where one cannot.

    Pieces that the layout has chosen are its classes', unless an earlier one has chosen others.
    """
    out: list[list[list[Leaf]] | None] = []
    for leaves, factors in zip(raw, fixed.layout.dims, strict=True):
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


def _unify(f: Flood, op: Op, raw: dict[Value, list[list[Leaf]]], raw_labels: dict[Op, dict[str, list[Leaf]]]) -> None:
    """Make the dims that share a factor one; the first dim that has a factor to itself is that factor."""
    rule = op.rule
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
        if value is None or value.constant:
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
    raw_labels[op] = labels
    f.whole[op] = frozenset(whole)


def _settle(f: Flood, fixed: Fixed, parts: list[list[list[Leaf]] | None], asked: list[tuple[Leaf, Want]]) -> Cut:
    """The fixed layout on the final leaves; records names, and in `asked` what it wants."""
    cut: list[tuple[Axis, ...]] = []
    for d, (groups, factors) in enumerate(zip(parts, fixed.layout.dims, strict=True)):
        assert groups is not None, f"{fixed.source}: dim {d} is not made of its own factors"
        for group, factor, name in zip(groups, factors, fixed.names[d] or (None,) * len(factors), strict=True):
            leaves = f.dims.leaves(group)
            for leaf, axes, _ in _shared_out(f.dims, group, factor):
                cut.append(axes)
                asked += [(leaf, Want(a, fixed.source)) for a in axes]
            if name and len(leaves) == 1:
                f.names.setdefault(leaves[0], name)
    return tuple(cut)


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
