"""Values of which a device has the rows of the groups that it owns: where they are, and which rows are not of these."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardlib.compiler.graph.ir import Value
from shardlib.compiler.graph.local_sort import Noted
from shardlib.compiler.lower.local_forms.local_builder import LocalForm
from shardlib.compiler.lower.placement import Owed, Placement
from shardlib.compiler.program.steps import Var
from shardlib.compiler.program.sym_int import Sym, local_size, offset, product
from shardlib.core.aten.op_names import ADD, ARANGE, FLATTEN, GE, LT, MASKED_FILL, MUL, OR, PAD, SLICE, UNSQUEEZE
from shardlib.sharding import reshard
from shardlib.sharding.reshard import Axes, FactorAxes

if TYPE_CHECKING:
    from shardlib.compiler.lower.value_layouts import Values

Leaves = Sequence[tuple[int, Axes]]  # sizes, major first, and what cuts each


class OwnRows:
    """Such values of a program that is being written; in all other rows there is anything."""

    def __init__(self, values: Values) -> None:
        self.values, self.propagation = values, values.propagation
        self.forms: dict[Value, dict[Placement, Var]] = defaultdict(dict)

    def form(self, value: Value) -> Placement | None:
        """A form of a value that has the rows of own groups only."""
        if self.forms[value] or value.op is None or not value.op.transparent or self.values.have[value]:
            return next(iter(self.forms[value]), None)
        form = self.form(value.op.operands[0]) if value.rows else None
        assignment = self.values.pulled(value.op, form[0]) if form else None
        if form is None or assignment is None:
            return None
        return self.values.forms.result_form(value.op, 0, assignment, form[1])

    def make(self, value: Value, form: Placement) -> Var:
        """A variable that is to be the value in this form."""
        var = self.forms[value][form] = self.values.var(value, form)
        return var

    def get(self, value: Value, want: FactorAxes) -> Var:
        """The rows of own groups, in cut `want`."""
        form = self.form(value)
        assert form is not None
        self._seen(value)
        if (known := self.forms[value].get((want, form[1]))) is not None:
            return known
        sizes, prices = self.propagation.sizes(value), self.values.prices
        hops = reshard.plan_route(sizes, value.dtype.itemsize, form[0], want, prices=prices)
        return self.values.move(value, form, hops, forms=self.forms)

    def as_is(self, value: Value, form: Placement) -> Var:
        """The variable of rows that are here only."""
        self._seen(value)
        return self.forms[value][form]

    def _seen(self, value: Value) -> Placement:
        """A form of rows of own groups, or of rows that are here only; made, if a view has it."""
        if not self.forms[value]:
            op = value.op
            assert op is not None
            assert op.rule is not None
            before = self._seen(source := op.operands[0])
            assignment = self.values.pulled(op, before[0])
            assert assignment is not None
            var = self.make(value, self.values.forms.result_form(op, 0, assignment, before[1]))
            self.values.emitter.op(op, op.rule, assignment, [self.forms[source][before]], [var])
        return next(iter(self.forms[value]))

    def settle(self, value: Value) -> None:
        """Make a pending sum of a value of which there are only rows of own groups: the others are 0."""
        if value.constant or self.values.have[value]:
            return
        if self.forms[value]:
            (cut, owed), var = next(iter(self.forms[value].items()))
            kind = "max" if value.dtype == torch.bool else "sum"
            self.zeroed(value, cut, owed.axes, var, self.values.make(value, (cut, Owed(owed.axes, kind))))
        elif value.op is not None and value.op.transparent:
            self.settle(value.op.operands[0])

    def zeroed(self, value: Value, cut: FactorAxes, axes: Axes, source: Var, out: Var) -> None:
        """Write `out`: `source` with zeros in rows that are not of own groups, of those that are cut over `axes`."""
        assert value.rows is not None
        assert value.op is not None
        ends, dim, emitter = value.rows.ends, value.rows.dim, self.values.emitter
        form = LocalForm(emitter, value.op, {}, (), {})
        leaves, at = self.propagation.value[value], sum(map(len, self.propagation.value[value][:dim]))
        if ends.counted is not None:
            rows = {x: cut[at + k] for k, x in enumerate(leaves[dim]) if cut[at + k]}
            emitter.noted.append(Noted(ends.counted, rows, rows=True))
        mask = others(
            form,
            self.values.whole(ends),
            [(self.propagation.dims.size(x), cut[at + k]) for k, x in enumerate(leaves[dim])],
            [
                (self.propagation.dims.size(x), axes * (k == 0))
                for k, x in enumerate(self.propagation.group_factors[ends])
            ],
            own=ends.counted is not None,
        )
        for _ in range(dim + 1, len(value.shape)):
            mask = form.op(UNSQUEEZE, mask, -1)
        why = f"rows of other devices' groups of {value.name}"
        self.values.builder.compute(MASKED_FILL, (source, mask, 0), {}, [out], why)


def others(form: LocalForm, ends: Var, rows: Leaves, groups: Leaves, *, own: bool = False) -> Var:
    """Write a mask of a device's rows: True where one is not of the groups that the device owns, which `ends` says, of
    all rows or of its `own`.

    What is behind the last group goes with it.
    """
    count, place = product([local_size(size, axes) for size, axes in rows]), None
    if own:
        place = form.op(ARANGE, 0, count, dtype=torch.int64, device=form.device)
    for size, axes in rows if not own else ():
        here, first = local_size(size, axes), offset(size, axes)
        mine: Var = form.op(ARANGE, first, first + here, dtype=torch.int64, device=form.device)
        if place is not None:
            place = form.op(MUL, form.op(UNSQUEEZE, place, 1), int(size))
            mine = form.op(FLATTEN, form.op(ADD, place, mine), 0, 1)
        place = mine
    (size, axes), *inner = groups
    first, held, each = offset(size, axes), local_size(size, axes), math.prod(n for n, _ in inner)
    edges = form.op(PAD, form.op(SLICE, ends, 0, 0, each * int(size) - 1), [1, 0], 0)
    edges = form.op(PAD, edges, [0, 1], math.prod(n for n, _ in rows))

    def edge(group: Sym | int) -> Var:
        found: Var = form.op(SLICE, edges, 0, group, group + 1)
        return found

    before = form.op(LT, place, edge(first * each))
    behind = form.op(GE, place, edge((first + held) * each))
    mask: Var = form.op(OR, before, behind)
    return mask
