"""Reorders additions so that partial sums are added first.

`(x + a) + b` becomes `x + (a + b)` if only `a` and `b` are partial. So one reduction serves both.
Gradients of a residual stream arrive in the first order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.lower.value_layouts import Values
from shardlib.core.aten.op_traits import has_trait


class Regrouping:
    """Delays the addition of a complete value and a partial sum until the addition that reads its result."""

    def __init__(self, values: Values, readers: Mapping[Value, int], passes: Mapping[Op, int]) -> None:
        self.values, self.readers, self.passes = values, readers, passes
        self.waiting: dict[Value, Op] = {}

    def waits(self, op: Op) -> bool:
        """Returns whether an op is lowered later, in front of its reader."""
        if not self._adds(op) or sum(self._partial_form(x) is None for x in op.operands) != 1:
            return False
        (result,) = op.results
        assert result is not None, "a sum has a value"
        if self.readers[result] != 1 or result.is_output:
            return False
        if not all(self._adds(reader) and self.passes[reader] == self.passes[op] for reader, _ in result.readers):
            return False
        self.waiting[result] = op
        return True

    def met_by(self, op: Op, *, swaps: bool) -> Iterator[Op]:
        """Yields the delayed additions that `op` reads; `swaps` allows operands of both to change places."""
        for i, value in enumerate(op.operands):
            if (first := self.waiting.pop(value, None)) is not None:
                a, b = first.operands
                complete, term = (a, b) if self._partial_form(a) is None else (b, a)
                other = op.operands[1 - i]
                if swaps and other is not value and self._partial_form(other) == self._partial_form(term):
                    first.operands, op.operands = (term, other), (value, complete)
                yield first

    def _adds(self, op: Op) -> bool:
        """Returns whether an op adds two tensors that have the layout factors of its result."""
        propagation = self.values.propagation
        if (
            op.rule is None
            or op.owns is not None
            or not has_trait(op.target, "commutes")
            or not has_trait(op.target, "takes_alpha")
            or op.node.kwargs
        ):
            return False
        result = op.results[0]
        return (
            result is not None
            and len(op.operands) == 2
            and result not in propagation.pinned_values
            and all(x.dtype == result.dtype and not x.constant and not x.manual for x in op.operands)
            and all(propagation.value[x] == propagation.value[result] for x in op.operands)
        )

    def _partial_form(self, value: Value) -> object:
        """Returns the partial form of a value with one reader; None if it is complete or has several readers."""
        form = self.values.partial_form(value)
        return form if form is not None and form[1].kind == "sum" and self.readers[value] == 1 else None
