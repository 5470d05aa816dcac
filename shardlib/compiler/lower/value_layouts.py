"""Holds the forms of every value: the layouts in which it exists, and the cheapest reshard to another.

A request for a view is a request for its root, unless a form of the view is nearer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.lower.emit import Emitter
from shardlib.compiler.lower.emit_reshard import Mover
from shardlib.compiler.lower.own_rows import OwnRows
from shardlib.compiler.lower.placement import COMPLETE, Partial, Placement, Placements, written
from shardlib.compiler.lower.sharded_constants import Constants
from shardlib.compiler.program.steps import Asked, Var
from shardlib.compiler.propagate.propagation import Assignment, OpFactor
from shardlib.compiler.propagate.solver.reshard_costs import place_returned_sum
from shardlib.sharding import reshard
from shardlib.sharding.reshard import Axes, FactorAxes


class Values:
    """Maps every value to its forms; `reader` is the op or output that requests them."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter, self.propagation, self.builder = emitter, emitter.propagation, emitter.builder
        self.forms = Placements(emitter.propagation, emitter.builder.mesh)
        self.mover = Mover(emitter.builder)
        self.prices = reshard.Prices.for_mesh(emitter.builder.mesh)
        self.have: dict[Value, dict[Placement, Var]] = defaultdict(dict)
        self.own = OwnRows(self)
        self.constants = Constants(self)
        self.reader: Op | int | None = None

    # Another layout -------------------------------------------------------------------------------------------------

    def _view(self, op: Op, assignment: Assignment, operand: Var, partial: Partial = COMPLETE) -> Var:
        value = op.results[0]
        assert value is not None
        form = self.forms.result_form(op, 0, assignment, partial)
        if (existing := self.have[value].get(form)) is not None:
            return existing
        var = self.make(value, form)
        self.emitter.op(op, op.required_rule, assignment, [operand], [var])
        return var

    def through(self, op: Op, want: FactorAxes) -> tuple[Assignment, FactorAxes]:
        """Returns the assignment and the operand's sharding that give a view `want`, as nearly as the view allows."""
        assignment = {
            x: axes
            for x, axes in zip(self.propagation.value_factors(op, 0, operand=False), want, strict=True)
            if x is not None and axes and x[0] not in self.propagation.whole[op]
        }
        factors = self.propagation.value_factors(op, 0, operand=True)
        return assignment, tuple([assignment.get(x, ()) if x else () for x in factors])

    def get(self, value: Value, want: FactorAxes) -> Var:
        """Returns the value, complete, in sharding `want`."""
        if (existing := self.have[value].get((want, COMPLETE))) is not None:
            return existing
        if value.op is not None and value.op.transparent and not self._ready_cheaply(value, want):
            assignment, operand_axes = self.through(value.op, want)
            self._view(value.op, assignment, self.get(value.op.operands[0], operand_axes))
            if (existing := self.have[value].get((want, COMPLETE))) is not None:
                return existing
        source, steps = self._cheapest(value, want)
        return self.move(value, source, steps)

    def whole(self, value: Value) -> Var:
        """Returns the whole value, complete, on every device."""
        if value.constant:
            return self.constants.get(value, ())
        return self.get(value, ((),) * len(self.propagation.dim_factors(value)))

    def as_(self, value: Value, target: Value, sharding: FactorAxes) -> Var:
        """Returns `value` as `target`, the same tensor under another annotation, with other factors or shard sizes."""
        if target is not value and self._differs_in_sizes(value, target):
            if (sharding, COMPLETE) not in self.have[target]:
                if not self.have[value]:  # a view
                    self.get(value, sharding)
                self.move(target, *self._cheapest(value, sharding, target), value)
        elif target is not value:
            near = self.propagation.across(sharding, target, value, pieces=True)
            if not self._crossed(value, target, near, sharding):
                self.have[target][self.propagation.across(near, value, target), COMPLETE] = self.get(value, near)
        return self.get(target, sharding)

    def _crossed(self, value: Value, target: Value, near: FactorAxes, sharding: FactorAxes) -> bool:
        """Emits `target` from shards of `value` by exchanges between factors; returns False if gathering is cheaper."""
        starts = {form[0]: None for form in self.have[value]} or {self.natural(value): None}
        sizes = self.propagation.sizes(value), self.propagation.sizes(target)
        ways = [
            reshard.plan_refactor_exchanges(sizes[0], value.dtype.itemsize, near, src, sizes[1], sharding)
            for src in starts
        ]
        priced = [
            (self.price(value, way[0]) + reshard.refactor_seconds(way[1], self.prices), way) for way in ways if way
        ]
        if not priced:
            return False
        price, (via, steps) = min(priced, key=lambda option: option[0])
        if price >= self.price(value, near):
            return False
        var, dims = self.get(value, via), [*self.forms.dims(value, via)]
        target_dims = [*self.forms.dims(target, self.propagation.across(near, value, target))]
        reason = self._reason(target, (via, COMPLETE), (sharding, COMPLETE), value)
        for step in steps:
            dims[step.dim] = target_dims[step.dim] = step.after
            form = tuple(axes for dim in target_dims for _, axes in dim), COMPLETE
            out = Var(self.builder.name(target.name), written(dims), value.dtype, target, form)
            self.mover.cross(step, var, out, reason, Asked(self.reader))
            var = self.have[target][form] = out
        return True

    def _differs_in_sizes(self, a: Value, b: Value) -> bool:
        """Returns whether two annotations of a tensor have the same factors, some with other shard sizes."""
        dims = zip(self.propagation.value[a], self.propagation.value[b], strict=True)
        return self.propagation.value[a] != self.propagation.value[b] and all(
            self.propagation.alike(x, y) for x, y in dims
        )

    def _ready_cheaply(self, value: Value, want: FactorAxes) -> bool:
        """Returns whether a form of a view reaches `want` at less cost than its operand does."""
        forms = [form for form in self.have[value] if not form[1]]
        if not forms:
            return False
        assert value.op is not None
        _, operand_axes = self.through(value.op, want)
        return self._cheapest_price(value, want) <= self.price(value.op.operands[0], operand_axes)

    def price(self, value: Value, want: FactorAxes) -> float:
        """Returns the estimated seconds of a reshard to `want`; 0 if the form exists."""
        if value.constant or (want, COMPLETE) in self.have[value]:
            return 0.0
        prices = [self._cheapest_price(value, want)] if self.have[value] else []
        if value.op is not None and value.op.transparent:
            prices.append(self.price(value.op.operands[0], self.through(value.op, want)[1]))
        return min(prices)

    def _cheapest_price(self, value: Value, want: FactorAxes) -> float:
        return reshard.estimate_seconds(self._cheapest(value, want)[1], self.prices)

    def _cheapest(
        self, value: Value, want: FactorAxes, target: Value | None = None
    ) -> tuple[Placement, tuple[reshard.RouteStep, ...]]:
        sizes, itemsize = self.propagation.sizes(value), value.dtype.itemsize
        into = None if target is None else self.propagation.sizes(target)
        options = [
            (form, reshard.plan_route(sizes, itemsize, form[0], want, form[1].axes, form[1].kind, into, self.prices))
            for form in self.have[value]
        ]
        return min(options, key=lambda o: (reshard.estimate_seconds(o[1], self.prices), len(o[1])))

    def move(
        self,
        value: Value,
        source: Placement,
        hops: Sequence[reshard.RouteStep],
        origin: Value | None = None,
        forms: dict[Value, dict[Placement, Var]] | None = None,
    ) -> Var:
        """Emits `hops` from `source`; every intermediate result is recorded as a form of the value.

        If `source` is a form of `origin`, which has other shard sizes, only the last result is recorded.
        """
        have = self.have if forms is None else forms
        var, partial = have[origin or value][source], source[1]
        for hop in hops:
            step = hop.step
            if step.kind in ("reduce_scatter", "all_reduce"):
                done = {p for a in step.axes for p in a.primes()}
                partial = Partial(tuple(a for a in partial.axes if a not in done), partial.kind)
            form = (hop.after, partial)
            out = self.var(value, form, hop.sizes)
            reason = self._reason(value, source, form, origin)
            self.mover.step(step, var, hop.dims, out, reason=reason, because=Asked(self.reader))
            var = out
            if origin is None:
                have[value].setdefault(form, var)
        if origin is not None:
            self.have[value][hops[-1].after if hops else source[0], COMPLETE] = var
        return var

    def _reason(self, value: Value, source: Placement, form: Placement, origin: Value | None) -> str:
        source_text = self._typed(origin or value, *source)
        at = self.reader
        reader = at.name if isinstance(at, Op) else "the program" if at is None else f"output {at}"
        return f"{value.name} is {source_text}, {reader} needs {self._typed(value, *form)}"

    def forget(self, value: Value) -> None:
        """Drops all forms of a value; an input keeps its original form."""
        if forms := self.have.get(value):
            self.have[value] = {} if value.op is not None else dict([next(iter(forms.items()))])

    # Partial sums ---------------------------------------------------------------------------------------------------

    def partial_form(self, value: Value) -> Placement | None:
        """Returns the form of a value that exists only as a partial sum; None if it is complete."""
        if value.constant:
            return None
        if value.op is not None and value.op.transparent and not self.have[value]:
            form = self.partial_form(value.op.operands[0])
            if form is None:
                return None
            assignment = self.assign_view(value.op, form[0])
            if assignment is None:
                return None
            return self.forms.result_form(value.op, 0, assignment, form[1])
        forms = list(self.have[value])
        return forms[0] if len(forms) == 1 and forms[0][1] else None

    def assign_view(self, op: Op, sharding: FactorAxes) -> Assignment | None:
        """Returns the assignment of a view of an operand in `sharding`; None if the view does not allow that."""
        assignment: dict[OpFactor, Axes] = {}
        for x, axes in zip(self.propagation.value_factors(op, 0, operand=True), sharding, strict=True):
            if axes:
                if x is None or x[0] in self.propagation.whole[op]:
                    return None
                assignment[x] = axes
        return assignment

    def native(self, value: Value, sharding: FactorAxes, partial: Partial) -> Var:
        """Returns the variable of a partial sum as it is."""
        if (existing := self.have[value].get((sharding, partial))) is not None:
            return existing
        op = value.op
        assert op is not None
        assert op.transparent
        form = self.partial_form(op.operands[0])
        assert form is not None
        assignment = self.assign_view(op, form[0])
        assert assignment is not None
        return self._view(op, assignment, self.native(op.operands[0], *form), partial)

    def scatter(self, value: Value, want: FactorAxes) -> None:
        """Replaces a partial sum by its reduce_scatter to sharding `want`; axes that `want` lacks stay partial."""
        form = self.partial_form(value)
        assert form is not None, "the value is a partial sum"
        self.native(value, *form)
        sharding, partial = form
        axes = tuple(a for a in partial.axes if any(a in mine for mine in want))
        sizes, itemsize = self.propagation.sizes(value), value.dtype.itemsize
        hops = reshard.plan_route(sizes, itemsize, sharding, want, axes, partial.kind, prices=self.prices)
        self.move(value, form, hops)
        self.have[value] = dict([list(self.have[value].items())[-1]])

    def natural(self, value: Value) -> FactorAxes:
        """Returns the sharding of a value by its annotation, or by its first complete form.

        The axes of a partial sum go to the factors that request them, so that gradients are sharded like parameters.
        """
        if value in self.propagation.pinned_values:
            return self.propagation.pinned_values[value][0]
        if value.op is not None and value.op.transparent and not self.have[value]:
            assignment = self.assign_view(value.op, self.natural(value.op.operands[0]))
            if assignment is None:
                return ((),) * len(self.propagation.dim_factors(value))
            return self.forms.result_form(value.op, 0, assignment, COMPLETE)[0]
        (sharding, partial), *_ = self.have[value]
        complete = [form for form in self.have[value] if not form[1]]
        if complete:
            return complete[0][0]
        requests = self.propagation.requests
        leaves = [
            ([w.axis for w in requests.get(x, ())], self.propagation.dims.size(x))
            for x in self.propagation.dim_factors(value)
        ]
        return place_returned_sum(sharding, partial.axes, leaves)

    def _typed(self, value: Value, sharding: FactorAxes, partial: Partial) -> str:
        return f"[{self.forms.layout(value, sharding, partial)}]"

    def var(self, value: Value, form: Placement, sizes: Sequence[int] | None = None) -> Var:
        """Returns a new variable for `value` in this form."""
        return Var(self.builder.name(value.name), self.forms.layout(value, *form, sizes), value.dtype, value, form)

    def make(self, value: Value, form: Placement) -> Var:
        """Returns a new variable for `value` in this form, and records the form before the variable is written."""
        var = self.have[value][form] = self.var(value, form)
        return var
