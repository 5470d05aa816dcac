"""What rules write their local forms with: calls and small reductions, emitted into the program."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardlib import reshard
from shardlib.graph import Op
from shardlib.lower.memory import local_bytes
from shardlib.lower.move import member_coords, position
from shardlib.lower.program import Collective, Instr, Var, leaves
from shardlib.lower.sym import Sym, local_size, offset
from shardlib.meshes.axis import Axis, Coords
from shardlib.propagate.flood import Factor as OpFactor
from shardlib.reshard import Axes
from shardlib.rules.rule import Labels
from shardlib.specs.layout import Factor, Layout
from shardlib.specs.pieces import fullest

if TYPE_CHECKING:
    from shardlib.lower.emit import Emitter

Assignment = Mapping[OpFactor, Axes]  # the mesh axes on the factors of one op


class LocalForm:
    """What rules write their local forms with; see `shardlib.rules.rule.Local`."""

    def __init__(self, emitter: Emitter, op: Op, assignment: Assignment, args: Any, kwargs: Any) -> None:
        assert op.rule is not None
        self.call, self.rule, self.args, self.kwargs = op.call, op.rule, args, kwargs
        self._emitter, self._op, self._assignment = emitter, op, assignment

    def axes(self, factor: str) -> Axes:
        if factor not in self.rule.sizes:  # of size 1
            return ()
        return tuple(a for x in self._emitter.factors(self._op, [factor]) for a in self._assignment.get(x, ()))

    def size(self, factor: str) -> Sym | int:
        if factor not in self.rule.sizes:
            return 1
        return self._emitter.label_size(self._op, factor, self._assignment)

    def offset(self, factor: str) -> Sym | int:
        if factor not in self.rule.sizes:
            return 0
        (first, *rest) = self._emitter.factors(self._op, [factor]) or [(factor, 0)]
        inner = math.prod(self._emitter.leaf_size(self._op, x) for x in rest)
        return offset(self._emitter.leaf_size(self._op, first), self._assignment.get(first, ())) * inner

    def pieces(self, factor: str) -> list[tuple[Sym | int, Sym | int, int]]:
        out: list[tuple[Sym | int, Sym | int, int]] = []
        for x in self._emitter.factors(self._op, [factor]):
            n, axes = self._emitter.leaf_size(self._op, x), self._assignment.get(x, ())
            if out and not axes:
                size, begin, whole = out[-1]
                out[-1] = size * int(n), begin * int(n), whole * int(n)
            else:
                out.append((local_size(n, axes), offset(n, axes), int(n)))
        return out

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

    def position(self, factor: str) -> Sym | int:
        axes = Axis.merge(self.axes(factor))
        return Sym(lambda c: position(c, axes), frozenset(axes), f"position({factor})") if axes else 0

    def calc(self, function: Callable[..., Any], *values: Any) -> Any:
        """Worked out at once, so that what is alike everywhere is no symbol, and nothing is worked out twice."""
        syms = [v for v in values if isinstance(v, Sym)]
        if not syms:
            return function(*values)
        axes = frozenset(a for v in syms for a in v.axes)
        names = sorted({a.name for a in axes})
        table = {
            tuple(c[n] for n in names): function(*(v.at(c) if isinstance(v, Sym) else v for v in values))
            for c in _everywhere(axes)
        }
        if len(alike := set(table.values())) == 1:
            return alike.pop()
        return Sym(lambda c: table[tuple(c[n] for n in names)], axes, f"calc({' '.join(names)})")

    def values(self, value: Any, factor: str) -> list[set[Any]]:
        axes = Axis.merge(self.axes(factor))
        out: list[set[Any]] = [set() for _ in range(self.ways(factor))]
        for coords in _everywhere((*axes, *(value.axes if isinstance(value, Sym) else ()))):
            out[position(coords, axes)].add(value.at(coords) if isinstance(value, Sym) else value)
        return out

    def send(
        self, value: Var, factor: str, pairs: Sequence[tuple[int, int]], shape: Sequence[Sym | int], *, name: str
    ) -> Var:
        emitter, axes = self._emitter, Axis.merge(self.axes(factor))
        read = frozenset(a for n in shape if isinstance(n, Sym) for a in n.axes)
        source = {dst: src for src, dst in pairs}

        def there(coords: Coords, member: int) -> list[int]:
            at = member_coords(coords, axes, member)
            return [n.at(at) if isinstance(n, Sym) else n for n in shape]

        def received(coords: Coords) -> int:
            here = position(coords, axes)
            return math.prod(there(coords, source.get(here, here)))

        params: dict[str, Any] = {"pairs": list(pairs)}
        if read:
            every = lambda coords: [there(coords, i) for i in range(self.ways(factor))]
            params["shapes"] = Sym(every, read | frozenset(axes), f"shapes({name})")
        out = Var(f"{name}.halo", None, value.dtype)
        nbytes = max(map(received, _everywhere((*axes, *read)))) * value.dtype.itemsize
        reason = f"{self._op.name} needs of {name} what others hold along {factor}"
        because = (self._op, factor, name, "exchanged at the borders")
        emitter.program.steps.append(
            Collective(
                "ppermute", axes, value, out, params, nbytes, "sum", emitter.line, emitter.backward, reason, because
            )
        )
        return out

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
        emitter, axes, layout = self._emitter, Axis.merge(self.axes(factor)), self._layout(labels, factor, parts)
        out = Var(name, layout, value.dtype)
        params: dict[str, Any] = {"pairs": list(pairs)}

        def shapes(coords: Coords) -> list[list[int]]:
            return [list(layout.local_shape(member_coords(coords, axes, holds(i)))) for i in range(self.ways(factor))]

        if not all(f.even for f in layout.factors):
            params["shapes"] = Sym(shapes, frozenset(layout.axes), f"shapes({layout})")
        emitter.program.steps.append(
            Collective(
                "ppermute",
                Axis.merge(axes),
                value,
                out,
                params,
                local_bytes(out),
                "sum",
                emitter.line,
                emitter.backward,
                f"{self._op.name} passes {factor} round",
                because=(self._op, factor, name),
            )
        )
        return out

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        n = sum(r.real_type.isSubtypeOf(torch._C.TensorType.get()) for r in target._schema.returns)
        name = f"{self._op.name}.{target._schema.name.split('::')[-1]}"
        dtype = kwargs.get("dtype") or _result_dtype(target, args)
        outs = tuple(Var(name, None, dtype) for _ in range(max(1, n) if target._schema.returns else 0))
        for out, r in zip(outs, target._schema.returns, strict=False):
            out.dtype = torch.int64 if r.name == "indices" else dtype
        same = [a.dtype for a in leaves((args, kwargs), Var)] == [v.dtype for v in self._op.operands]
        if target is self._op.target and same:  # one more call of the op itself
            for out, result in zip(outs, self._op.results, strict=True):
                out.dtype = dtype if result is None else result.dtype
        emitter = self._emitter
        emitter.program.steps.append(
            Instr(target, args, kwargs, outs, emitter.line, emitter.backward, f"part of {self._op.name}")
        )
        return outs[0] if len(outs) == 1 else outs

    def all_reduce(self, value: Var, factor: str, kind: str, labels: Labels | None = None) -> Var:
        emitter, axes = self._emitter, self.axes(factor)
        if not axes:
            return value  # another of the factors that the local form is for is cut
        out = Var(f"{value.name}.reduced", None, value.dtype)
        n = reshard.ways(axes)
        size = self._small_bytes() if labels is None else local_bytes(Var("", self._layout(labels, "", 1), value.dtype))
        nbytes = 2 * size * (n - 1) / n
        emitter.program.steps.append(
            Collective(
                "all_reduce",
                Axis.merge(axes),
                value,
                out,
                {},
                nbytes,
                kind,
                emitter.line,
                emitter.backward,
                f"{self._op.name} needs its {kind} over {factor}",
                because=(self._op, factor),
            )
        )
        return out

    def all_gather(self, value: Var, factor: str, dim: int, labels: Labels, size: Sym | int = 1) -> Var:
        emitter, axes = self._emitter, Axis.merge(self.axes(factor))
        if not axes:
            return value
        n = reshard.ways(axes)
        each = [self.of(size, factor, lambda _, i=i: i) for i in range(n)]  # type: ignore[misc]

        def sizes(coords: Coords) -> list[int]:
            return [s.at(coords) if isinstance(s, Sym) else s for s in each]

        total = sum(sizes(dict.fromkeys(emitter.program.mesh.axis_names, 0)))
        dims = list(self._layout(labels, factor, 1).dims)
        dims[dim] = (Factor(total),)
        out = Var(f"{value.name}.gathered", Layout(tuple(dims)), value.dtype)
        even = not isinstance(size, Sym)
        emitter.program.steps.append(
            Collective(
                "all_gather",
                axes,
                value,
                out,
                {"dim": dim, "sizes": each if even else Sym(sizes, frozenset(axes), f"{size} of each")},
                local_bytes(out) * (n - 1) / n,
                "sum",
                emitter.line,
                emitter.backward,
                f"{self._op.name} needs what each piece of {factor} came to",
                because=(self._op, factor),
            )
        )
        return out

    def _layout(self, labels: Labels, factor: str, parts: int) -> Layout:
        """The layout of a tensor of these labels, or of one of `parts` equal parts along `factor` of every piece."""
        emitter, op = self._emitter, self._op
        pairs = [*self.rule.follows.items(), *self.rule.rounds.items()]
        alike = {factor, *(t for t, s in pairs if s == factor), *(s for t, s in pairs if t == factor)}

        def one(x: OpFactor) -> Factor:
            size = emitter.leaf_size(op, x)
            if parts > 1 and x[0] in alike and x[1] == 0:
                size //= parts
            return Factor(size, Axis.merge(self._assignment.get(x, ())))

        return Layout(tuple(tuple(one(x) for x in emitter.factors(op, names)) for names in labels)).canonical

    def _small_bytes(self) -> float:
        """Bytes of one number for each row of the op's first result, local to the fullest device."""
        result = self._op.results[0]
        assert result is not None
        n = result.dtype.itemsize
        for names in self.rule.results[0]:
            for x in self._emitter.factors(self._op, names):
                if x[0] not in self.rule.local_factors:
                    n *= fullest(self._emitter.leaf_size(self._op, x), Axis.merge(self._assignment.get(x, ())))
        return n


def _result_dtype(target: Any, args: Sequence[Any]) -> torch.dtype:
    """The dtype of what an op without a `dtype` makes of its operands."""
    name = target._schema.name.removeprefix("aten::")
    if name in _COMPARES:
        return torch.bool
    operands = [a.dtype for a in leaves(args, Var)]
    behind = operands[1:] if name == "where" else operands
    if torch.Tag.pointwise not in target.tags:
        behind = behind[:1]
    if not behind:
        return torch.float32
    dtype: torch.dtype = functools.reduce(torch.promote_types, behind)
    number = args[1] if name in _WITH_NUMBER and len(args) > 1 else None
    if isinstance(number, Sym):
        number = 1
    if isinstance(number, bool | int | float | complex):  # of a higher kind than the tensors': bool, int, float
        dtype = torch.result_type(torch.empty(0, dtype=dtype, device="meta"), number)
    return dtype


_WITH_NUMBER = ("add", "sub", "mul", "div", "pow", "remainder", "floor_divide", "fmod")
_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "logical_and", "logical_or", "logical_not", "any", "all")


def _everywhere(axes: Iterable[Axis]) -> Iterator[dict[str, int]]:
    """Coordinates of all devices, along the mesh axes that `axes` are of."""
    lengths = {a.name: a.of for a in axes}
    return (dict(zip(lengths, at, strict=True)) for at in itertools.product(*map(range, lengths.values())))
