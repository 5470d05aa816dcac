"""Decisions -> the per-device program.

Ops are lowered in program order. Each op asks for its operands in the cut that its unit decided; `_get` finds the
cheapest source among the layouts in which a value is already there, behind views at their root. Pending sums travel
through ops that are linear in them, and are reduced when somebody needs the value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib import reshard
from shardlib.graph import Graph, Op, Value, is_creation
from shardlib.layout import Axis, Factor, Layout, Pending
from shardlib.lines import Line
from shardlib.lower import manual
from shardlib.lower.arguments import put, substitute
from shardlib.lower.fuse import fuse
from shardlib.lower.local import Assignment, LocalForm
from shardlib.lower.move import Mover
from shardlib.lower.program import Instr, Program, Step, Var
from shardlib.lower.sym import Sym, local_size, product
from shardlib.mesh import Mesh
from shardlib.propagate import Propagated
from shardlib.propagate.estimate import settled
from shardlib.propagate.flood import Factor as OpFactor
from shardlib.propagate.units import is_constraint, looks_through, may_cut, value_factors
from shardlib.reshard import Axes, Cut
from shardlib.rules.rule import Rule


@dataclass(frozen=True)
class Owed:
    """What a value still owes: a reduction of `kind` over `axes`."""

    axes: Axes = ()
    kind: str = "sum"

    def __bool__(self) -> bool:
        return bool(self.axes)


Form = tuple[Cut, Owed]  # one layout of a value: its cut, and what is pending


def lower(graph: Graph, propagated: Propagated, mesh: Mesh) -> Program:
    """Emit the program."""
    return fuse(Lowering(graph, propagated, mesh).run())


class Lowering:
    def __init__(self, graph: Graph, propagated: Propagated, mesh: Mesh) -> None:
        self.graph, self.p = graph, propagated
        self.flood, self.units = propagated.flood, propagated.units
        self.program = Program(mesh)
        self.mover = Mover(self.program)
        self.have: dict[Value, dict[Form, Var]] = defaultdict(dict)
        self.constants: dict[tuple[Value, tuple[Any, ...]], Var] = {}
        self.readers = _reader_counts(graph, propagated)
        self.line: Line | None = None
        self.backward = False
        self.reader: Any = None
        self._names: dict[str, int] = {}

    def run(self) -> Program:
        for value in self.graph.inputs:
            cut = self.p.input_cut(value)
            as_given = self.flood.apart.get(value, value)
            var = Var(value.name, self._layout(as_given, cut), value.dtype, as_given, (cut, Owed()))
            self.program.inputs.append(var)
            if value.constant:
                self.constants[value, ()] = var
            else:
                self.have[as_given][cut, Owed()] = var
        for value, tensor in self.graph.captured:
            var = Var(value.name, Layout.replicated(value.shape), value.dtype)
            self.program.captured.append((var, tensor))
            self.constants[value, ()] = var
        for value in self.graph.inputs:
            if value in self.flood.apart and self.readers[value]:
                self.reader = "the program"
                self._as(self.flood.apart[value], value, self.p.input_cut(value))
        for op in self.graph.ops:
            if not op.constant and not looks_through(op):
                self.line, self.backward, self.reader = op.line, op.backward, op
                self._op(op)
        for i, value in enumerate(self.graph.outputs):
            self.program.outputs.append(self._output(i, value) if isinstance(value, Value) else value)
        return self.program

    # Ops ------------------------------------------------------------------------------------------------------------

    def _op(self, op: Op) -> None:
        if is_constraint(op):
            result = op.results[0]
            assert result is not None
            said, cut = self.flood.apart.get(result, result), self.flood.fixed[result][0]
            self._as(op.operands[0], said, cut)
            if said is not result:
                self._as(said, result, cut)
            return
        if op.manual:
            self._manual(op)
            return
        if op.kind == "call_key":
            self._call_key(op)
            return
        if op.rule is None:
            self._replicated(op)
            return
        carried = self._carried(op)
        if carried is not None:
            assignment, owed, linear = carried
        else:
            cuts = self.p.unit_cut(self.units.unit[op])
            assignment = {x: cuts[s] for x, s in self.units.op_slots[op].items() if cuts[s]}
            owed, linear = Owed(), frozenset()
        operands = [self._operand(op, i, assignment, owed if i in linear else Owed()) for i in range(len(op.operands))]
        outs = self._emit(op, op.rule, assignment, operands)
        for i, result in enumerate(op.results):
            if result is not None:
                cut, pending = self._result_form(op, i, assignment, owed)
                var = outs[i]
                self._settle(var, result, (cut, pending))

    def _replicated(self, op: Op) -> None:
        """No rule: whole operands, the plain op, whole results."""
        operands = [
            self._constant(v, ()) if v.constant else self._get(v, ((),) * len(self.flood.leaves(v)))
            for v in op.operands
        ]
        args, kwargs = substitute(op.node, operands)
        outs = self._call(op.target, args, kwargs, op.results, note="no rule: runs replicated")
        for result, var in zip(op.results, outs, strict=True):
            if result is not None:
                self._settle(var, result, (((),) * len(self.flood.leaves(result)), Owed()))

    def _call_key(self, op: Op) -> None:
        """The first device draws the key, the others hold 0: a pending sum over the mesh."""
        mesh, (result,) = self.program.mesh, op.results
        assert result is not None
        axes = tuple(p for name, n in mesh.axes.items() if n > 1 for p in Axis(name, n).primes())
        first = Sym(lambda c: int(not any(c.values())), frozenset(axes), "first device") if axes else 1
        args, kwargs = substitute(op.node, [])
        kwargs |= {"lead": first, "apart": mesh.kind == "distributed"}
        (var,) = self._call(op.target, args, kwargs, op.results)
        self._settle(var, result, ((), Owed(axes)))

    def _manual(self, op: Op) -> None:
        """Per-device code of a shard_map body, as it is written."""
        result = op.results[0]
        if op.kind == "to_local":
            assert result is not None
            value = op.operands[0]
            if value.constant:
                var = self._constant(value, self._door_dims(op))
            else:
                var = self._as(value, self.flood.apart.get(op, value), self.flood.doors[op][0])
            self.have[result][(), Owed()] = var
            return
        operands = [self._constant(v, ()) if v.constant else self.have[v][(), Owed()] for v in op.operands]
        if op.kind == "from_local":
            assert result is not None
            (var,) = self._call(torch.ops.aten.alias.default, (operands[0],), {}, op.results)
            said, cut = self.flood.apart.get(result, result), self.flood.fixed[result][0]
            self._settle(var, said, (cut, Owed()))
            if said is not result:
                self._as(said, result, cut)
        elif op.kind.startswith("manual_"):
            assert result is not None
            self.have[result][(), Owed()] = manual.collective(self.program, op, operands[0], self._fresh_name(result))
        else:
            args, kwargs = substitute(op.node, operands)
            for r, var in zip(
                op.results, self._call(op.target, args, kwargs, op.results, note="shard_map"), strict=True
            ):
                if r is not None:
                    self._settle(var, r, ((), Owed()))

    def _door_dims(self, op: Op) -> tuple[Any, ...]:
        layout = self.p.doors[op].layout
        return tuple(tuple((f.size, f.axes) for f in dim) for dim in layout.dims)

    def _operand(self, op: Op, i: int, assignment: Assignment, owed: Owed = Owed()) -> Var:
        value = op.operands[i]
        assert op.rule is not None
        if value.constant:
            dims = []
            for names in op.rule.operands[i]:
                dims.append(tuple((self.leaf_size(op, x), assignment.get(x, ())) for x in self.factors(op, names)))
            return self._constant(value, tuple(dims))
        cut = tuple(assignment.get(x, ()) if x else () for x in value_factors(self.flood, op, i, operand=True))
        return self._native(value, cut, owed) if owed else self._get(value, cut)

    def _result_form(self, op: Op, i: int, assignment: Assignment, owed: Owed) -> Form:
        assert op.rule is not None
        factors = value_factors(self.flood, op, i, operand=False)
        cut = tuple(assignment.get(x, ()) if x else () for x in factors)
        axes = list(owed.axes)
        kind = owed.kind
        for x, cut_axes in assignment.items():
            if x not in factors and cut_axes:
                if x[0] not in op.rule.reduce:
                    raise AssertionError(
                        f"{op}: cut factor {x[0]} is missing from result {i} and is no declared reduction"
                    )
                if op.rule.reduce[x[0]] != "none":
                    axes += [a for a in cut_axes if not any(a in mine for mine in cut)]  # the rest went round
                    kind = op.rule.reduce[x[0]]
        return cut, Owed(tuple(axes), kind)

    def _emit(self, op: Op, rule: Rule, assignment: Assignment, operands: Sequence[Var]) -> list[Any]:
        args, kwargs = substitute(op.node, operands)
        cut_labels = {x[0] for x, axes in assignment.items() if axes}
        for path, (k, names) in rule.ints.items() if cut_labels else ():
            # All of them: beside an empty shard's 0, a -1 left over in a shape would mean nothing.
            size = product([self.label_size(op, n, assignment) for n in names])
            args, kwargs = put(args, kwargs, path, size * k)
        tied = {*rule.rounds, *rule.follows}
        flops = rule.flops / math.prod(reshard.ways(axes) for x, axes in assignment.items() if x[0] not in tied)
        if rule.local is not None and (cut_labels & rule.local_factors or rule.dense):
            before = len(self.program.steps)
            out = rule.local(LocalForm(self, op, assignment, args, kwargs))
            _count(self.program.steps[before:], op.target, flops)
            return list(out) if isinstance(out, tuple | list) else [out]
        return self._call(op.target, args, kwargs, op.results, flops=flops)

    def _call(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        results: Sequence[Value | None],
        *,
        note: str = "",
        flops: float = 0.0,
    ) -> list[Any]:
        outs = tuple(None if r is None else Var(r.name, Layout.replicated(r.shape), r.dtype, r) for r in results)
        self.program.steps.append(Instr(target, args, kwargs, outs, self.line, self.backward, note, flops))
        return list(outs)

    # Pending sums ---------------------------------------------------------------------------------------------------

    def _carried(self, op: Op) -> tuple[Assignment, Owed, frozenset[int]] | None:
        """How `op` runs on operands whose sum is pending, if it may: (its assignment, what is owed, which operands)."""
        rule = op.rule
        assert rule is not None
        for linear in rule.linear:
            forms = [self._owing(op.operands[i]) for i in sorted(linear)]
            if not forms or any(form is None for form in forms):
                continue
            if len({form[1] for form in forms if form}) > 1 or any(self.readers[op.operands[i]] > 1 for i in linear):
                continue
            assignment: dict[OpFactor, Axes] = {}
            fits = True
            for i, form in zip(sorted(linear), forms, strict=True):
                assert form is not None
                for x, axes in zip(value_factors(self.flood, op, i, operand=True), form[0], strict=True):
                    if axes and (x is None or not may_cut(self.flood, op, x) or assignment.get(x, axes) != axes):
                        fits = False
                    elif x is not None and (axes or x in assignment):
                        fits = fits and assignment.setdefault(x, axes) == axes
            for i, form in zip(
                sorted(linear), forms, strict=True
            ):  # a factor that one addend has cut and another has whole
                assert form is not None
                for x, axes in zip(value_factors(self.flood, op, i, operand=True), form[0], strict=True):
                    fits = fits and (x is None or assignment.get(x, ()) == axes)
            for t, s in (*rule.rounds.items(), *rule.follows.items()):
                fits = fits and set(assignment.get((t, 0), ())) <= set(assignment.get((s, 0), ()))
            owed = forms[0][1] if forms[0] else Owed()
            if fits and self._worth_carrying(op, linear, assignment, owed):
                return assignment, owed, linear
        return None

    def _worth_carrying(self, op: Op, linear: frozenset[int], assignment: Assignment, owed: Owed) -> bool:
        """No growth, no further reshards for the other operands, and no other kind of reduction on top."""
        assert op.rule is not None
        if owed.kind != "sum":
            return False
        for x, axes in assignment.items():
            if axes and op.rule.reduce.get(x[0], "sum") not in ("sum", "none"):
                return False
        most = max(op.operands[i].nbytes for i in linear)
        if sum(r.nbytes for r in op.results if r is not None) > most:
            return False
        for i, value in enumerate(op.operands):
            if i not in linear and not value.constant:
                want = tuple(assignment.get(x, ()) if x else () for x in value_factors(self.flood, op, i, operand=True))
                if self._price(value, want) > 0:
                    return False
        return True

    def _owing(self, value: Value) -> Form | None:
        """The form of a value that exists only as a pending sum; None where it is complete."""
        if value.constant:
            return None
        if value.op is not None and looks_through(value.op) and not self.have[value]:
            form = self._owing(value.op.operands[0])
            if form is None:
                return None
            assignment = self._pulled(value.op, form[0])
            if assignment is None:
                return None
            return self._result_form(value.op, 0, assignment, form[1])
        forms = list(self.have[value])
        return forms[0] if len(forms) == 1 and forms[0][1] else None

    def _pulled(self, op: Op, cut: Cut) -> Assignment | None:
        """The assignment of a view that leaves its operand in `cut`."""
        assignment: dict[OpFactor, Axes] = {}
        for x, axes in zip(value_factors(self.flood, op, 0, operand=True), cut, strict=True):
            if axes:
                if x is None or x[0] in self.flood.whole[op]:
                    return None
                assignment[x] = axes
        return assignment

    def _native(self, value: Value, cut: Cut, owed: Owed) -> Var:
        """The variable of a pending value, as it is."""
        if (known := self.have[value].get((cut, owed))) is not None:
            return known
        op = value.op
        assert op is not None
        assert looks_through(op)
        form = self._owing(op.operands[0])
        assert form is not None
        assignment = self._pulled(op, form[0])
        assert assignment is not None
        return self._view(op, assignment, self._native(op.operands[0], *form), owed)

    # Values ---------------------------------------------------------------------------------------------------------

    def _view(self, op: Op, assignment: Assignment, operand: Var, owed: Owed = Owed()) -> Var:
        value = op.results[0]
        assert value is not None
        assert op.rule is not None
        form = self._result_form(op, 0, assignment, owed)
        if (known := self.have[value].get(form)) is not None:
            return known
        (var,) = self._emit(op, op.rule, assignment, [operand])
        self._settle(var, value, form)
        return var  # type: ignore[no-any-return]

    def _through(self, op: Op, want: Cut) -> tuple[Assignment, Cut]:
        """What a view's operand must be for its result to be `want`, as nearly as the view allows."""
        assignment = {
            x: axes
            for x, axes in zip(value_factors(self.flood, op, 0, operand=False), want, strict=True)
            if x is not None and axes and x[0] not in self.flood.whole[op]
        }
        return assignment, tuple(
            assignment.get(x, ()) if x else () for x in value_factors(self.flood, op, 0, operand=True)
        )

    def _get(self, value: Value, want: Cut) -> Var:
        """The value, complete, in cut `want`."""
        if value.constant:
            return self._constant(value, self._dims(value, want))
        if (known := self.have[value].get((want, Owed()))) is not None:
            return known
        if value.op is not None and looks_through(value.op) and not self._ready_cheaply(value, want):
            assignment, operand_cut = self._through(value.op, want)
            self._view(value.op, assignment, self._get(value.op.operands[0], operand_cut))
            if (known := self.have[value].get((want, Owed()))) is not None:
                return known
        source, steps = self._cheapest(value, want)
        return self._move(value, source, steps)

    def _as(self, value: Value, target: Value, cut: Cut) -> Var:
        """`value` in a cut of `target`, the same tensor under another annotation: with other factors, or pieces."""
        if target is not value and self._repieced(value, target):
            if (cut, Owed()) not in self.have[target]:
                if not self.have[value]:  # a view
                    self._get(value, cut)
                self._move(target, *self._cheapest(value, cut, target), value)
        elif target is not value:
            near = self.flood.across(cut, target, value)
            self.have[target][self.flood.across(near, value, target), Owed()] = self._get(value, near)
        return self._get(target, cut)

    def _repieced(self, a: Value, b: Value) -> bool:
        """Whether two forms of a tensor have the same factors, and some of them in other pieces."""
        dims = zip(self.flood.value[a], self.flood.value[b], strict=True)
        return self.flood.value[a] != self.flood.value[b] and all(self.flood.alike(x, y) for x, y in dims)

    def _ready_cheaply(self, value: Value, want: Cut) -> bool:
        """Whether a view that exists already reaches `want` for less than its operand does."""
        forms = [form for form in self.have[value] if not form[1]]
        if not forms:
            return False
        assert value.op is not None
        _, operand_cut = self._through(value.op, want)
        return self._cheapest_price(value, want) <= self._price(value.op.operands[0], operand_cut)

    def _price(self, value: Value, want: Cut) -> float:
        if value.constant or (want, Owed()) in self.have[value]:
            return 0.0
        prices = [self._cheapest_price(value, want)] if self.have[value] else []
        if value.op is not None and looks_through(value.op):
            prices.append(self._price(value.op.operands[0], self._through(value.op, want)[1]))
        return min(prices)

    def _cheapest_price(self, value: Value, want: Cut) -> float:
        return reshard.seconds(self._cheapest(value, want)[1])

    def _cheapest(self, value: Value, want: Cut, target: Value | None = None) -> tuple[Form, tuple[reshard.Hop, ...]]:
        sizes, itemsize = self.flood.sizes(value), value.dtype.itemsize
        into = None if target is None else self.flood.sizes(target)
        options = [
            (form, reshard.route(sizes, itemsize, form[0], want, form[1].axes, form[1].kind, into))
            for form in self.have[value]
        ]
        return min(options, key=lambda o: (reshard.seconds(o[1]), len(o[1])))

    def _move(self, value: Value, source: Form, hops: Sequence[reshard.Hop], origin: Value | None = None) -> Var:
        """Emit `hops` from `source`; every stop on the way is a form that others may start from.

        From a form of `origin`, which has other pieces, only the end is.
        """
        var, owed = self.have[origin or value][source], source[1]
        for hop in hops:
            step = hop.step
            if step.kind in ("reduce_scatter", "all_reduce"):
                done = {p for a in step.axes for p in a.primes()}
                owed = Owed(tuple(a for a in owed.axes if a not in done), owed.kind)
            form = (hop.after, owed)
            var = self.mover.step(
                step,
                var,
                hop.dims,
                self._layout(value, *form, hop.sizes),
                name=self._fresh_name(value),
                line=self.line,
                backward=self.backward,
                reason=self._reason(value, source, form, origin),
                because=(value, self.reader),
            )
            var.value, var.form = value, form
            if origin is None:
                self.have[value].setdefault(form, var)
        if origin is not None:
            self.have[value][hops[-1].after if hops else source[0], Owed()] = var
        return var

    def _reason(self, value: Value, source: Form, form: Form, origin: Value | None) -> str:
        made = self._typed(origin or value, *source)
        reader = self.reader.name if isinstance(self.reader, Op) else self.reader
        return f"{value.name} is {made}, {reader} needs {self._typed(value, *form)}"

    # Constants ------------------------------------------------------------------------------------------------------

    def _constant(self, value: Value, dims: tuple[Any, ...]) -> Var:
        """A constant, cut as `dims` says (per dim, `(size, axes)` per factor): made in pieces, or whole and sliced."""
        cut = any(axes for dim in dims for _, axes in dim)
        key = (value, dims if cut else ())
        if (known := self.constants.get(key)) is not None:
            return known
        op = value.op
        if op is not None and not cut:
            operands = [self._constant_operand(v) for v in op.operands]
            args, kwargs = substitute(op.node, operands)
            for result, out in zip(op.results, self._call(op.target, args, kwargs, op.results), strict=True):
                if result is not None:
                    self.constants[result, ()] = out
            return self.constants[key]
        if op is not None and op.rule is not None and is_creation(op.target) and self._made_in_pieces(op):
            var = self._create(op, dims)
        else:
            line = op.line if op is not None else self.line
            var = self.mover.slice_all(self._constant(value, ()), dims, name=self._fresh_name(value), line=line)
        var.layout = Layout(tuple(tuple(Factor(n, Axis.merge(a)) for n, a in dim) for dim in dims)).canonical
        var.value = value
        self.constants[key] = var
        return var

    def _constant_operand(self, value: Value) -> Var:
        """Creation ops read at most the dtype and device of their operand: any form of it will do."""
        if value.constant:
            return self._constant(value, ())
        if self.have[value]:
            return next(iter(self.have[value].values()))
        assert value.op is not None
        return self._constant_operand(value.op.operands[0])

    def _made_in_pieces(self, op: Op) -> bool:
        assert op.rule is not None
        named = {n for _, names in op.rule.ints.values() for n in names}
        return all(n in named for names in op.rule.results[0] for n in names)

    def _create(self, op: Op, dims: tuple[Any, ...]) -> Var:
        assert op.rule is not None
        assert op.results[0] is not None
        sizes = {}
        for names, factors in zip(op.rule.results[0], dims, strict=True):
            if names:
                (label,) = names
                sizes[label] = product([local_size(n, axes) for n, axes in factors])
        args, kwargs = substitute(op.node, [self._constant_operand(v) for v in op.operands])
        for path, (k, names) in op.rule.ints.items():
            args, kwargs = put(args, kwargs, path, product([sizes[n] for n in names]) * k)
        (var,) = self._call(op.target, args, kwargs, op.results)
        return var  # type: ignore[no-any-return]

    # Outputs --------------------------------------------------------------------------------------------------------

    def _output(self, i: int, value: Value) -> Var:
        self.line, self.backward, self.reader = None, False, f"output {i}"
        if value.op is not None:
            self.line, self.backward = value.op.line, value.op.backward
        if i in self.flood.outputs:
            return self._as(value, self.flood.apart.get(i, value), self.flood.outputs[i][0])
        if value.constant:
            said = self.p.outputs.get(i)
            dims = () if said is None else tuple(tuple((f.size, f.axes) for f in dim) for dim in said.layout.dims)
            return self._constant(value, dims)
        return self._get(value, self._natural(value))

    def _natural(self, value: Value) -> Cut:
        """As it was made; a pending sum goes to the factors that want its axes: gradients land like parameters."""
        if value.op is not None and looks_through(value.op) and not self.have[value]:
            assignment = self._pulled(value.op, self._natural(value.op.operands[0]))
            if assignment is None:
                return ((),) * len(self.flood.leaves(value))
            return self._result_form(value.op, 0, assignment, Owed())[0]
        (cut, owed), *_ = self.have[value]
        complete = [form for form in self.have[value] if not form[1]]
        if complete:
            return complete[0][0]
        wants = self.flood.wants
        leaves = [([w.axis for w in wants.get(x, ())], self.flood.dims.size(x)) for x in self.flood.leaves(value)]
        return settled(cut, owed.axes, leaves)

    # Small helpers --------------------------------------------------------------------------------------------------

    def factors(self, op: Op, names: Sequence[str]) -> list[OpFactor]:
        return [(n, k) for n in names for k in range(len(self.flood.labels[op][n]))]

    def leaf_size(self, op: Op, x: OpFactor) -> int:
        return self.flood.dims.size(self.flood.labels[op][x[0]][x[1]])

    def label_size(self, op: Op, label: str, assignment: Assignment) -> Sym | int:
        return product([local_size(self.leaf_size(op, x), assignment.get(x, ())) for x in self.factors(op, [label])])

    def _dims(self, value: Value, cut: Cut) -> tuple[Any, ...]:
        """Per dim, `(size, axes)` per leaf."""
        if value.constant or value.manual:
            return tuple(((n, ()),) for n in value.shape)
        axes = iter(cut)
        return tuple(tuple((self.flood.dims.size(x), next(axes)) for x in leaves) for leaves in self.flood.value[value])

    def _layout(self, value: Value, cut: Cut, owed: Owed = Owed(), sizes: Sequence[int] | None = None) -> Layout:
        pending = (Pending(Axis.merge(owed.axes), owed.kind),) if owed else ()
        dims = self._dims(value, cut)
        feed = iter(n for dim in dims for n, _ in dim) if sizes is None else iter(sizes)
        return Layout(tuple(tuple(Factor(next(feed), a) for _, a in dim) for dim in dims), pending).canonical

    def _typed(self, value: Value, cut: Cut, owed: Owed) -> str:
        return f"[{self._layout(value, cut, owed)}]"

    def _settle(self, var: Var, value: Value, form: Form) -> None:
        """`var` is `value` in this form."""
        var.name, var.layout = self._fresh_name(value), self._layout(value, *form)
        var.value, var.form = value, form
        self.have[value][form] = var

    def _fresh_name(self, value: Value) -> str:
        n = self._names[value.name] = self._names.get(value.name, -1) + 1
        return value.name if n == 0 else f"{value.name}_{n}"


def _count(steps: Sequence[Step], target: Any, flops: float) -> None:
    """Book an op's arithmetic on the steps of its local form: those that call the op itself, if there are such."""
    calls = [s for s in steps if isinstance(s, Instr)]
    for step in (same := [s for s in calls if s.target is target] or calls):
        step.flops = flops / len(same)


def _reader_counts(graph: Graph, p: Propagated) -> dict[Value, int]:
    """How often a value is read, views looked through; a view counts as its root."""
    counts: dict[Value, int] = defaultdict(int)
    for value, (root, _) in p.units.roots.items():
        counts[root] += sum(not looks_through(op) for op, _ in value.readers)
    for out in graph.outputs:
        if isinstance(out, Value) and not out.constant:
            counts[p.units.root(out)[0]] += 1
    return {value: counts[root] for value, (root, _) in p.units.roots.items()}
