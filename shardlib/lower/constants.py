"""Constants: what depends on no input is made in pieces where that is possible, or made whole and sliced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardlib.graph import Op, Value, is_creation
from shardlib.lower.arguments import put, substitute
from shardlib.meshes.axis import Axis
from shardlib.program.steps import Var
from shardlib.program.sym import local_size, product
from shardlib.specs.layout import Factor, Layout

if TYPE_CHECKING:
    from shardlib.lower.values import Values


class Constants:
    """The constants of a program that is being written, by their cuts."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.have: dict[tuple[Value, tuple[Any, ...]], Var] = {}

    def get(self, value: Value, dims: tuple[Any, ...]) -> Var:
        """A constant, cut as `dims` says (per dim, `(size, axes)` per factor): made in pieces, or whole and sliced."""
        cut = any(axes for dim in dims for _, axes in dim)
        key = (value, dims if cut else ())
        if (known := self.have.get(key)) is not None:
            return known
        op = value.op
        if op is not None and not cut:
            operands = [self._operand(v) for v in op.operands]
            args, kwargs = substitute(op.node, operands)
            outs = [None if r is None else self.whole(r) for r in op.results]
            self.values.builder.compute(op.target, args, kwargs, outs)
            return self.have[key]
        layout = Layout(tuple(tuple(Factor(n, Axis.merge(a)) for n, a in dim) for dim in dims)).canonical
        builder, out = self.values.builder, Var(self.values.builder.name(value.name), layout, value.dtype, value)
        if op is not None and op.rule is not None and is_creation(op.target) and self._made_in_pieces(op):
            self._create(op, dims, out)
        else:
            whole = self.get(value, ())
            with builder.at(op.line if op is not None else builder.line):
                self.values.mover.slice_all(whole, dims, out)
        self.have[key] = out
        return out

    def whole(self, value: Value) -> Var:
        """A constant that is the same on all devices."""
        var = Var(self.values.builder.name(value.name), Layout.replicated(value.shape), value.dtype, value)
        self.have[value, ()] = var
        return var

    def _operand(self, value: Value) -> Var:
        """Creation ops read at most the dtype and device of their operand: any form of it will do."""
        if value.constant:
            return self.get(value, ())
        if self.values.have[value]:
            return next(iter(self.values.have[value].values()))
        assert value.op is not None
        return self._operand(value.op.operands[0])

    def _made_in_pieces(self, op: Op) -> bool:
        assert op.rule is not None
        named = {n for _, names in op.rule.ints.values() for n in names}
        return all(n in named for names in op.rule.results[0] for n in names)

    def _create(self, op: Op, dims: tuple[Any, ...], out: Var) -> None:
        assert op.rule is not None
        assert op.results[0] is not None
        sizes = {}
        for names, factors in zip(op.rule.results[0], dims, strict=True):
            if names:
                (label,) = names
                sizes[label] = product([local_size(n, axes) for n, axes in factors])
        args, kwargs = substitute(op.node, [self._operand(v) for v in op.operands])
        for path, (k, names) in op.rule.ints.items():
            args, kwargs = put(args, kwargs, path, product([sizes[n] for n in names]) * k)
        self.values.builder.compute(op.target, args, kwargs, [out, *[None] * (len(op.results) - 1)])
