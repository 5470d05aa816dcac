"""Tracks values that are valid only in the rows of groups that a device owns, as between the products of experts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardlib.compiler.graph.ir import Value
from shardlib.compiler.graph.local_sort import Noted
from shardlib.compiler.lower.local_forms.local_builder import LocalForm
from shardlib.compiler.lower.placement import Partial, Placement
from shardlib.compiler.program.steps import Var
from shardlib.compiler.program.sym_int import Sym, local_size, offset, product
from shardlib.core.aten.op_names import ADD, ARANGE, FLATTEN, GE, LT, MASKED_FILL, MUL, OR, PAD, SLICE, UNSQUEEZE
from shardlib.sharding import reshard
from shardlib.sharding.reshard import Axes, FactorAxes

if TYPE_CHECKING:
    from shardlib.compiler.lower.value_layouts import Values

Factors = Sequence[tuple[int, Axes]]  # sizes, major first, each with the axes that shard it


class OwnRows:
    """Holds the forms of such values. Rows of other devices' groups are undefined."""

    def __init__(self, values: Values) -> None:
        self.values, self.propagation = values, values.propagation
        self.forms: dict[Value, dict[Placement, Var]] = defaultdict(dict)

    def form(self, value: Value) -> Placement | None:
        """Returns a form that is valid in rows of own groups only, or None."""
        if self.forms[value] or value.op is None or not value.op.transparent or self.values.have[value]:
            return next(iter(self.forms[value]), None)
        form = self.form(value.op.operands[0]) if value.rows else None
        assignment = self.values.assign_view(value.op, form[0]) if form else None
        if form is None or assignment is None:
            return None
        return self.values.forms.result_form(value.op, 0, assignment, form[1])

    def make(self, value: Value, form: Placement) -> Var:
        """Returns a new variable for the value in this form."""
        var = self.forms[value][form] = self.values.var(value, form)
        return var

    def get(self, value: Value, want: FactorAxes) -> Var:
        """Returns the rows of own groups in sharding `want`."""
        form = self.form(value)
        assert form is not None
        self._emit_views(value)
        if (existing := self.forms[value].get((want, form[1]))) is not None:
            return existing
        sizes, prices = self.propagation.sizes(value), self.values.prices
        hops = reshard.plan_route(sizes, value.dtype.itemsize, form[0], want, prices=prices)
        return self.values.move(value, form, hops, forms=self.forms)

    def as_is(self, value: Value, form: Placement) -> Var:
        """Returns the variable of a form as it is."""
        self._emit_views(value)
        return self.forms[value][form]

    def _emit_views(self, value: Value) -> Placement:
        """Returns a form of the value; emits the views that lead to it."""
        if not self.forms[value]:
            op = value.op
            assert op is not None
            before = self._emit_views(source := op.operands[0])
            assignment = self.values.assign_view(op, before[0])
            assert assignment is not None
            var = self.make(value, self.values.forms.result_form(op, 0, assignment, before[1]))
            self.values.emitter.op(op, op.required_rule, assignment, [self.forms[source][before]], [var])
        return next(iter(self.forms[value]))

    def settle(self, value: Value) -> None:
        """Emits a partial sum of a value that has rows of own groups only: other rows become 0."""
        if value.constant or self.values.have[value]:
            return
        if self.forms[value]:
            (sharding, partial), var = next(iter(self.forms[value].items()))
            kind = "max" if value.dtype == torch.bool else "sum"
            self.zeroed(
                value, sharding, partial.axes, var, self.values.make(value, (sharding, Partial(partial.axes, kind)))
            )
        elif value.op is not None and value.op.transparent:
            self.settle(value.op.operands[0])

    def zeroed(self, value: Value, sharding: FactorAxes, axes: Axes, source: Var, out: Var) -> None:
        """Emits `out`: `source` with zeros in rows of groups that other devices along `axes` own."""
        assert value.rows is not None
        assert value.op is not None
        ends, dim, emitter = value.rows.ends, value.rows.dim, self.values.emitter
        form = LocalForm(emitter, value.op, {}, (), {})
        leaves, at = self.propagation.value[value], sum(map(len, self.propagation.value[value][:dim]))
        if ends.counted is not None:
            rows = {x: sharding[at + k] for k, x in enumerate(leaves[dim]) if sharding[at + k]}
            emitter.noted.append(Noted(ends.counted, rows, rows=True))
        mask = mask_of_foreign_rows(
            form,
            self.values.whole(ends),
            [(self.propagation.dims.size(x), sharding[at + k]) for k, x in enumerate(leaves[dim])],
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


def mask_of_foreign_rows(form: LocalForm, ends: Var, rows: Factors, groups: Factors, *, own: bool = False) -> Var:
    """Emits a mask of a device's rows: True where a row belongs to a group of another device.

    `ends` has the end of each group, among all rows, or among the device's `own` rows. Rows behind the last group
    belong to it.
    """
    count, place = product([local_size(size, axes) for size, axes in rows]), None
    if own:
        place = form.op(ARANGE, 0, count, dtype=torch.int64, device=form.device)
    for size, axes in rows if not own else ():
        count_here, first = local_size(size, axes), offset(size, axes)
        mine: Var = form.op(ARANGE, first, first + count_here, dtype=torch.int64, device=form.device)
        if place is not None:
            place = form.op(MUL, form.op(UNSQUEEZE, place, 1), int(size))
            mine = form.op(FLATTEN, form.op(ADD, place, mine), 0, 1)
        place = mine
    (size, axes), *inner = groups
    first, held, each = offset(size, axes), local_size(size, axes), math.prod(n for n, _ in inner)
    edges = form.op(PAD, form.op(SLICE, ends, 0, 0, each * int(size) - 1), [1, 0], 0)
    edges = form.op(PAD, edges, [0, 1], math.prod(n for n, _ in rows))

    def edge(group: Sym | int) -> Var:
        row: Var = form.op(SLICE, edges, 0, group, group + 1)
        return row

    before = form.op(LT, place, edge(first * each))
    behind = form.op(GE, place, edge((first + held) * each))
    mask: Var = form.op(OR, before, behind)
    return mask
