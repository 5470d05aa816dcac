"""Explains a collective or a layout, as a chain back to the annotations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan.annotated_inputs import annotated_inputs
from shardlib.compiler.plan.backends import crossings
from shardlib.compiler.plan.names import Naming, op_name
from shardlib.compiler.program.steps import Asked, Collective, Compute, Inside, Var, makes, reads
from shardlib.compiler.propagate.decision_units import DecisionUnit
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.compiler.propagate.solver.explain_decision import Decision, explain_decision, near_tie, sent_bytes
from shardlib.compiler.propagate.solver.problem import Choice
from shardlib.core.aten.op_names import CAT, NARROW, PERMUTE, RESHAPE
from shardlib.core.source_lines import format_path_line
from shardlib.core.text_tables import format_si
from shardlib.ops.collectives.transport.forms import Form
from shardlib.sharding.mesh.axis import Axis, group_size

_REDUCTIONS = ("all_reduce", "reduce_scatter")
_VIEWS = (RESHAPE, PERMUTE, NARROW, CAT)


@dataclass(frozen=True)
class Alternative:
    """A dim that could take `axis` in an op and all ops that decide with it; `chosen` does.

    `seconds` are the estimated ones of all that the decision touches, `bytes` those that a device sends there.
    """

    op: str
    axis: str
    dim: str
    seconds: float
    bytes: float
    chosen: bool
    source: str


@dataclass(frozen=True)
class Explainer:
    """Finds reasons in the records of the stages."""

    compiled: Compiled
    naming: Naming

    def ends(self, c: Collective) -> tuple[Var, Var]:
        """Returns a collective's operand and result, before and after the views that lay out its rows."""
        before, after = c.source, c.out
        while before.layout is None and before in self._viewed:
            before = self._viewed[before]
        while after.layout is None and after in self._views:
            after = self._views[after]
        return (c.source, c.out) if before.layout is None or after.layout is None else (before, after)

    @cached_property
    def _viewed(self) -> dict[Var, Var]:
        """Maps views around collectives to their operands."""
        return {step.out_vars[0]: step.operands[0] for step in self._reshards}

    @cached_property
    def _views(self) -> dict[Var, Var]:
        return {operand: step.out_vars[0] for step in self._reshards for operand in step.operands}

    @cached_property
    def _reshards(self) -> list[Compute]:
        steps = (s for s in self.compiled.program.steps if isinstance(s, Compute) and s.target in _VIEWS)
        return [step for step in steps if step.note == "reshard" and step.out_vars]

    def subject(self, c: Collective) -> str:
        """Returns the name of the value that a collective moves."""
        if isinstance(c.because, Inside) and c.because.moved:
            return c.because.moved
        before, _ = self.ends(c)
        if before.value is not None:
            return self.naming.var(before)
        part = c.reduce if c.kind in _REDUCTIONS else "pieces"
        return f"{c.because.op.name}'s {part}" if isinstance(c.because, Inside) else c.source.name

    def why(self, c: Collective) -> str:
        """Returns the reason of a collective in a few words."""
        if isinstance(c.because, Inside):
            return f"{self._action(c, c.because)}, inside {self.naming.call(c.because.op, 2)}"
        reader = self._reader(c)
        if not reader:
            return c.reason
        if c.kind in _REDUCTIONS:
            over = self._summed_dims(c)
            return f"{c.reduce} over {over}; {reader}" if over else reader
        moved, spared = self._moved_dims(c), self._spared_sum(c)
        return (f"{moved}: {reader}" if moved else reader) + spared

    def _action(self, c: Collective, inside: Inside) -> str:
        """Returns what a local form communicates: `max over vocab`, `keys passed round`."""
        decided = self.naming.decided
        labels = decided.decisions.propagation.labels[decided.representative(inside.op)]
        names = [self.naming.leaf(x) for factor in inside.factors for x in labels.get(factor, ())]
        over = " ".join(names or inside.factors)
        return f"{c.reduce} over {over}" if c.kind in _REDUCTIONS else f"{over} {inside.how}"

    def brief(self, c: Collective) -> str:
        """Returns the reason of a collective without names of values, so that equal layers have equal reasons."""
        if c.because is None:  # written in a shard_map body
            return c.reason
        reader = c.because.by if isinstance(c.because, Asked) else None
        if isinstance(c.because, Inside):
            return f"{self._action(c, c.because)}, in {op_name(c.because.op)}"
        if c.kind in _REDUCTIONS:
            over = self._summed_dims(c)
            return f"{c.reduce} over {over}" if over else c.reduce
        moved = self._moved_dims(c) or "moved"
        return f"{moved} for {op_name(reader)}" if isinstance(reader, Op) else moved

    def _reader(self, c: Collective) -> str:
        if not isinstance(c.because, Asked):
            return ""
        reader = c.because.by
        if isinstance(reader, Op):
            verb = "asked for" if reader.constrains else "read"
            return f"{verb} by {self.naming.call(reader, 2)}"
        if reader is None:  # an argument whose shards have other sizes than those of the program
            return "as all that has this dim"
        return f"returned as {self.compiled.traced.result_names[reader]}"

    def _spared_sum(self, c: Collective) -> str:
        """Compares the bytes that an op gathers with those of the sum of its result, which it saves."""
        op, axes = c.because.by if isinstance(c.because, Asked) else None, {p for a in c.axes for p in a.primes()}
        unit = self.compiled.propagated.units.unit.get(op) if isinstance(op, Op) else None
        if unit is None or not unit.gathers or c.kind != "all_gather":
            return ""
        program, cuts = self.compiled.program, self.compiled.propagated.unit_axes(unit)
        if axes & {a for slot in unit.gathers for a in cuts[slot]}:
            return ""
        requested = [x for x in program.collectives if isinstance(x.because, Asked) and x.because.by is op]
        rows = sum(x.bytes for x in requested if x.kind == c.kind and x.axes == c.axes)
        result = next(v for step in program.steps for v in makes(step) if v.value in unit.ops[0].results)
        assert result.layout is not None
        n, whole = group_size(c.axes), result.layout.max_local_numel() * result.dtype.itemsize
        summed = 2 * whole * (n - 1) / n
        return f"; rows and indices are {format_si(rows, 'B')}, a sum of the result {format_si(summed, 'B')}"

    def _moved_dims(self, c: Collective) -> str:
        """Names the dims that lose the axes and those that get them: `embed whole`, `tensor from heads to seq`."""
        before, after = self.ends(c)
        if before.layout is None or after.layout is None:
            return ""
        axes = {p for a in c.axes for p in a.primes()}
        lost, won = (self._holders(v, axes) for v in (before, after))
        if c.kind == "all_to_all" and lost == won:
            return f"{' '.join(dict.fromkeys(won))} in other pieces"
        left, right = ([x for x in side if x not in other] for side, other in ((lost, won), (won, lost)))
        if right:
            return f"{' '.join(map(str, c.axes))} from {' '.join(left) or 'nothing'} to {' '.join(right)}"
        return f"{' '.join(left)} whole" if left else ""

    def _holders(self, var: Var, axes: set[Axis]) -> list[str]:
        dims = self.naming.dims(var)
        count = Counter(name for dim in dims for name, _ in dim)
        out = []
        for d, dim in enumerate(dims):
            held = [name for name, f in dim if axes & {p for a in f.axes for p in a.primes()}]
            out += [name if name and count[name] == 1 else f"dim {d}" for name in held]
        return out

    @cached_property
    def _operands_of(self) -> dict[Var, list[Var]]:
        program = self.compiled.program
        operands = {out: list(reads(step)) for step in program.steps for out in makes(step)}
        return operands | {c.out: [c.source] for c in program.collectives}

    def origin(self, c: Collective) -> Value | None:
        """Returns the contraction's or reduction's result that became a partial sum, before any linear op on it."""
        var = c.source
        while (operands := self._operands_of.get(var)) is not None:
            partial = [v for v in operands if v.layout is not None and v.layout.pending]
            if not partial:
                return var.value
            var = partial[0]
        return None

    def _summed_dims(self, c: Collective) -> str:
        value, decided = self.origin(c), self.naming.decided
        op = None if value is None or value.op is None else decided.representative(value.op)
        units, propagated = decided.decisions.units, decided.decisions
        if value is None or op is None or op.rule is None or op not in units.unit:
            return ""
        axes = {p for a in c.axes for p in a.primes()}
        cuts = propagated.unit_axes(units.unit[op])
        kept = {label for labels in op.rule.results[value.index] for label in labels}
        over = [
            self.naming.leaf(propagated.propagation.labels[op][label][k])
            for (label, k), slot in units.op_slots[op].items()
            if label not in kept and axes & set(cuts[slot])
        ]
        return " ".join(dict.fromkeys(over))

    def reason(self, c: Collective) -> str:
        """Returns the layouts that forced a collective, and its reason."""
        before, after = self.ends(c)
        if before.layout is None or after.layout is None:
            return self.why(c)
        spec = self.naming.spec(after)
        return f"{self.naming.spec(before)} -> {spec[spec.index('[') :]}, {self.why(c)}"

    # Chains ---------------------------------------------------------------------------------------------------------

    def collective(self, c: Collective) -> str:
        """Explains a collective: its value, reason, producer and reader, and the decisions about both."""
        return "\n".join(self._collective(c, self._decisions))

    def chain(self, c: Collective) -> str:
        """Explains a collective with the decisions taken, and without the others, which `alternatives` lists."""
        return "\n".join(self._collective(c, self._taken))

    def _taken(self, op: Op) -> Iterator[str]:
        for decision, source_of in self._decided(op):
            first = next((first for dim, _, first in decision.alternatives if dim == decision.winner), ())
            yield f"{decision.axis} shards {decision.winner}{f', {source_of(first)}' if first else ''}"

    def alternatives(self, c: Collective) -> Iterator[Alternative]:
        """Yields what the ops at both ends of a collective could do instead, by mesh axis."""
        for op in dict.fromkeys(op for _, op in self._ends_of(c) if isinstance(op, Op)):
            for decision, source in self._decided(op):
                search = self.compiled.propagated.search
                rows = zip(decision.alternatives, sent_bytes(search, op, decision.axis), strict=True)
                for (dim, seconds, first), sent in rows:
                    chosen = dim == decision.winner
                    yield Alternative(self.naming.call(op), decision.axis, dim, seconds, sent, chosen, source(first))

    def _ends_of(self, c: Collective) -> list[tuple[str, Op | int | None]]:
        """Returns the ops that make and read the value of a collective; a reader may be the position of a result."""
        before, _ = self.ends(c)
        producers: list[Op | None] = [v.op for v in (self.origin(c), before.value) if v is not None]
        producers = [c.because.op, *producers] if isinstance(c.because, Inside) else producers
        reader = c.because.by if isinstance(c.because, Asked) else None
        return [*(("made by", op) for op in producers), ("read by", reader)]

    def _collective(self, c: Collective, decisions: Callable[[Op], Iterable[str]]) -> list[str]:
        axes = " ".join(map(str, c.axes))
        lines = [f"{c.kind}[{axes}] of {self.subject(c)}: {format_si(c.bytes, 'B')} on the wire per device"]
        if c.line:
            lines.append(
                f"  {'backward of' if c.backward else 'at'} {format_path_line(c.line)}  {c.line.text}".rstrip()
            )
        before, after = self.ends(c)
        if before.layout is not None and after.layout is not None:
            lines += [f"  from {self.naming.typed(before)}", f"  to   {self.naming.typed(after)}"]
        lines.append(f"  because {self.why(c)}")
        if (form := self._crossings.get(c)) is not None:
            lines.append(f"  by {form}")
        value, ends = before.value, self._ends_of(c)
        explained: set[Op] = set()
        for verb, op in ends:
            if isinstance(op, Op) and op not in explained:
                explained.add(op)
                lines += [f"  {line}" for line in self._op(op, verb, decisions)]
        reader = ends[-1][1]
        if value is not None and value.op is None:
            lines += [f"  {self.subject(c)} is {line}" for line in self._cuts(value, before)]
        if isinstance(reader, int):
            fixed = self.compiled.propagated.propagation.outputs.get(reader)
            lines += [f"  the result is fixed by {fixed[1].source}"] if fixed else []
        return lines

    @cached_property
    def _crossings(self) -> Mapping[Collective, Form]:
        return crossings(self.compiled.program)

    def value(self, v: Value, var: Var) -> str:
        """Explains each sharded dim of a value: the annotation that requested it, and the alternatives."""
        lines = [f"{self.naming.own(v)} is {self.naming.typed(var)}", *self._cuts(v, var)]
        if v.op is not None:
            lines += self._op(v.op, "made by", self._decisions)
        elif v not in self.compiled.propagated.propagation.pinned_values and v in self.compiled.propagated.units.unit:
            has_spec = v in {self.compiled.graph.inputs[i] for i in annotated_inputs(self.compiled)}
            lines.append("annotated where it is read" if has_spec else "inferred together with its readers")
            lines += [f"  {line}" for op, _ in v.readers[:1] for line in self._op(op, "read by", self._decisions)]
        return "\n  ".join(lines)

    def _cuts(self, v: Value, var: Var) -> list[str]:
        propagation = self.compiled.propagated.propagation
        if v in propagation.pinned_values:
            return [f"fixed by {propagation.pinned_values[v][1].source}"]
        lines = []
        factors = propagation.dim_factors(v) if v in propagation.value else ()
        for leaf, axes in zip(factors, var.placement[0] if var.placement else (), strict=False):
            for axis in axes:
                source = self._source(leaf, axis)
                lines.append(f"{self.naming.leaf(leaf)} is cut over {axis}, asked for by {source}")
        if not lines and v in propagation.value:
            wanted = [leaf for leaf in propagation.dim_factors(v) if propagation.requests.get(leaf)]
            lines = [] if wanted else ["whole: no annotation reaches its dims"]
        return lines

    def _source(self, leaf: DimFactor, axis: Axis) -> str:
        requests = self.compiled.propagated.propagation.requests.get(leaf, ())
        return next((w.source for w in requests if w.axis in axis.primes()), "the reduction that lands there")

    def _op(self, op: Op, verb: str, decisions: Callable[[Op], Iterable[str]]) -> Iterator[str]:
        where = f"  at {format_path_line(op.line)}  {op.line.text}" if op.line else ""
        back = "backward of " if op.backward else ""
        result = next((r for r in op.results if r is not None), None)
        name = f"{self.naming.own(result)} = " if result is not None else ""
        yield f"{verb} {back}{name}{self.naming.call(op)}{where}".rstrip()
        if op.rule is None and not op.manual:
            yield "  it has no rule, so it runs replicated, on whole operands"
        yield from (f"  {line}" for line in decisions(op))

    def _decided(self, op: Op) -> Iterator[tuple[Decision, Callable[[Choice], str]]]:
        """Yields the decision about each mesh axis, and a function that names the source of an alternative."""
        unit = self.compiled.propagated.units.unit.get(op)
        for axis in self.compiled.mesh.axis_names if unit is not None else ():
            assert unit is not None
            if (op, axis) not in self._decision_memo:
                self._decision_memo[op, axis] = explain_decision(self.compiled.propagated.search, op, axis)
            if (decision := self._decision_memo[op, axis]) is not None:
                yield decision, partial(self._source_of, unit, axis)

    @cached_property
    def _decision_memo(self) -> dict[tuple[Op, str], Decision | None]:
        return {}

    def _decisions(self, op: Op) -> Iterator[str]:
        search = self.compiled.propagated.search
        for decision, source_of in self._decided(op):
            axis = decision.axis
            share = search.weights.hidden
            paid = f" (messages that arithmetic hides at {share:.0%})" if share < 1 else ""
            cuts = f"{axis} cuts {decision.winner} here ({decision.units} alike)"
            yield f"{cuts}; estimated, with all that it touches{paid}:"
            for name, seconds, first in decision.alternatives:
                yield f"  {name}: {seconds * 1e6:.1f} us, {source_of(first)}"
            if near := near_tie(search, op, axis):
                other, chosen = f"{near[1] * 1e6:.4g} us", f"{search.seconds * 1e6:.4g} us"
                yield f"  a near-tie with {near[0]}: with it the whole program takes {other}, not {chosen}"

    def _source_of(self, unit: DecisionUnit, axis: str, first: Choice) -> str:
        return self._requester(unit, first[0], axis) if first else "no device does less"

    def _requester(self, unit: DecisionUnit, slot: int, axis: str) -> str:
        requests = self.compiled.propagated.propagation.requests.get(unit.slots[slot], ())
        request = next((f"asked for by {w.source}" for w in requests if w.axis.name == axis), "")
        lender = unit.lends.get(slot)
        return request or ("" if lender is None else f"lent by {self.naming.leaf(unit.slots[lender])}")
