"""In which layouts an op's results are made, and how a layout of a value is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.propagate.decision_units import value_factors
from shardlib.compiler.propagate.propagation import Assignment, Propagation
from shardlib.rules.rule import OWNED
from shardlib.sharding.layout import Factor, Layout, PartialSum
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.reshard import Axes, FactorAxes


class Owed(NamedTuple):
    """What a value still owes: a reduction of `kind` over `axes`."""

    axes: Axes = ()
    kind: str = "sum"

    def __bool__(self) -> bool:
        return bool(self.axes)


SETTLED = Owed()  # nothing is pending
Placement = tuple[FactorAxes, Owed]  # one layout of a value: its cut, and what is pending


class Placements:
    """The placements of the values of one program."""

    def __init__(self, propagation: Propagation, mesh: Mesh) -> None:
        self.propagation = propagation
        self._order = {name: i for i, name in enumerate(mesh.axis_names)}
        self._layouts: dict[Any, Layout] = {}

    def result_form(self, op: Op, i: int, assignment: Assignment, owed: Owed) -> Placement:
        assert op.rule is not None
        factors = value_factors(self.propagation, op, i, operand=False)
        cut = tuple([assignment.get(x, ()) if x else () for x in factors])
        axes = list(owed.axes)
        kind = owed.kind
        for x, cut_axes in assignment.items():
            if x not in factors and cut_axes:
                if x[0] not in op.rule.reduce:
                    raise AssertionError(
                        f"{op}: cut factor {x[0]} is missing from result {i} and is no declared reduction"
                    )
                if mine := op.rule.partial_kind(i, x[0]):
                    if axes and {kind, mine} == {"sum", OWNED}:
                        mine = OWNED  # until rows of others are 0
                    elif axes and kind != mine:
                        raise AssertionError(f"{op}: result {i} would owe a {kind} and a {mine}")
                    axes += [a for a in cut_axes if not any(a in of for of in (axes, *cut))]  # the rest went round
                    kind = mine
        # In the order of the mesh: who owes the same can be added up, whichever dims it was summed over.
        return cut, Owed(tuple(sorted(axes, key=lambda a: (self._order[a.name], a.pre))), kind)

    def dims(self, value: Value, cut: FactorAxes) -> tuple[Any, ...]:
        """Per dim, `(size, axes)` per leaf."""
        if value.constant or value.manual:
            return tuple(((n, ()),) for n in value.shape)
        axes = iter(cut)
        return tuple(tuple([(n, next(axes)) for n in sizes]) for sizes in self.propagation.sizes(value))

    def layout(self, value: Value, cut: FactorAxes, owed: Owed = SETTLED, sizes: Sequence[int] | None = None) -> Layout:
        what = value.shape if value.constant or value.manual else self.propagation.sizes(value)
        key = what, cut, owed, None if sizes is None else tuple(sizes)
        if (known := self._layouts.get(key)) is None:  # layers have the same ones
            known = self._layouts[key] = written(self.dims(value, cut), owed, key[3])
        return known


def written(dims: Sequence[Any], owed: Owed = SETTLED, sizes: Sequence[int] | None = None) -> Layout:
    """The layout of dims, `(size, axes)` per leaf; of other `sizes`, if given."""
    pending = (PartialSum(Axis.merge(owed.axes), owed.kind),) if owed else ()
    feed = iter(n for dim in dims for n, _ in dim) if sizes is None else iter(sizes)
    return Layout(tuple(tuple(Factor(next(feed), a) for _, a in dim) for dim in dims), pending).canonical
