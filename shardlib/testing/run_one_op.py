"""Runs one call of an op on whole tensors, and lowered to shards on virtual devices.

Shards are slices of the whole tensor, or lie in memory with their dims in reverse order, as another kernel may leave
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
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.rules.rule import Labels, Rule
from shardlib.rules.trial_shardings import TrialSharding
from shardlib.sharding.chunks import shard_range
from shardlib.sharding.layout import Factor, Layout, PartialSum
from shardlib.sharding.mesh.axis import Coords
from shardlib.sharding.mesh.mesh import Mesh

# Rounding errors of a few operations, relative to the largest number.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROUNDING |= {torch.complex128: 1e-11, torch.complex64: 1e-5}
# Errors that an op raises for shards that it does not support.
RAISED = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError)
EMPTY_SHARD = "a device has an empty shard of"


@dataclass(frozen=True)
class Trial:
    """One call as a graph of one op, with its tensors and results."""

    op: Op
    tensors: tuple[Tensor, ...]
    results: tuple[Any, ...]

    @staticmethod
    def trace(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trial:
        """Writes the graph of one call, and runs the call."""
        graph, tensors = fx.Graph(), list[Tensor]()

        def add_input(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            tensors.append(x.detach())
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta["val"] = x.detach()
            return node

        node = graph.call_function(target, *pytree.tree_map(add_input, (tuple(args), dict(kwargs))))
        with torch.no_grad():
            results = target(*args, **kwargs)
        node.meta["val"] = results
        graph.output((node,) if isinstance(results, Tensor) else ())
        with tracing():
            (op,) = graphs.build(fx.GraphModule(torch.nn.Module(), graph)).ops
        return Trial(op, tuple(tensors), tuple(results) if isinstance(results, tuple | list) else (results,))

    @property
    def rule(self) -> Rule:
        return self.op.required_rule

    def layout(self, labels: Labels, cut: TrialSharding, pending: Sequence[PartialSum] = ()) -> Layout:
        sizes = {**self.rule.sizes, **cut.shards}
        dims = (tuple(Factor(sizes[f], cut.axes.get(f, ())) for f in dim) or (Factor(1),) for dim in labels)
        return Layout(tuple(dims), tuple(pending))

    def pending(self, i: int, cut: TrialSharding) -> list[PartialSum]:
        """Returns the partial sums of result i: over the axes of factors that are not in the result."""
        kept = {f for dim in self.rule.results[i] for f in dim}
        kept_axes = {a for f in kept for a in cut.axes.get(f, ())}
        read = {f for labels in self.rule.operands for dim in labels for f in dim}
        reduced = [f for f in cut.axes if f in read - kept and self.rule.partial_kind(i, f)]
        sums = ((tuple(a for a in cut.axes[f] if a not in kept_axes), self.rule.reduce[f]) for f in reduced)
        return [PartialSum(axes, kind) for axes, kind in sums if axes]

    def run(self, tensors: Sequence[Tensor], function: Any = None) -> list[Tensor]:
        """Runs the op, or `function` in its place, on other tensors."""
        values = dict(zip(self.op.node.all_input_nodes, tensors, strict=True))
        args, kwargs = fx.map_arg((self.op.node.args, self.op.node.kwargs), values.__getitem__)
        results = (function or self.op.target)(*args, **kwargs)
        return list_tensors(results if isinstance(results, tuple | list) else [results])

    @property
    def takes_reversed_strides(self) -> bool:
        """True if the op takes tensors with reversed dims in memory, and returns results of the same shapes."""
        try:
            results = self.run([*map(_reverse_strides, self.tensors)], callable_of(self.op.target))
        except RAISED:
            return False
        return [x.shape for x in results] == [x.shape for x in list_tensors(self.results)]

    def program(self, cut: TrialSharding, mesh: Mesh) -> Program:
        builder, op, rule = Builder(mesh), self.op, self.rule
        factors, sizes = {f: [f] for f in rule.sizes}, {**rule.sizes, **cut.shards}
        propagation = SimpleNamespace(labels={op: factors}, dims=SimpleNamespace(size=sizes.__getitem__))
        for i, labels in enumerate(rule.operands):
            value = op.operands[i]
            builder.inputs.append(Var(builder.name(value.name), self.layout(labels, cut), value.dtype, value))
        outs = [
            None if r is None else Var(builder.name(r.name), self.layout(labels, cut, self.pending(i, cut)), r.dtype, r)
            for i, (r, labels) in enumerate(zip(op.results, rule.results, strict=True))
        ]
        assignment = {(f, 0): axes for f, axes in cut.axes.items()}
        # A single op's local form reads only the factors and their sizes from the propagation.
        Emitter(builder, propagation).op(op, rule, assignment, builder.inputs, outs)  # type: ignore[arg-type]
        builder.outputs += [out for out in outs if out is not None]
        return builder.finish()

    def find_faults(self, cut: TrialSharding, is_reversed: bool, *, values: bool = True) -> Iterator[str]:
        """Yields faults of the results of one cut; `is_reversed` reverses the dims of shards in memory."""
        mesh = Mesh.abstract({a.name: a.axis_size for axes in cut.axes.values() for a in axes} or {"a": 1})
        devices, set_strides = mesh.all_coords(), _reverse_strides if is_reversed else lambda x: x
        shards = [
            [set_strides(self.layout(labels, cut).scatter(x, c)) for c in devices]
            for x, labels in zip(self.tensors, self.rule.operands, strict=True)
        ]
        try:
            outputs = virtual.load(verify(self.program(cut, mesh)), mesh, share=False)(shards)
        except ShardingError:
            raise
        except RAISED as error:
            first, *rest = str(error).splitlines() or [""]
            more = f" {rest[0].strip().removeprefix('* ')}" if first.endswith(":") and rest else ""
            empty = dict.fromkeys(self._empty_factors(cut, shards))
            reason = f" ({EMPTY_SHARD} {', '.join(empty)})" if empty else ""
            yield f"{type(error).__name__}: {first}{more}{reason}"
            return
        whole = [(i, x) for i, x in enumerate(self.results) if isinstance(x, Tensor)]
        for (i, expected), held in zip(whole, outputs, strict=True):
            layout = self.layout(self.rule.results[i], cut, self.pending(i, cut))
            by_device = list(zip(devices, held, strict=True))
            yield from (f"result {i} {fault}" for fault in _compare_shards(layout, by_device, expected, values=values))

    def _empty_factors(self, cut: TrialSharding, shards: Sequence[Sequence[Tensor]]) -> Iterator[str]:
        """Yields the sharded factors of dims of which some device has an empty shard."""
        for whole, labels, held in zip(self.tensors, self.rule.operands, shards, strict=True):
            for d, factors in enumerate(labels):
                if whole.shape[d] and not all(x.shape[d] for x in held):
                    yield from (f for f in factors if f in cut.axes)


def list_tensors(results: Sequence[Any]) -> list[Tensor]:
    return [x for x in results if isinstance(x, Tensor)]


def is_close(a: Tensor, b: Tensor, tolerance: float = 0.0, least: float = 1.0) -> bool:
    """True if tensors are equal up to rounding, relative to the largest number and at least to `least`."""
    tolerance = tolerance or ROUNDING.get(a.dtype, 0.0)
    if not tolerance or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    finite = b[torch.isfinite(b)].abs()
    most = max(least, float(finite.max())) if finite.numel() else least
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * most, equal_nan=True)


def _reverse_strides(x: Tensor) -> Tensor:
    order = tuple(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def _compare_shards(
    layout: Layout, shards: Sequence[tuple[Coords, Tensor]], expected: Tensor, *, values: bool
) -> Iterator[str]:
    """Yields the first difference between shards and the expected whole tensor."""
    for coords, x in shards:
        shape = layout.local_shape(coords)
        if tuple(x.shape) != shape or x.dtype != expected.dtype:
            yield f"is {list(x.shape)} of {x.dtype} on {coords}, not {list(shape)} of {expected.dtype}"
            return
    if not values:
        return
    first: dict[Any, Tensor] = {}
    for coords, x in shards:
        spans = tuple(shard_range(f.size, f.axes, coords) for f in layout.factors)
        part = spans, tuple(a.coord(coords) for a in layout.pending_axes)
        if not is_close(x, first.setdefault(part, x)):
            yield "differs between devices that should hold the same"
            return
    if len({p.kind for p in layout.pending}) > 1:
        yield "owes reductions of two kinds, and a program knows one at a time"
    elif not is_close(gathered := layout.gather(shards), expected):
        off = f": it is off by {float((gathered - expected).abs().max()):.3g}" if expected.is_floating_point() else ""
        yield f"is wrong{off}"
