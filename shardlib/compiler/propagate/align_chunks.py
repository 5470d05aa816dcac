"""Aligns the shards of dims that no annotation fixes with the shards of the dims that they are read from.

The result of a pad, a slice or a window op has another size than its operand. Chunks of both sizes end at different
elements, and the distance grows along the dim: whole shards would move where a halo suffices. So a factor that is in
no input, result or annotation is sharded where its source is (`AlignedSize`), unless the fullest device would then hold
much more than its chunk.
"""

from __future__ import annotations

import math
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
class Alignment:
    """Element s of `base`, a size sharded in chunks, belongs next to element `scale * s + shift` of a factor."""

    base: int
    scale: Fraction = Fraction(1)
    shift: Fraction = Fraction(0)


@dataclass(frozen=True)
class FactorAlignment:
    """Element s of factor `other` belongs next to element `scale * s + shift` of this one, `low <= shift <= high`.

    For each element of distance, `bytes` move.
    """

    other: DimFactor
    scale: Fraction
    low: Fraction
    high: Fraction
    bytes: int


def align_shards(graph: Graph, propagation: Propagation) -> None:
    """Gives every free factor the shards of the factors that it is tied to."""
    ties: dict[DimFactor, list[FactorAlignment]] = defaultdict(list)
    for op in graph.ops:
        for dim_factor, tie in _ties(op, propagation):
            ties[dim_factor].append(tie)
    if not ties:
        return
    bound = _bound(graph, propagation)
    alignments = {
        dim_factor: Alignment(propagation.dims.size(dim_factor))
        for dim_factor in ties
        if dim_factor in bound or isinstance(propagation.dims.size(dim_factor), UnchunkedSize)
    }
    waiting = [dim_factor for dim_factor in ties if dim_factor not in alignments]
    while waiting:
        left = []
        for dim_factor in waiting:
            alignment = _choose_alignment(propagation.dims.size(dim_factor), ties[dim_factor], alignments)
            if alignment is None:
                left.append(dim_factor)
            else:
                alignments[dim_factor] = _take_alignment(propagation, dim_factor, alignment)
        if len(left) == len(waiting):  # no tie leads to these factors: the first one is sharded in chunks
            first = left.pop(0)
            alignments[first] = Alignment(propagation.dims.size(first))
        waiting = left


def _ties(op: Op, propagation: Propagation) -> Iterator[tuple[DimFactor, FactorAlignment]]:
    """Yields the ties between the factors of an op, in both directions."""
    if op.rule is None or op.constant or op not in propagation.labels:
        return
    labels, size = propagation.labels[op], propagation.dims.size
    for name, (by, stride, low, high, count) in op.rule.accesses.windows.items():
        if propagation.whole[op] & {name, by} or not (labels[name] and labels[by]):
            continue
        (x, *inner), (y, *others) = labels[name], labels[by]
        if x == y:
            continue
        across, along = (Fraction(math.prod(int(size(factor)) for factor in minor)) for minor in (inner, others))
        step, (a, b) = stride * along / across, (Fraction(n) / across for n in (low, high))
        nbytes = _row(op, name, op.rule.sizes[name]) * count * op.times
        yield y, FactorAlignment(x, 1 / step, -b / step, -a / step, nbytes)
        yield x, FactorAlignment(y, step, a, b, nbytes)


def _row(op: Op, name: str, size: int) -> int:
    """The bytes of one element of a factor."""
    rule = op.required_rule
    values = (*zip(op.operands, rule.operands, strict=True), *zip(op.results, rule.results, strict=True))
    nbytes = [v.nbytes for v, labels in values if v is not None and any(name in dim for dim in labels)]
    return max(nbytes, default=0) // max(size, 1)


def _bound(graph: Graph, propagation: Propagation) -> set[DimFactor]:
    """Returns the factors of inputs, outputs and pinned values."""
    ends = (*graph.inputs, *graph.outputs, *propagation.pinned_values, *propagation.twins)
    outside = [v for v in ends if isinstance(v, Value)]
    outside += [v for op in graph.ops if op.constrains or op.manual for v in (*op.operands, *op.results) if v]
    factors = (propagation.dim_factors(v) for v in outside if not v.constant and v in propagation.value)
    return set[DimFactor]().union(*factors, *propagation.group_factors.values(), propagation.same, propagation.resized)


def _choose_alignment(
    size: int, ties: Sequence[FactorAlignment], alignments: dict[DimFactor, Alignment]
) -> Alignment | None:
    """Returns the best alignment of a factor of `size` elements, or None if no tie leads to an aligned factor."""
    settled = all(tie.other in alignments for tie in ties)
    groups: dict[tuple[int, Fraction], list[tuple[Fraction, Fraction, int]]] = defaultdict(list)
    for tie in ties:
        if (alignment := alignments.get(tie.other)) is None:
            continue
        shift = tie.scale * alignment.shift
        groups[alignment.base, tie.scale * alignment.scale].append((shift + tie.low, shift + tie.high, tie.bytes))
    if not groups:
        return None
    (base, scale), spans = max(groups.items(), key=lambda group: sum(nbytes for *_, nbytes in group[1]))
    # The least bytes move at the median. A shift of 0 sends the fewest messages. While some of the other factors are
    # not aligned yet, the middle is near all of them.
    low, high = _median([(end, nbytes) for a, b, nbytes in spans for end in (a, b)])
    middle = Fraction(size - 1) / 2 - scale * Fraction(base - 1) / 2
    shift = min(max(Fraction(0) if settled else middle, low), high)
    return Alignment(base, scale, Fraction(int(shift)) if scale == 1 else shift)


def _median(points: list[tuple[Fraction, int]]) -> tuple[Fraction, Fraction]:
    """Returns the first and the last weighted median of points, given as (place, weight)."""
    points.sort()
    whole, seen = sum(n for _, n in points), 0
    for i, (at, n) in enumerate(points):
        seen += n
        if 2 * seen >= whole:
            return at, points[min(i + (2 * seen == whole), len(points) - 1)][0]
    return points[-1][0], points[-1][0]


def _take_alignment(propagation: Propagation, dim_factor: DimFactor, alignment: Alignment) -> Alignment:
    """Aligns a factor unless some device would then hold too much; returns its alignment, or that of its chunks."""
    size, base = propagation.dims.size(dim_factor), alignment.base
    axes = Axis.merge(request.axis for request in propagation.requests.get(dim_factor, ()))
    if alignment == Alignment(size) or not axes or not size or not base:
        return alignment if alignment == Alignment(size) or not axes else Alignment(size)
    aligned = AlignedSize(size, base, alignment.scale, alignment.shift)
    if largest_shard(aligned, axes) > _FULLER * largest_shard(size, axes):
        return Alignment(size)
    if isinstance(restrict_size(aligned, axes), UnchunkedSize):
        propagation.dims.place(dim_factor, aligned)
    return alignment
