"""Where every value is: the layouts in which it is there, and the cheapest way to another.

Views are looked through: what one asks of a view is asked of its root, unless a form of the view is nearer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.lower.emit import Emitter
from shardlib.compiler.lower.emit_reshard import Mover
from shardlib.compiler.lower.own_rows import OwnRows
from shardlib.compiler.lower.placement import SETTLED, Owed, Placement, Placements, written
from shardlib.compiler.lower.sharded_constants import Constants
from shardlib.compiler.program.steps import Asked, Var
from shardlib.compiler.propagate.decision_units import value_factors
from shardlib.compiler.propagate.propagation import Assignment, OpFactor
from shardlib.compiler.propagate.solver.reshard_costs import place_returned_sum
from shardlib.sharding import reshard
from shardlib.sharding.reshard import Axes, FactorAxes


class Values:
    """The forms of every value of a program that is being written; `reader` is who asks for them."""

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

    def _view(self, op: Op, assignment: Assignment, operand: Var, owed: Owed = SETTLED) -> Var:
        value = op.results[0]
        assert value is not None
        assert op.rule is not None
        form = self.forms.result_form(op, 0, assignment, owed)
        if (known := self.have[value].get(form)) is not None:
            return known
        var = self.make(value, form)
        self.emitter.op(op, op.rule, assignment, [operand], [var])
        return var

    def through(self, op: Op, want: FactorAxes) -> tuple[Assignment, FactorAxes]:
        """What a view's operand must be for its result to be `want`, as nearly as the view allows."""
        assignment = {
            x: axes
            for x, axes in zip(value_factors(self.propagation, op, 0, operand=False), want, strict=True)
            if x is not None and axes and x[0] not in self.propagation.whole[op]
        }
        factors = value_factors(self.propagation, op, 0, operand=True)
        return assignment, tuple([assignment.get(x, ()) if x else () for x in factors])

    def get(self, value: Value, want: FactorAxes) -> Var:
        """The value, complete, in cut `want`."""
        if (known := self.have[value].get((want, SETTLED))) is not None:
            return known
        if value.op is not None and value.op.transparent and not self._ready_cheaply(value, want):
            assignment, operand_cut = self.through(value.op, want)
            self._view(value.op, assignment, self.get(value.op.operands[0], operand_cut))
            if (known := self.have[value].get((want, SETTLED))) is not None:
                return known
        source, steps = self._cheapest(value, want)
        return self.move(value, source, steps)

    def whole(self, value: Value) -> Var:
        """The value, complete, on every device."""
        if value.constant:
            return self.constants.get(value, ())
        return self.get(value, ((),) * len(self.propagation.dim_factors(value)))

    def as_(self, value: Value, target: Value, cut: FactorAxes) -> Var:
        """`value` in a cut of `target`, the same tensor under another annotation: with other factors, or pieces."""
        if target is not value and self._repieced(value, target):
            if (cut, SETTLED) not in self.have[target]:
                if not self.have[value]:  # a view
                    self.get(value, cut)
                self.move(target, *self._cheapest(value, cut, target), value)
        elif target is not value:
            near = self.propagation.across(cut, target, value, pieces=True)
            if not self._crossed(value, target, near, cut):
                self.have[target][self.propagation.across(near, value, target), SETTLED] = self.get(value, near)
        return self.get(target, cut)

    def _crossed(self, value: Value, target: Value, near: FactorAxes, cut: FactorAxes) -> bool:
        """Make `target` in other factors of what `value` is cut in, where that costs less than to make these whole."""
        starts = {form[0]: None for form in self.have[value]} or {self.natural(value): None}
        sizes = self.propagation.sizes(value), self.propagation.sizes(target)
        ways = [
            reshard.plan_refactor_exchanges(sizes[0], value.dtype.itemsize, near, src, sizes[1], cut) for src in starts
        ]
        priced = [
            (self.price(value, way[0]) + reshard.refactor_seconds(way[1], self.prices), way) for way in ways if way
        ]
        if not priced:
            return False
        price, (via, steps) = min(priced, key=lambda of: of[0])
        if price >= self.price(value, near):
            return False
        var, dims = self.get(value, via), [*self.forms.dims(value, via)]
        there = [*self.forms.dims(target, self.propagation.across(near, value, target))]
        reason = self._reason(target, (via, SETTLED), (cut, SETTLED), value)
        for step in steps:
            dims[step.dim] = there[step.dim] = step.after
            form = tuple(axes for dim in there for _, axes in dim), SETTLED
            out = Var(self.builder.name(target.name), written(dims), value.dtype, target, form)
            self.mover.cross(step, var, out, reason, Asked(self.reader))
            var = self.have[target][form] = out
        return True

    def _repieced(self, a: Value, b: Value) -> bool:
        """Returns whether two forms of a tensor have the same factors, and some of them in other pieces."""
        dims = zip(self.propagation.value[a], self.propagation.value[b], strict=True)
        return self.propagation.value[a] != self.propagation.value[b] and all(
            self.propagation.alike(x, y) for x, y in dims
        )

    def _ready_cheaply(self, value: Value, want: FactorAxes) -> bool:
        """Returns whether a view that exists already reaches `want` for less than its operand does."""
        forms = [form for form in self.have[value] if not form[1]]
        if not forms:
            return False
        assert value.op is not None
        _, operand_cut = self.through(value.op, want)
        return self._cheapest_price(value, want) <= self.price(value.op.operands[0], operand_cut)

    def price(self, value: Value, want: FactorAxes) -> float:
        if value.constant or (want, SETTLED) in self.have[value]:
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
        """Emit `hops` from `source`; every stop on the way is a form that others may start from.

        From a form of `origin`, which has other pieces, only the end is.
        """
        have = self.have if forms is None else forms
        var, owed = have[origin or value][source], source[1]
        for hop in hops:
            step = hop.step
            if step.kind in ("reduce_scatter", "all_reduce"):
                done = {p for a in step.axes for p in a.primes()}
                owed = Owed(tuple(a for a in owed.axes if a not in done), owed.kind)
            form = (hop.after, owed)
            out = self.var(value, form, hop.sizes)
            reason = self._reason(value, source, form, origin)
            self.mover.step(step, var, hop.dims, out, reason=reason, because=Asked(self.reader))
            var = out
            if origin is None:
                have[value].setdefault(form, var)
        if origin is not None:
            self.have[value][hops[-1].after if hops else source[0], SETTLED] = var
        return var

    def _reason(self, value: Value, source: Placement, form: Placement, origin: Value | None) -> str:
        made = self._typed(origin or value, *source)
        at = self.reader
        reader = at.name if isinstance(at, Op) else "the program" if at is None else f"output {at}"
        return f"{value.name} is {made}, {reader} needs {self._typed(value, *form)}"

    def forget(self, value: Value) -> None:
        """Give up all forms of a value; of an input, all but the one in which it is given."""
        if forms := self.have.get(value):
            self.have[value] = {} if value.op is not None else dict([next(iter(forms.items()))])

    # Pending sums ---------------------------------------------------------------------------------------------------

    def owing(self, value: Value) -> Placement | None:
        """The form of a value that exists only as a pending sum; None where it is complete."""
        if value.constant:
            return None
        if value.op is not None and value.op.transparent and not self.have[value]:
            form = self.owing(value.op.operands[0])
            if form is None:
                return None
            assignment = self.pulled(value.op, form[0])
            if assignment is None:
                return None
            return self.forms.result_form(value.op, 0, assignment, form[1])
        forms = list(self.have[value])
        return forms[0] if len(forms) == 1 and forms[0][1] else None

    def pulled(self, op: Op, cut: FactorAxes) -> Assignment | None:
        """The assignment of a view that leaves its operand in `cut`."""
        assignment: dict[OpFactor, Axes] = {}
        for x, axes in zip(value_factors(self.propagation, op, 0, operand=True), cut, strict=True):
            if axes:
                if x is None or x[0] in self.propagation.whole[op]:
                    return None
                assignment[x] = axes
        return assignment

    def native(self, value: Value, cut: FactorAxes, owed: Owed) -> Var:
        """The variable of a pending value, as it is."""
        if (known := self.have[value].get((cut, owed))) is not None:
            return known
        op = value.op
        assert op is not None
        assert op.transparent
        form = self.owing(op.operands[0])
        assert form is not None
        assignment = self.pulled(op, form[0])
        assert assignment is not None
        return self._view(op, assignment, self.native(op.operands[0], *form), owed)

    def scatter(self, value: Value, want: FactorAxes) -> None:
        """From now on a pending sum is there in cut `want`, over more of the axes that it owes; it owes the others."""
        form = self.owing(value)
        assert form is not None, "a sum is pending"
        self.native(value, *form)
        cut, owed = form
        axes = tuple(a for a in owed.axes if any(a in mine for mine in want))
        sizes, itemsize = self.propagation.sizes(value), value.dtype.itemsize
        hops = reshard.plan_route(sizes, itemsize, cut, want, axes, owed.kind, prices=self.prices)
        self.move(value, form, hops)
        self.have[value] = dict([list(self.have[value].items())[-1]])

    def natural(self, value: Value) -> FactorAxes:
        """As it was made, or as an annotation says that it is; a pending sum goes to the factors that want its axes:
        gradients land like parameters."""
        if value in self.propagation.fixed:
            return self.propagation.fixed[value][0]
        if value.op is not None and value.op.transparent and not self.have[value]:
            assignment = self.pulled(value.op, self.natural(value.op.operands[0]))
            if assignment is None:
                return ((),) * len(self.propagation.dim_factors(value))
            return self.forms.result_form(value.op, 0, assignment, SETTLED)[0]
        (cut, owed), *_ = self.have[value]
        complete = [form for form in self.have[value] if not form[1]]
        if complete:
            return complete[0][0]
        requests = self.propagation.requests
        leaves = [
            ([w.axis for w in requests.get(x, ())], self.propagation.dims.size(x))
            for x in self.propagation.dim_factors(value)
        ]
        return place_returned_sum(cut, owed.axes, leaves)

    def _typed(self, value: Value, cut: FactorAxes, owed: Owed) -> str:
        return f"[{self.forms.layout(value, cut, owed)}]"

    def var(self, value: Value, form: Placement, sizes: Sequence[int] | None = None) -> Var:
        """A variable that is to be `value` in this form."""
        return Var(self.builder.name(value.name), self.forms.layout(value, *form, sizes), value.dtype, value, form)

    def make(self, value: Value, form: Placement) -> Var:
        """The same, of which others may know already."""
        var = self.have[value][form] = self.var(value, form)
        return var
