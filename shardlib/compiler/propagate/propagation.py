"""The result of propagation: the factors of every dim, the mesh axes that they request, and the pins in these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.dim_factors import DimFactor, FactorClasses
from shardlib.compiler.propagate.pins import PinKey
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.reshard import FactorAxes

OpFactor = tuple[str, int]  # an op's factor: the rule's label, and the position of one of its dim factors
Assignment = Mapping[OpFactor, tuple[Axis, ...]]  # the mesh axes on the factors of one op
Message = tuple[str, tuple[Axis, ...], float]  # the collective, its axes, and the bytes that a device sends
FactorDims = tuple[tuple[DimFactor, ...], ...]  # the factors of every dim of a value

# Dims of pinned inputs and outputs, whose factors may differ from those of their values.
RelaxedDims = Mapping[PinKey, frozenset[int]]
InputDim = tuple[Value, int]  # an input, and one of its dims
BorrowedDims = Mapping[Value, tuple[InputDim | None, ...]]  # for each dim of a value: the input dim with its factors


@dataclass(frozen=True)
class AxisRequest:
    """One mesh axis (a prime part) that a factor requests, and the annotation it comes from; or it was `offered`."""

    axis: Axis
    source: str
    offered: bool = False


@dataclass(frozen=True, eq=False)
class Propagation:
    """The factors, requests and pins that annotations lead to through the rules of ops.

    `propagate_annotations` fills it. Later passes read it, or make another one with `dataclasses.replace`.
    """

    relaxed: RelaxedDims = field(default_factory=dict)
    borrowed: BorrowedDims = field(default_factory=dict)
    dims: FactorClasses = field(default_factory=FactorClasses)
    value: dict[Value, FactorDims] = field(default_factory=dict)
    labels: dict[Op, dict[str, tuple[DimFactor, ...]]] = field(default_factory=dict)  # by the labels of the op's rule
    whole: dict[Op, frozenset[str]] = field(default_factory=dict)  # labels that must not be sharded
    # The count of groups, by their ends.
    group_factors: dict[Value, tuple[DimFactor, ...]] = field(default_factory=dict)
    requests: dict[DimFactor, list[AxisRequest]] = field(default_factory=dict)
    names: dict[DimFactor, str] = field(default_factory=dict)

    pinned_values: dict[Value, tuple[FactorAxes, FixedLayout]] = field(default_factory=dict)
    outputs: dict[int, tuple[FactorAxes, FixedLayout]] = field(default_factory=dict)  # by position
    body_inputs: dict[Op, tuple[FactorAxes, FixedLayout]] = field(default_factory=dict)

    # A pin whose factors or shards differ from those of its value has a *twin*: a value of its own.
    pin_twins: dict[PinKey, Value] = field(default_factory=dict)
    twins: dict[Value, Value] = field(default_factory=dict)  # twin -> the pinned value
    copies: Mapping[Value, PinKey] = field(default_factory=dict)  # further twins, of unrolled layers
    same: dict[DimFactor, DimFactor] = field(default_factory=dict)  # factor of a twin -> the factor with other shards
    resized: dict[DimFactor, DimFactor] = field(default_factory=dict)  # -> one for all that a `shard` gave other shards

    _factors_memo: dict[tuple[Op, int, bool], list[OpFactor | None]] = field(default_factory=dict)
    _sizes_memo: dict[FactorDims, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def times(self, op: Op, factor: DimFactor) -> int:
        """Returns how many ops with this factor an op represents; ops of other layers may have factors of their own."""
        return 1 if op.times == 1 or factor not in self._unfolded else op.times

    @cached_property
    def _unfolded(self) -> frozenset[DimFactor]:
        """The factors of ops that represent only themselves."""
        unfolded = (labels for op, labels in self.labels.items() if op.times == 1)
        return frozenset(factor for labels in unfolded for factors in labels.values() for factor in factors)

    def dim_factors(self, value: Value) -> tuple[DimFactor, ...]:
        """Returns the factors of all dims of a value."""
        dims = self.value[value]
        return dims[0] if len(dims) == 1 else tuple([factor for dim in dims for factor in dim])

    def across(self, axes: FactorAxes, source: Value, target: Value, *, pieces: bool = False) -> FactorAxes:
        """Returns the axes of `source` on a value of equal shape; dims with other factors (or `pieces`) are whole."""
        feed: Iterator[tuple[Axis, ...]] = iter(axes)
        out: list[tuple[Axis, ...]] = []
        for mine, theirs in zip(self.value[source], self.value[target], strict=True):
            own = [next(feed) for _ in mine]
            out += own if mine == theirs or (not pieces and self.alike(mine, theirs)) else [()] * len(theirs)
        return tuple(out)

    def alike(self, a: Sequence[DimFactor], b: Sequence[DimFactor]) -> bool:
        """Returns whether two dims have equal factors, ignoring shard sizes."""
        return [self._sizeless(x) for x in a] == [self._sizeless(x) for x in b]

    def _sizeless(self, factor: DimFactor) -> DimFactor:
        factor = self.same.get(factor, factor)
        return self.resized.get(factor, factor)

    def sizes(self, value: Value) -> tuple[tuple[int, ...], ...]:
        """Returns the sizes of the factors, per dim."""
        dims = self.value[value]
        if (sizes := self._sizes_memo.get(dims)) is None:
            sizes = self._sizes_memo[dims] = tuple(tuple(map(self.dims.size, dim)) for dim in dims)
        return sizes

    def value_factors(self, op: Op, position: int, *, operand: bool) -> list[OpFactor | None]:
        """Returns the op's factor for each factor of an operand (or result) of `op`; None where none fits."""
        key = (op, position, operand)
        if (memo := self._factors_memo.get(key)) is not None:
            return memo
        rule = op.required_rule
        value = op.operands[position] if operand else op.results[position]
        assert value is not None
        dims = (rule.operands if operand else rule.results)[position]
        out: list[OpFactor | None] = []
        factors_of = self.labels[op]
        for labels, dim_factors in zip(dims, self.value[value], strict=True):
            factors = [(label, k) for label in labels for k in range(len(factors_of[label]))]
            is_same = tuple([factors_of[label][k] for label, k in factors]) == dim_factors
            out += factors if is_same else [None] * len(dim_factors)
        self._factors_memo[key] = out
        return out
