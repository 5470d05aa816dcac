"""What rules write their local forms with: calls and small reductions, emitted into the program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardlib import reshard
from shardlib.graph import Op
from shardlib.layout import Axis
from shardlib.lower.program import Collective, Instr, Var
from shardlib.lower.sym import Sym, offset
from shardlib.propagate.flood import Factor as OpFactor
from shardlib.reshard import Axes

if TYPE_CHECKING:
    from shardlib.lower.lowering import Lowering

Assignment = Mapping[OpFactor, Axes]  # the mesh axes on the factors of one op


class LocalForm:
    """What rules write their local forms with; see `shardlib.rules.rule.Local`."""

    def __init__(self, lowering: Lowering, op: Op, assignment: Assignment, args: Any, kwargs: Any) -> None:
        assert op.rule is not None
        self.call, self.rule, self.args, self.kwargs = op.call, op.rule, args, kwargs
        self._lowering, self._op, self._assignment = lowering, op, assignment

    def axes(self, factor: str) -> Axes:
        return tuple(a for x in self._lowering.factors(self._op, [factor]) for a in self._assignment.get(x, ()))

    def size(self, factor: str) -> Sym | int:
        return self._lowering.label_size(self._op, factor, self._assignment)

    def offset(self, factor: str) -> Sym | int:
        (first, *rest) = self._lowering.factors(self._op, [factor]) or [(factor, 0)]
        inner = math.prod(self._lowering.leaf_size(self._op, x) for x in rest)
        return offset(self._lowering.leaf_size(self._op, first), self._assignment.get(first, ())) * inner

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        n = sum(r.real_type.isSubtypeOf(torch._C.TensorType.get()) for r in target._schema.returns)
        name = f"{self._op.name}.{target._schema.name.split('::')[-1]}"
        outs = tuple(Var(name, None, torch.float32) for _ in range(max(1, n)))
        low = self._lowering
        low.program.steps.append(Instr(target, args, kwargs, outs, low.line, low.backward, f"part of {self._op.name}"))
        return outs[0] if len(outs) == 1 else outs

    def all_reduce(self, value: Var, factor: str, kind: str) -> Var:
        low, axes = self._lowering, self.axes(factor)
        if not axes:
            return value  # another of the factors that the local form is for is cut
        out = Var(f"{value.name}.reduced", None, value.dtype)
        n = reshard.ways(axes)
        nbytes = 2 * self._small_bytes() * (n - 1) / n
        low.program.steps.append(
            Collective(
                "all_reduce",
                Axis.merge(axes),
                value,
                out,
                {},
                nbytes,
                kind,
                low.line,
                low.backward,
                f"{self._op.name} needs its {kind} over {factor}",
                because=(self._op, factor),
            )
        )
        return out

    def _small_bytes(self) -> float:
        """Bytes of one number for each row of the op's first result, local to the fullest device."""
        result = self._op.results[0]
        assert result is not None
        n = result.dtype.itemsize
        for names in self.rule.results[0]:
            for x in self._lowering.factors(self._op, names):
                if x[0] not in self.rule.local_factors:
                    n *= -(-self._lowering.leaf_size(self._op, x) // reshard.ways(self._assignment.get(x, ())))
        return n
