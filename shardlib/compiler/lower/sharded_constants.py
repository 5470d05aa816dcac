"""Emits constants as shards, with all that they are computed from, where rules allow it without messages.

Every other constant is computed whole and sliced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.lower.arguments import substitute
from shardlib.compiler.lower.count_comm import MessageCounter
from shardlib.compiler.lower.emit import Emitter
from shardlib.compiler.lower.emit_reshard import LocalDims
from shardlib.compiler.program.steps import Var
from shardlib.compiler.propagate.decision_units import can_shard
from shardlib.compiler.propagate.lock_pins import distribute_factor, lock_layout
from shardlib.compiler.propagate.propagation import Assignment, OpFactor, Propagation
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.reshard import Axes

if TYPE_CHECKING:
    from shardlib.compiler.lower.value_layouts import Values


class Constants:
    """Holds the constants of a program by their layouts."""

    def __init__(self, values: Values) -> None:
        self.values, self.builder = values, values.builder
        self.have: dict[tuple[Value, Layout], Var] = {}
        self._counter = MessageCounter(values.builder.mesh)

    def get(self, value: Value, dims: LocalDims) -> Var:
        """Returns a constant sharded as in `dims`; `()` is whole."""
        layout = Layout.replicated(value.shape)
        if any(axes for dim in dims for _, axes in dim):
            layout = Layout(tuple(tuple(Factor(n, Axis.merge(axes)) for n, axes in dim) for dim in dims)).canonical
        if (existing := self.have.get((value, layout))) is not None:
            return existing
        whole = self.have.get((value, Layout.replicated(value.shape)))
        op = value.op
        if whole is None and op is not None:
            with self.builder.at(op.line, op.backward):
                if self._emit_sharded(op, value.index, layout):
                    return self.have[value, layout]
        out = self._var(value, layout)
        with self.builder.at(op.line if op is not None else self.builder.line):
            self.values.mover.slice_all(self.get(value, ()) if whole is None else whole, dims, out)
        return out

    def whole(self, value: Value) -> Var:
        """Returns a variable for a whole constant that the caller emits."""
        return self._var(value, Layout.replicated(value.shape))

    def _var(self, value: Value, layout: Layout) -> Var:
        var = self.have[value, layout] = Var(self.builder.name(value.name), layout, value.dtype, value)
        return var

    def _emit_sharded(self, op: Op, index: int, layout: Layout) -> bool:
        """Emits an op whose result has `layout`; returns False if its rule forbids that, or it would communicate."""
        if op.rule is None:
            if layout.is_replicated:
                outs = [None if r is None else self.whole(r) for r in op.results]
                args, kwargs = substitute(op.node, [self._operand(v, ()) for v in op.operands])
                self.builder.compute(op.target, args, kwargs, outs)
            return layout.is_replicated
        propagation = Propagation()
        if (assignment := _assigned(op, index, layout, propagation)) is None:
            return False
        if self._counter.messages(propagation, op, assignment):
            return False
        emitter = Emitter(self.builder, propagation)

        def local_dims(labels: tuple[tuple[str, ...], ...]) -> LocalDims:
            factors = ([*emitter.factors(op, names)] for names in labels)
            return tuple(tuple((emitter.leaf_size(op, x), assignment.get(x, ())) for x in dim) for dim in factors)

        operands = [
            self._operand(v, local_dims(labels)) for v, labels in zip(op.operands, op.rule.operands, strict=True)
        ]
        outs = [
            self._var(r, layout) if i == index and r is not None else None if r is None or assignment else self.whole(r)
            for i, r in enumerate(op.results)
        ]
        emitter.op(op, op.rule, assignment, operands, outs)
        return True

    def _operand(self, value: Value, dims: LocalDims) -> Var:
        """Returns any form of a value: creation ops read at most its dtype and device."""
        if value.constant:
            return self.get(value, dims)
        if forms := self.values.have[value] or self.values.own.forms[value]:
            return next(iter(forms.values()))
        assert value.op is not None
        return self._operand(value.op.operands[0], dims)


def _assigned(op: Op, index: int, layout: Layout, propagation: Propagation) -> Assignment | None:
    """Returns the assignment of an op whose result has `layout`, or None if its rule forbids that layout.

    Adds the dim factors to `propagation`.
    """
    rule, dims = op.rule, propagation.dims
    assert rule is not None
    labels = {name: dims.new(size) for name, size in rule.sizes.items()}
    raw = [[leaf for name in names for leaf in labels[name]] for names in rule.results[index]]
    parts = lock_layout(dims, raw, layout)
    propagation.labels[op] = {name: tuple(dims.resolve(factors)) for name, factors in labels.items()}
    propagation.whole[op] = frozenset(rule.whole).union(*rule.ties.required.items())
    factor = {leaf: (name, k) for name, leaves in propagation.labels[op].items() for k, leaf in enumerate(leaves)}
    assignment: dict[OpFactor, Axes] = {}
    for groups, factors in zip(parts, layout.dims, strict=True):
        if groups is None:  # an empty dim has any factors
            if any(f.axes for f in factors):
                return None
            continue
        for group, one in zip(groups, factors, strict=True):
            for leaf, axes, _ in distribute_factor(dims, group, one):
                if axes and not can_shard(propagation, op, factor[leaf]):
                    return None
                assignment |= {factor[leaf]: axes} if axes else {}
    return assignment
