"""What rules write their local forms with: calls and small reductions, emitted into the program."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardlib import reshard
from shardlib.graph import Op
from shardlib.layout import Axis, Coords, Factor, Layout
from shardlib.lower.move import member_coords, position
from shardlib.lower.program import Collective, Instr, Var, leaves
from shardlib.lower.sym import Sym, offset
from shardlib.memory import local_bytes
from shardlib.propagate.flood import Factor as OpFactor
from shardlib.reshard import Axes
from shardlib.rules.rule import Labels

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
        if factor not in self.rule.sizes:  # of size 1
            return ()
        return tuple(a for x in self._lowering.factors(self._op, [factor]) for a in self._assignment.get(x, ()))

    def size(self, factor: str) -> Sym | int:
        return self._lowering.label_size(self._op, factor, self._assignment)

    def offset(self, factor: str) -> Sym | int:
        (first, *rest) = self._lowering.factors(self._op, [factor]) or [(factor, 0)]
        inner = math.prod(self._lowering.leaf_size(self._op, x) for x in rest)
        return offset(self._lowering.leaf_size(self._op, first), self._assignment.get(first, ())) * inner

    def ways(self, factor: str) -> int:
        return reshard.ways(self.axes(factor))

    def of(self, value: Sym | int, factor: str, member: Callable[[int], int]) -> Sym | int:
        if not isinstance(value, Sym):
            return value
        axes = Axis.merge(self.axes(factor))

        def at(coords: Coords) -> int:
            there = member_coords(coords, axes, member(position(coords, axes)))
            return value.at(there)  # type: ignore[no-any-return]

        return Sym(at, value.axes | set(axes), f"{value.text} elsewhere on {' '.join(map(str, axes))}")

    def ppermute(
        self,
        value: Var,
        factor: str,
        pairs: Sequence[tuple[int, int]],
        labels: Labels,
        *,
        name: str,
        holds: Callable[[int], int] = lambda i: i,
        parts: int = 1,
    ) -> Var:
        low, axes, layout = self._lowering, Axis.merge(self.axes(factor)), self._layout(labels, factor, parts)
        out = Var(name, layout, value.dtype)
        params: dict[str, Any] = {"pairs": list(pairs)}

        def shapes(coords: Coords) -> list[list[int]]:
            return [list(layout.local_shape(member_coords(coords, axes, holds(i)))) for i in range(self.ways(factor))]

        if any(f.size % reshard.ways(f.axes) for f in layout.factors):
            params["shapes"] = Sym(shapes, frozenset(layout.axes), f"shapes({layout})")
        low.program.steps.append(
            Collective(
                "ppermute",
                Axis.merge(axes),
                value,
                out,
                params,
                local_bytes(out),
                "sum",
                low.line,
                low.backward,
                f"{self._op.name} passes {factor} round",
                because=(self._op, factor, name),
            )
        )
        return out

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        n = sum(r.real_type.isSubtypeOf(torch._C.TensorType.get()) for r in target._schema.returns)
        name = f"{self._op.name}.{target._schema.name.split('::')[-1]}"
        dtype = kwargs.get("dtype") or next((a.dtype for a in leaves(args, Var)), torch.float32)
        outs = tuple(Var(name, None, dtype) for _ in range(max(1, n)))
        if target is self._op.target:  # one more call of the op itself
            for out, result in zip(outs, self._op.results, strict=True):
                out.dtype = dtype if result is None else result.dtype
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

    def _layout(self, labels: Labels, factor: str, parts: int) -> Layout:
        """The layout of a tensor of these labels, or of one of `parts` equal parts along `factor` of every piece."""
        low, op = self._lowering, self._op

        def one(x: OpFactor) -> Factor:
            size = low.leaf_size(op, x)
            return Factor(size // parts if x == (factor, 0) else size, Axis.merge(self._assignment.get(x, ())))

        return Layout(tuple(tuple(one(x) for x in low.factors(op, names)) for names in labels)).canonical

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
