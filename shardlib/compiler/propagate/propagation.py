"""The state of propagation: the factors of every dim, the mesh axes that they request, and the fixed layouts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.dim_factors import DimFactor, Dims
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.reshard import FactorAxes

OpFactor = tuple[str, int]  # an op's factor: the rule's label, and which of its leaves
Assignment = Mapping[OpFactor, tuple[Axis, ...]]  # the mesh axes on the factors of one op
Message = tuple[str, tuple[Axis, ...], float]  # its kind, along which axes, and the bytes that a device sends


@dataclass
class AxisRequest:
    """One mesh axis (a prime part) that a factor requests, and the annotation it comes from; or it was `offered`."""

    axis: Axis
    source: str
    offered: bool = False


@dataclass
class Propagation:
    """The factors, requests and fixed layouts that annotations lead to through the rules of ops; see the fields."""

    dims: Dims = field(default_factory=Dims)
    value: dict[Value, tuple[tuple[DimFactor, ...], ...]] = field(default_factory=dict)  # leaves per dim
    labels: dict[Op, dict[str, tuple[DimFactor, ...]]] = field(
        default_factory=dict
    )  # leaves per factor of the op's rule
    whole: dict[Op, frozenset[str]] = field(default_factory=dict)  # factors that must not be cut here
    requests: dict[DimFactor, list[AxisRequest]] = field(default_factory=dict)
    names: dict[DimFactor, str] = field(default_factory=dict)
    fixed: dict[Value, tuple[FactorAxes, FixedLayout]] = field(
        default_factory=dict
    )  # results of constraints, and fixed inputs
    outputs: dict[int, tuple[FactorAxes, FixedLayout]] = field(default_factory=dict)  # by output position
    doors: dict[Op, tuple[FactorAxes, FixedLayout]] = field(
        default_factory=dict
    )  # how a shard_map body takes its argument
    # What is fixed in other factors, or other pieces, than its value has: outputs, doors, inputs, constraints' results.
    apart: dict[int | Op | Value, Value] = field(default_factory=dict)
    tight: Mapping[int | Op | Value, frozenset[int]] = field(default_factory=dict)  # dims whose cuts stand in the way
    loose: Mapping[int | Op | Value, frozenset[int]] = field(default_factory=dict)  # those that were let stand apart
    met: Mapping[Value, tuple[tuple[Value, int] | None, ...]] = field(default_factory=dict)  # values as inputs met them
    copies: dict[Value, int | Op | Value] = field(default_factory=dict)  # further values for what stands apart
    twins: dict[Value, Value] = field(default_factory=dict)  # what stands apart: the value that it is
    same: dict[DimFactor, DimFactor] = field(
        default_factory=dict
    )  # leaves that differ from another's in their pieces only
    moves: dict[Op, set[int]] = field(default_factory=dict)  # dims that a `shard` cuts into other pieces
    kin: dict[DimFactor, DimFactor] = field(default_factory=dict)  # one leaf for all that differ in their pieces only
    owners: dict[Value, tuple[DimFactor, ...]] = field(
        default_factory=dict
    )  # ends of groups: the leaves that count these
    factors: dict[tuple[Op, int, bool], list[OpFactor | None]] = field(default_factory=dict)  # memo of `value_factors`
    known_sizes: dict[object, tuple[tuple[int, ...], ...]] = field(default_factory=dict)  # memo of `sizes`
    hidden: Collection[Value] = ()  # values whose messages nobody waits for
    sends: Callable[[Op, Assignment], tuple[Message, ...]] = lambda op, cut: ()  # what an op sends while it runs

    def times(self, op: Op, leaf: DimFactor) -> int:
        """How many ops an op stands for that have the same leaf, not one of their own layer each."""
        return 1 if op.times == 1 or leaf not in self._others else op.times

    @cached_property
    def _others(self) -> frozenset[DimFactor]:
        """The leaves of ops that stand for themselves alone."""
        alone = (of for op, of in self.labels.items() if op.times == 1)
        return frozenset(leaf for labels in alone for leaves in labels.values() for leaf in leaves)

    def leaves(self, value: Value) -> tuple[DimFactor, ...]:
        dims = self.value[value]
        return dims[0] if len(dims) == 1 else tuple([leaf for dim in dims for leaf in dim])

    def across(self, cut: FactorAxes, source: Value, target: Value, *, pieces: bool = False) -> FactorAxes:
        """A cut of `source` on a value of the same shape; dims whose factors (or `pieces`) differ are whole."""
        feed: Iterator[tuple[Axis, ...]] = iter(cut)
        out: list[tuple[Axis, ...]] = []
        for mine, theirs in zip(self.value[source], self.value[target], strict=True):
            axes = [next(feed) for _ in mine]
            out += axes if mine == theirs or (not pieces and self.alike(mine, theirs)) else [()] * len(theirs)
        return tuple(out)

    def alike(self, a: Sequence[DimFactor], b: Sequence[DimFactor]) -> bool:
        """Returns whether two dims have the same factors, in whatever pieces."""
        return [self._kin(x) for x in a] == [self._kin(x) for x in b]

    def _kin(self, leaf: DimFactor) -> DimFactor:
        leaf = self.same.get(leaf, leaf)
        return self.kin.get(leaf, leaf)

    def sizes(self, value: Value) -> tuple[tuple[int, ...], ...]:
        """The sizes of the leaves, per dim."""
        dims = self.value[value]
        if (known := self.known_sizes.get(dims)) is None:
            known = self.known_sizes[dims] = tuple(tuple(map(self.dims.size, dim)) for dim in dims)
        return known

    def operand_factors(self, op: Op, position: int, dim: int) -> tuple[OpFactor, ...]:
        """The op's factors, leaf by leaf, along one dim of an operand."""
        assert op.rule is not None
        return self._factors(op, op.rule.operands[position][dim])

    def result_factors(self, op: Op, index: int, dim: int) -> tuple[OpFactor, ...]:
        assert op.rule is not None
        return self._factors(op, op.rule.results[index][dim])

    def _factors(self, op: Op, labels: Sequence[str]) -> tuple[OpFactor, ...]:
        known = self.labels[op]
        return tuple([(label, k) for label in labels for k in range(len(known[label]))])
