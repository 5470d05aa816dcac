"""Lowers decisions to the per-device program.

Ops are lowered in program order. Each op gets its operands in the sharding that was decided (`Values`), or as partial
sums if it may (`PartialSums`). Then it is emitted (`Emitter`).
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from shardlib.compiler.graph.ir import Graph, Op, Value, viewed
from shardlib.compiler.graph.local_sort import check as check_order
from shardlib.compiler.lower import manual
from shardlib.compiler.lower.arguments import substitute
from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.lower.drop_gathered import Between
from shardlib.compiler.lower.emit import Emitter
from shardlib.compiler.lower.emit_reshard import LocalDims
from shardlib.compiler.lower.partial_sums.gathered_rows import GatheredRows, RowsOp
from shardlib.compiler.lower.partial_sums.partial_sums import PartialSums
from shardlib.compiler.lower.partial_sums.reassociate_sums import Regrouping
from shardlib.compiler.lower.placement import COMPLETE, Partial, Placement
from shardlib.compiler.lower.value_layouts import Values
from shardlib.compiler.program.steps import Program, Var
from shardlib.compiler.program.sym_int import Sym, place_in
from shardlib.compiler.program.verify import verify
from shardlib.compiler.propagate import Decisions
from shardlib.compiler.propagate.propagation import Assignment
from shardlib.core.aten.op_names import ALIAS
from shardlib.core.aten.op_traits import has_trait
from shardlib.primitives.debug_print import OP as PRINT
from shardlib.rules.rule import OWNED
from shardlib.rules.table import rule_for
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.reshard import FactorAxes


class Part(NamedTuple):
    """A run of consecutive steps, and their reader: an op, an input, or an output by its position."""

    reader: Op | Value | int
    steps: int


def lower(graph: Graph, propagated: Decisions, mesh: Mesh) -> Program:
    """Returns the program; raises `ProgramError` if it cannot run, which is a fault of the compiler."""
    return lower_in_parts(graph, propagated, mesh)[0]


def lower_in_parts(graph: Graph, propagated: Decisions, mesh: Mesh) -> tuple[Program, list[Part]]:
    """Returns the program and the readers of its steps."""
    lowering = Lowering(graph, propagated, mesh)
    return verify(lowering.run()), lowering.parts()


class Lowering:
    """Lowers one graph."""

    def __init__(self, graph: Graph, propagated: Decisions, mesh: Mesh) -> None:
        self.graph, self.p = graph, propagated
        self.propagation, self.units = propagated.propagation, propagated.units
        self.builder = Builder(mesh)
        self.emitter = Emitter(self.builder, self.propagation)
        self.values = Values(self.emitter)
        self.constants = self.values.constants
        self.sums = PartialSums(self.values, graph, propagated)
        self.gathered_rows = GatheredRows(self.sums.branching)
        self.between = Between(self.values, graph)
        self.regrouping = Regrouping(self.values, self.sums.readers, self.between.passes)
        self._begun: list[tuple[Op | Value | int, int]] = []  # readers, each with the first step for it

    def parts(self) -> list[Part]:
        """Returns the parts of the program in order."""
        last = self._begun[-1:] and [(self._begun[-1][0], len(self.builder.steps))]
        pairs = itertools.pairwise([*self._begun, *last])
        return [Part(reader, end - first) for (reader, first), (_, end) in pairs if end > first]

    def run(self) -> Program:
        for value in self.graph.inputs:
            if value.constant:
                self.builder.inputs.append(self.constants.whole(value))
                continue
            placed, sharding = self.p.placed_input(value)
            self.builder.inputs.append(self.values.make(placed, (sharding, COMPLETE)))
        for value, tensor in self.graph.captured:
            self.builder.captured.append((self.constants.whole(value), tensor))
        for value in self.graph.inputs:
            if value in self.propagation.pin_twins and self.sums.readers[value]:
                self.values.reader = None
                self._begun.append((value, len(self.builder.steps)))
                self.values.as_(self.propagation.pin_twins[value], value, self.p.input_axes(value))
        for op in self.graph.ops:
            if not op.constant and not op.transparent:
                for reader, waiting in self.between.turn(op):
                    self._at(waiting.op, reader)
                    self._scatter(waiting, reader)
                self.gathered_rows.reach(op)
                is_row_op = op in self.gathered_rows.passed
                for first in self.regrouping.met_by(op, swaps=not is_row_op):
                    self._at(first, first)
                    self._op(first)
                if is_row_op or not self.regrouping.waits(op):
                    self._at(op, op)
                    self._op(op)
        check_order(self.emitter.noted)
        for i, value in enumerate(self.graph.outputs):
            self.builder.outputs.append(self._output(i, value) if isinstance(value, Value) else value)
        return self.builder.finish()

    # Ops ------------------------------------------------------------------------------------------------------------

    def _op(self, op: Op) -> None:
        for value in op.operands:
            self._recompute(viewed(value))
        if (way := self.gathered_rows.passed.get(op)) is not None:
            self._op_on_rows(op, way)
            return
        for value in op.operands:
            if op.owns is None:
                self.values.own.settle(value)
        if op.constrains:
            result = op.results[0]
            assert result is not None
            annotated, sharding = self._annotated(result)
            self.values.as_(op.operands[0], annotated, sharding)
            if annotated is not result:
                self.values.as_(annotated, result, sharding)
            return
        if op.manual:
            self._manual(op)
            return
        if has_trait(op.target, "draws_key"):
            self._call_key(op)
            return
        if op.target is PRINT:
            self._replicated(op, lead=self._first())
            return
        if op.rule is None:
            self._replicated(op)
            return
        own = self._own_row_operands(op)
        for i, value in enumerate(op.operands):
            if i not in own:
                self.values.own.settle(value)
        if not own and (carried := self.sums.carried(op)) is not None:
            assignment, partial, linear = carried
        else:
            assignment = dict(self.p.assignment(op))
            partial, linear = COMPLETE, frozenset()
            if op.owns is not None and not op.owns.begins and not own:
                assignment.pop((op.owns.factor, 0), None)  # operands have all rows
        operands = [
            self._own_rows(op, i, assignment) if i in own
            else self._operand(op, i, assignment, partial if i in linear else COMPLETE)
            for i in range(len(op.operands))
        ]  # fmt: skip
        outs = [
            None if r is None else self._new_var(r, self.values.forms.result_form(op, i, assignment, partial))
            for i, r in enumerate(op.results)
        ]
        self.emitter.op(op, op.rule, assignment, operands, outs)
        for r in op.results if op.owns is not None else ():
            if r is not None and (form := self.values.own.form(r)) is not None:
                self._merge_sums(op, r, form, assignment)
        self.gathered_rows.note_results(op, carried=bool(linear))

    def _annotated(self, result: Value) -> tuple[Value, FactorAxes]:
        """Returns the value that stands for an annotated result under other factors, and its sharding."""
        return self.propagation.pin_twins.get(result, result), self.propagation.pinned_values[result][0]

    def _op_on_rows(self, op: Op, way: RowsOp) -> None:
        """Lowers an op on gathered rows that are not added up."""
        own = way.partial.kind == OWNED
        operands = [
            self._as_is(x, form) if (form := way.forms.get(i)) else self._operand(op, i, way.assignment)
            for i, x in enumerate(op.operands)
        ]
        outs: list[Var | None] = [None] * len(op.results)
        for i, r in enumerate(op.results):
            if r is not None:
                form = self.values.forms.result_form(op, i, way.assignment, COMPLETE if own else way.partial)
                outs[i] = self._new_var(r, (form[0], way.partial) if own else form)
        self.emitter.op(op, op.required_rule, way.assignment, operands, outs)

    def _as_is(self, value: Value, form: Placement) -> Var:
        return self.values.own.as_is(value, form) if form[1].kind == OWNED else self.values.native(value, *form)

    def _own_row_operands(self, op: Op) -> frozenset[int]:
        """Returns the operands that an op takes as rows of own groups."""
        if op.owns is None or op not in self.units.op_slots:
            return frozenset()
        slot = self.units.op_slots[op].get((op.owns.factor, 0))
        axes = () if slot is None else self.p.unit_axes(self.units.unit[op])[slot]
        forms = {i: self.values.own.form(op.operands[i]) for i in op.owns.reads}
        return frozenset(i for i, form in forms.items() if axes and form is not None and {*form[1].axes} == {*axes})

    def _own_rows(self, op: Op, i: int, assignment: Assignment) -> Var:
        factors = self.propagation.value_factors(op, i, operand=True)
        return self.values.own.get(op.operands[i], tuple(assignment.get(x, ()) if x else () for x in factors))

    def _new_var(self, value: Value, form: Placement) -> Var:
        """Returns a variable for a result of an op."""
        if form[1].kind != OWNED or not form[1]:
            return self.values.make(value, form)
        return self.values.own.make(value, form)

    def _merge_sums(self, op: Op, value: Value, form: Placement, assignment: Assignment) -> None:
        """Turns rows of own groups that are a partial sum over other axes into one partial sum over all axes."""
        assert op.owns is not None
        axes = assignment[op.owns.factor, 0]
        if {*axes} == {*form[1].axes}:
            return
        var = self.values.own.forms.pop(value)[form]
        self.values.own.zeroed(value, form[0], axes, var, self.values.make(value, (form[0], Partial(form[1].axes))))

    def _recompute(self, value: Value) -> None:
        """Lowers the op of a dropped value again."""
        if value.again and value.op is not None and not value.op.transparent and not self.values.have.get(value):
            self._op(value.op)

    def _scatter(self, value: Value, reader: Op) -> None:
        """Scatters a partial sum over the axes that shard its reader and not the sum."""
        form, slots = self.values.partial_form(value), self.units.op_slots.get(reader)
        if form is None or slots is None:
            return
        unit_axes, i = self.p.unit_axes(self.units.unit[reader]), reader.operands.index(value)
        factors = self.propagation.value_factors(reader, i, operand=True)
        want = tuple(unit_axes[slots[x]] if x in slots else () for x in factors)
        more = [b[len(a) :] for a, b in zip(form[0], want, strict=True) if b[: len(a)] == a]
        if len(more) == len(want) and {a for axes in more for a in axes} <= {*form[1].axes}:
            self.values.scatter(value, want)

    def _replicated(self, op: Op, **more: Any) -> None:
        """Lowers an op without a rule: whole operands, the plain op, whole results."""
        args, kwargs = substitute(op.node, list(map(self.values.whole, op.operands)))
        outs = [
            None if r is None else self.values.make(r, (((),) * len(self.propagation.dim_factors(r)), COMPLETE))
            for r in op.results
        ]
        self.builder.compute(op.target, args, kwargs | more, outs, "no rule: runs replicated")

    def _call_key(self, op: Op) -> None:
        """Draws a random key on the first device; 0 on the others makes it a partial sum over the mesh."""
        (result,) = op.results
        assert result is not None
        args, kwargs = substitute(op.node, [])
        kwargs |= {"lead": self._first(), "apart": self.builder.mesh.kind == "distributed"}
        self.builder.compute(op.target, args, kwargs, [self.values.make(result, ((), Partial(self._all_axes())))])

    def _first(self) -> Sym | int:
        """Returns 1 on the first device, 0 elsewhere."""
        place = place_in(Axis.merge(self._all_axes()))
        return place.eq(0) if isinstance(place, Sym) else 1

    def _all_axes(self) -> tuple[Axis, ...]:
        return tuple(p for name, n in self.builder.mesh.axes.items() if n > 1 for p in Axis(name, n).primes())

    def _manual(self, op: Op) -> None:
        """Lowers an op of a shard_map body: per-device code runs as written."""
        result = op.results[0]
        if has_trait(op.target, "enters_body"):
            assert result is not None
            value = op.operands[0]
            if value.constant:
                var = self.constants.get(value, self._body_input_dims(op))
            else:
                twin = self.propagation.pin_twins.get(op, value)
                var = self.values.as_(value, twin, self.propagation.body_inputs[op][0])
            self.values.have[result][(), COMPLETE] = var
            return
        operands = [self.constants.get(v, ()) if v.constant else self.values.have[v][(), COMPLETE] for v in op.operands]
        if has_trait(op.target, "leaves_body"):
            assert result is not None
            annotated, sharding = self._annotated(result)
            out = self.values.make(annotated, (sharding, COMPLETE))
            self.builder.compute(ALIAS, (operands[0],), {}, [out])
            if annotated is not result:
                self.values.as_(annotated, result, sharding)
        elif has_trait(op.target, "per_device"):
            assert result is not None
            self.values.have[result][(), COMPLETE] = manual.collective(
                self.builder, op, operands[0], self.builder.name(result.name)
            )
        else:
            args, kwargs = substitute(op.node, operands)
            outs = [None if r is None else self.values.make(r, ((), COMPLETE)) for r in op.results]
            rule = rule_for(op.call)  # of local shapes: each device does all of this work
            self.builder.compute(op.target, args, kwargs, outs, "shard_map", float(rule.flops) if rule else 0.0)

    def _body_input_dims(self, op: Op) -> tuple[Any, ...]:
        return _local_dims(self.p.pins.body_inputs[op].layout)

    def _operand(self, op: Op, i: int, assignment: Assignment, partial: Partial = COMPLETE) -> Var:
        value = op.operands[i]
        if value.constant:
            factors = ([*self.emitter.factors(op, names)] for names in op.required_rule.operands[i])
            dims = [tuple((self.emitter.leaf_size(op, x), assignment.get(x, ())) for x in dim) for dim in factors]
            return self.constants.get(value, tuple(dims))
        factor_axes = (assignment.get(x, ()) if x else () for x in self.propagation.value_factors(op, i, operand=True))
        want = tuple(factor_axes)
        return self.values.native(value, want, partial) if partial else self.values.get(value, want)

    def _at(self, op: Op | None, reader: Op | int) -> None:
        """Assigns the next steps to the source line of `op`, and to `reader`."""
        self._begun.append((reader, len(self.builder.steps)))
        self.builder.line, self.builder.backward = (op.line, op.backward) if op is not None else (None, False)
        self.builder.inside = () if op is None else op.node.meta.get("modules", ())
        self.values.reader = reader

    # Outputs --------------------------------------------------------------------------------------------------------

    def _output(self, i: int, value: Value) -> Var:
        self._at(value.op, i)
        self._recompute(viewed(value))
        self.values.own.settle(value)
        if i in self.propagation.outputs:
            return self.values.as_(value, self.propagation.pin_twins.get(i, value), self.propagation.outputs[i][0])
        annotated = self.propagation.pinned_values.get(value) if value.op is not None else None
        if value.constant:
            pin = self.p.pins.outputs.get(i) or (annotated and annotated[1])
            return self.constants.get(value, () if pin is None else _local_dims(pin.layout))
        if annotated is not None:
            return self.values.get(self.propagation.pin_twins.get(value, value), annotated[0])
        return self.values.get(value, self.values.natural(value))


def _local_dims(layout: Layout) -> LocalDims:
    """Returns `(size, axes)` per factor, per dim."""
    return tuple(tuple((f.size, f.axes) for f in dim) for dim in layout.dims)
