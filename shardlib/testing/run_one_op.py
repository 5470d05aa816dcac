"""One call of an op: on the whole, and on pieces as it is lowered and run in any program, on virtual devices.

Pieces are slices of the whole, or lie in memory with their dims in the other order, as a kernel before may have left
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from shardlib.compiler.codegen import virtual
from shardlib.compiler.codegen.op_callables import callable_of
from shardlib.compiler.graph import ir as graphs
from shardlib.compiler.graph.ir import Op
from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.lower.emit import Emitter
from shardlib.compiler.program.steps import Program, Var
from shardlib.compiler.program.verify import verify
from shardlib.core.context import tracing
from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import pytree
from shardlib.rules.proof_cuts import Cut
from shardlib.rules.rule import Labels, Rule
from shardlib.sharding.chunks import span
from shardlib.sharding.layout import Factor, Layout, PartialSum
from shardlib.sharding.mesh.axis import Coords
from shardlib.sharding.mesh.mesh import Mesh

# What rounding may cost in a few operations, relative to the largest number.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROUNDING |= {torch.complex128: 1e-11, torch.complex64: 1e-5}
# What an op raises of pieces that it was not made for.
RAISED = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError)


@dataclass(frozen=True)
class Trial:
    """One call, as a graph of one op: its tensors, and what they give."""

    op: Op
    tensors: tuple[Tensor, ...]
    results: tuple[Any, ...]

    @staticmethod
    def of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trial:
        graph, tensors = fx.Graph(), list[Tensor]()

        def given(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            tensors.append(x.detach())
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["val"] = x.detach()
            return node

        node = graph.call_function(target, *pytree.tree_map(given, (tuple(args), dict(kwargs))))
        with torch.no_grad():
            found = target(*args, **kwargs)
        node.meta["val"] = found
        graph.output((node,) if isinstance(found, Tensor) else ())
        with tracing():
            (op,) = graphs.build(fx.GraphModule(torch.nn.Module(), graph)).ops
        return Trial(op, tuple(tensors), tuple(found) if isinstance(found, tuple | list) else (found,))

    @property
    def rule(self) -> Rule:
        assert self.op.rule is not None
        return self.op.rule

    def layout(self, labels: Labels, cut: Cut, pending: Sequence[PartialSum] = ()) -> Layout:
        sizes = {**self.rule.sizes, **cut.pieces}
        dims = (tuple(Factor(sizes[f], cut.axes.get(f, ())) for f in dim) or (Factor(1),) for dim in labels)
        return Layout(tuple(dims), tuple(pending))

    def pending(self, i: int, cut: Cut) -> list[PartialSum]:
        """What result i still owes: sums over axes of factors that it has not."""
        have = {f for dim in self.rule.results[i] for f in dim}
        mine = {a for f in have for a in cut.axes.get(f, ())}
        read = {f for labels in self.rule.operands for dim in labels for f in dim}
        lost = [f for f in cut.axes if f in read - have and self.rule.owed(i, f)]
        owed = ((tuple(a for a in cut.axes[f] if a not in mine), self.rule.reduce[f]) for f in lost)
        return [PartialSum(axes, kind) for axes, kind in owed if axes]

    def called(self, tensors: Sequence[Tensor], run: Any = None) -> list[Tensor]:
        """What the op gives for other tensors; `run` stands for it."""
        given = dict(zip(self.op.node.all_input_nodes, tensors, strict=True))
        args, kwargs = fx.map_arg((self.op.node.args, self.op.node.kwargs), given.__getitem__)
        found = (run or self.op.target)(*args, **kwargs)
        return tensors_of(found if isinstance(found, tuple | list) else [found])

    @property
    def takes_turned(self) -> bool:
        """Whether the op takes tensors whose dims lie in memory in the other order, and gives, right or wrong, results
        of the same shapes."""
        try:
            found = self.called([*map(_turned, self.tensors)], callable_of(self.op.target))
        except RAISED:
            return False
        return [x.shape for x in found] == [x.shape for x in tensors_of(self.results)]

    def program(self, cut: Cut, mesh: Mesh) -> Program:
        """The op on pieces, as lowering writes it."""
        builder, op, rule = Builder(mesh), self.op, self.rule
        leaves, sizes = {f: [f] for f in rule.sizes}, {**rule.sizes, **cut.pieces}
        flood = SimpleNamespace(labels={op: leaves}, dims=SimpleNamespace(size=sizes.__getitem__))
        for i, labels in enumerate(rule.operands):
            value = op.operands[i]
            builder.inputs.append(Var(builder.name(value.name), self.layout(labels, cut), value.dtype, value))
        outs = [
            None if r is None else Var(builder.name(r.name), self.layout(labels, cut, self.pending(i, cut)), r.dtype, r)
            for i, (r, labels) in enumerate(zip(op.results, rule.results, strict=True))
        ]
        assignment = {(f, 0): axes for f, axes in cut.axes.items()}
        # Of all that propagation knows, a single op's local form asks for its leaves and their sizes.
        Emitter(builder, flood).op(op, rule, assignment, builder.inputs, outs)  # type: ignore[arg-type]
        builder.outputs += [out for out in outs if out is not None]
        return builder.finish()

    def faults(self, cut: Cut, turned: bool, *, values: bool = True) -> Iterator[str]:
        """What is wrong with the results of one cut, of pieces that are `turned` in memory or not."""
        mesh = Mesh.abstract({a.name: a.of for axes in cut.axes.values() for a in axes} or {"a": 1})
        devices, lie = mesh.all_coords(), _turned if turned else lambda x: x
        pieces = [
            [lie(self.layout(labels, cut).scatter(x, c)) for c in devices]
            for x, labels in zip(self.tensors, self.rule.operands, strict=True)
        ]
        try:
            found = virtual.load(verify(self.program(cut, mesh)), mesh, share=False)(pieces)
        except ShardingError:
            raise
        except RAISED as error:
            first, *rest = str(error).splitlines() or [""]
            more = f" {rest[0].strip().removeprefix('* ')}" if first.endswith(":") and rest else ""
            yield f"{type(error).__name__}: {first}{more}"
            return
        whole = [(i, x) for i, x in enumerate(self.results) if isinstance(x, Tensor)]
        for (i, want), held in zip(whole, found, strict=True):
            at = self.layout(self.rule.results[i], cut, self.pending(i, cut))
            shards = list(zip(devices, held, strict=True))
            yield from (f"result {i} {fault}" for fault in _unlike(at, shards, want, values=values))


def tensors_of(results: Sequence[Any]) -> list[Tensor]:
    return [x for x in results if isinstance(x, Tensor)]


def same(a: Tensor, b: Tensor, room: float = 0.0, least: float = 1.0) -> bool:
    """Equal, up to what rounding may cost of numbers as large as these, or as `least`."""
    room = room or ROUNDING.get(a.dtype, 0.0)
    if not room or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    finite = b[torch.isfinite(b)].abs()
    most = max(least, float(finite.max())) if finite.numel() else least
    return torch.allclose(a, b, rtol=room, atol=room * most, equal_nan=True)


def _turned(x: Tensor) -> Tensor:
    order = tuple(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def _unlike(at: Layout, shards: Sequence[tuple[Coords, Tensor]], want: Tensor, *, values: bool) -> Iterator[str]:
    """How pieces in a layout differ from the whole."""
    for coords, x in shards:
        if tuple(x.shape) != at.local_shape(coords) or x.dtype != want.dtype:
            yield f"is {list(x.shape)} of {x.dtype} on {coords}, not {list(at.local_shape(coords))} of {want.dtype}"
            return
    if not values:
        return
    first: dict[Any, Tensor] = {}
    for coords, x in shards:
        part = tuple(span(f.size, f.axes, coords) for f in at.factors), tuple(a.coord(coords) for a in at.pending_axes)
        if not same(x, first.setdefault(part, x)):
            yield "differs between devices that should hold the same"
            return
    if len({p.kind for p in at.pending}) > 1:
        yield "owes reductions of two kinds, and a program knows one at a time"
    elif not same(have := at.gather(shards), want):
        off = f": it is off by {float((have - want).abs().max()):.3g}" if want.is_floating_point() else ""
        yield f"is wrong{off}"
