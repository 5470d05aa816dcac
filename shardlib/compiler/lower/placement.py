"""Derives the layouts of an op's results from its assignment, and writes layouts of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.propagation import Assignment, Propagation
from shardlib.rules.rule import OWNED
from shardlib.sharding.layout import Factor, Layout, PartialSum
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.reshard import Axes, FactorAxes


class Partial(NamedTuple):
    """The reduction that a value still needs: `kind` over `axes`."""

    axes: Axes = ()
    kind: str = "sum"

    def __bool__(self) -> bool:
        return bool(self.axes)


COMPLETE = Partial()  # no reduction is missing
Placement = tuple[FactorAxes, Partial]  # one form of a value: the axes of its factors, and the missing reduction


class Placements:
    """Computes placements and layouts of the values of one program."""

    def __init__(self, propagation: Propagation, mesh: Mesh) -> None:
        self.propagation = propagation
        self._order = {name: i for i, name in enumerate(mesh.axis_names)}
        self._layouts: dict[Any, Layout] = {}

    def result_form(self, op: Op, i: int, assignment: Assignment, partial: Partial) -> Placement:
        """Returns the placement of result `i` of an op, whose linear operands are `partial`."""
        rule = op.required_rule
        factors = self.propagation.value_factors(op, i, operand=False)
        sharding = tuple([assignment.get(x, ()) if x else () for x in factors])
        axes = list(partial.axes)
        kind = partial.kind
        for x, factor_axes in assignment.items():
            if x not in factors and factor_axes:
                if x[0] not in rule.reduce:
                    raise AssertionError(
                        f"{op}: cut factor {x[0]} is missing from result {i} and is no declared reduction"
                    )
                if mine := rule.partial_kind(i, x[0]):
                    if axes and {kind, mine} == {"sum", OWNED}:
                        mine = OWNED  # until rows of others are 0
                    elif axes and kind != mine:
                        raise AssertionError(f"{op}: result {i} would owe a {kind} and a {mine}")
                    # The local form already reduced over axes that shard the result, too.
                    axes += [a for a in factor_axes if not any(a in taken for taken in (axes, *sharding))]
                    kind = mine
        # In mesh order, so that sums over the same axes are equal, whichever dims were summed first.
        return sharding, Partial(tuple(sorted(axes, key=lambda a: (self._order[a.name], a.pre))), kind)

    def dims(self, value: Value, sharding: FactorAxes) -> tuple[Any, ...]:
        """Returns `(size, axes)` per factor, per dim."""
        if value.constant or value.manual:
            return tuple(((n, ()),) for n in value.shape)
        axes = iter(sharding)
        return tuple(tuple([(n, next(axes)) for n in sizes]) for sizes in self.propagation.sizes(value))

    def layout(
        self, value: Value, sharding: FactorAxes, partial: Partial = COMPLETE, sizes: Sequence[int] | None = None
    ) -> Layout:
        shape = value.shape if value.constant or value.manual else self.propagation.sizes(value)
        key = shape, sharding, partial, None if sizes is None else tuple(sizes)
        if (layout := self._layouts.get(key)) is None:  # equal layers share layouts
            layout = self._layouts[key] = written(self.dims(value, sharding), partial, key[3])
        return layout


def written(dims: Sequence[Any], partial: Partial = COMPLETE, sizes: Sequence[int] | None = None) -> Layout:
    """Returns the layout of dims, `(size, axes)` per factor, with other `sizes` if they are not None."""
    pending = (PartialSum(Axis.merge(partial.axes), partial.kind),) if partial else ()
    feed = iter(n for dim in dims for n, _ in dim) if sizes is None else iter(sizes)
    return Layout(tuple(tuple(Factor(next(feed), a) for _, a in dim) for dim in dims), pending).canonical
