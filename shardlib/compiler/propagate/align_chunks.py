"""Aligns the shards of dims that no annotation fixes with the shards of the dims that they are read from.

The result of a pad, a slice or a window op has another size than its operand. Chunks of both sizes end at different
elements, and the distance grows along the dim: whole shards would move where a halo suffices. So a factor that is in
no input, result or annotation is sharded where its source is (`AlignedSize`), unless the fullest device would then hold
much more than its chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from shardlib.compiler.graph.ir import Graph, Op, Value
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.propagation import Propagation
from shardlib.sharding.chunks import AlignedSize, UnchunkedSize, largest_shard, restrict_size
from shardlib.sharding.mesh.axis import Axis

_FULLER = 1.5  # how many times as much as in chunks a device may hold


@dataclass(frozen=True)
class Place:
    """Element s of `base`, a size sharded in chunks, belongs next to element `scale * s + shift` of a factor."""

    base: int
    scale: Fraction = Fraction(1)
    shift: Fraction = Fraction(0)


@dataclass(frozen=True)
class _Tie:
    """Element s of factor `other` belongs next to element `scale * s + shift` of this one, `low <= shift <= high`.

    For each element of distance, `bytes` move.
    """

    other: DimFactor
    scale: Fraction
    low: Fraction
    high: Fraction
    bytes: int


def align_shards(graph: Graph, f: Propagation) -> None:
    """Gives every free factor the shards of the factors that it is tied to."""
    ties: dict[DimFactor, list[_Tie]] = defaultdict(list)
    for op in graph.ops:
        for dim_factor, tie in _ties(op, f):
            ties[dim_factor].append(tie)
    if not ties:
        return
    bound = _bound(graph, f)
    places = {
        dim_factor: Place(f.dims.size(dim_factor))
        for dim_factor in ties
        if dim_factor in bound or isinstance(f.dims.size(dim_factor), UnchunkedSize)
    }
    waiting = [dim_factor for dim_factor in ties if dim_factor not in places]
    while waiting:
        left = []
        for dim_factor in waiting:
            place = _choose_place(f.dims.size(dim_factor), ties[dim_factor], places)
            if place is None:
                left.append(dim_factor)
            else:
                places[dim_factor] = _take_place(f, dim_factor, place)
        if len(left) == len(waiting):  # no tie leads to these factors: the first one is sharded in chunks
            first = left.pop(0)
            places[first] = Place(f.dims.size(first))
        waiting = left


def _ties(op: Op, f: Propagation) -> Iterator[tuple[DimFactor, _Tie]]:
    """Yields the ties between the factors of an op, in both directions."""
    if op.rule is None or op.constant or op not in f.labels:
        return
    labels = f.labels[op]
    for name, (by, stride, low, high, count) in op.rule.accesses.windows.items():
        if f.whole[op] & {name, by} or not (labels[name] and labels[by]):
            continue
        (x, *inner), (y, *others) = labels[name], labels[by]
        if x == y:
            continue
        across, along = (Fraction(_product(f, minor)) for minor in (inner, others))
        step, (a, b) = stride * along / across, (Fraction(n) / across for n in (low, high))
        nbytes = _row(op, name, op.rule.sizes[name]) * count * op.times
        yield y, _Tie(x, 1 / step, -b / step, -a / step, nbytes)
        yield x, _Tie(y, step, a, b, nbytes)


def _product(f: Propagation, dim_factors: Sequence[DimFactor]) -> int:
    n = 1
    for dim_factor in dim_factors:
        n *= int(f.dims.size(dim_factor))
    return n


def _row(op: Op, name: str, size: int) -> int:
    """The bytes of one element of a factor."""
    assert op.rule is not None
    values = (*zip(op.operands, op.rule.operands, strict=True), *zip(op.results, op.rule.results, strict=True))
    nbytes = [v.nbytes for v, labels in values if v is not None and any(name in dim for dim in labels)]
    return max(nbytes, default=0) // max(size, 1)


def _bound(graph: Graph, f: Propagation) -> set[DimFactor]:
    """Returns the factors of inputs, outputs and pinned values."""
    outside = [v for v in (*graph.inputs, *graph.outputs, *f.pinned_values, *f.twins) if isinstance(v, Value)]
    outside += [v for op in graph.ops if op.constrains or op.manual for v in (*op.operands, *op.results) if v]
    bound = {dim_factor for v in outside if not v.constant and v in f.value for dim_factor in f.dim_factors(v)}
    return (
        bound
        | {dim_factor for ends in f.group_factors.values() for dim_factor in ends}
        | f.same.keys()
        | f.resized.keys()
    )


def _choose_place(size: int, ties: Sequence[_Tie], places: dict[DimFactor, Place]) -> Place | None:
    """Returns the best place of a factor of `size` elements, by ties to factors with places; None without such ties."""
    settled = all(tie.other in places for tie in ties)
    groups: dict[tuple[int, Fraction], list[tuple[Fraction, Fraction, int]]] = defaultdict(list)
    for tie in ties:
        if (place := places.get(tie.other)) is None:
            continue
        shift = tie.scale * place.shift
        groups[place.base, tie.scale * place.scale].append((shift + tie.low, shift + tie.high, tie.bytes))
    if not groups:
        return None
    (base, scale), spans = max(groups.items(), key=lambda group: sum(nbytes for *_, nbytes in group[1]))
    # The least bytes move at the median. A shift of 0 sends the fewest messages; while some ties have no places yet,
    # the middle is near all of them.
    low, high = _median([(end, nbytes) for a, b, nbytes in spans for end in (a, b)])
    middle = Fraction(size - 1) / 2 - scale * Fraction(base - 1) / 2
    shift = min(max(Fraction(0) if settled else middle, low), high)
    return Place(base, scale, Fraction(int(shift)) if scale == 1 else shift)


def _median(points: list[tuple[Fraction, int]]) -> tuple[Fraction, Fraction]:
    """Returns the first and the last weighted median of points, given as (place, weight)."""
    points.sort()
    whole, seen = sum(n for _, n in points), 0
    for i, (at, n) in enumerate(points):
        seen += n
        if 2 * seen >= whole:
            return at, points[min(i + (2 * seen == whole), len(points) - 1)][0]
    return points[-1][0], points[-1][0]


def _take_place(f: Propagation, dim_factor: DimFactor, place: Place) -> Place:
    """Takes a place for a factor, or its own chunks where some device would hold too much; returns the one taken."""
    size, base = f.dims.size(dim_factor), place.base
    axes = Axis.merge(w.axis for w in f.requests.get(dim_factor, ()))
    if place == Place(size) or not axes or not size or not base:
        return place if place == Place(size) or not axes else Place(size)
    aligned = AlignedSize(size, base, place.scale, place.shift)
    if largest_shard(aligned, axes) > _FULLER * largest_shard(size, axes):
        return Place(size)
    if isinstance(restrict_size(aligned, axes), UnchunkedSize):
        f.dims.place(dim_factor, aligned)
    return place
