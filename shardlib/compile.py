"""The pipeline, as a flat list of stages: trace -> normalise -> propagate -> lower."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from shardlib import graph as graphs
from shardlib.errors import ShardingError
from shardlib.graph import Graph, Op, Value
from shardlib.lower import lower
from shardlib.lower.program import Program
from shardlib.mesh import Mesh
from shardlib.normalise import normalise
from shardlib.places import place
from shardlib.propagate import Propagated, propagate
from shardlib.propagate.flood import Fixed
from shardlib.propagate.units import is_constraint
from shardlib.spec import P, Spec, resolve_many
from shardlib.state import paused_gc, tracing
from shardlib.trace import Traced, flatten_call, trace

SpecLike = str | P | Spec | None


@dataclass(frozen=True)
class Compiled:
    """What every stage made of one function at one set of shapes; `seconds` is the time that each stage took."""

    traced: Traced
    mesh: Mesh
    graph: Graph
    propagated: Propagated
    program: Program
    inputs: tuple[tuple[str, Value], ...]
    fixed_inputs: Mapping[int, Fixed]  # by input position
    seconds: Mapping[str, float] = field(default_factory=dict)


@paused_gc()
def compile_program(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    static: Collection[int | str] = (),
    placed: Callable[[Any], Fixed | None] = lambda leaf: None,
) -> Compiled:
    """Run all stages on `fn(*args, **kwargs)`.

    `in_specs` and `out_specs` are prefix pytrees of specs; `placed` gives the layout of an argument leaf that has one.
    """
    clock = _Clock()
    with mesh, tracing():
        traced = trace(fn, args, kwargs, static=static)
        clock.stop("trace")
        traced = normalise(traced)
    clock.stop("normalise")
    graph = graphs.build(traced.graph)
    fixed_inputs = _fixed_inputs(traced, graph, args, kwargs, in_specs, static, mesh, placed)
    fixed = {graph.inputs[i]: f for i, f in fixed_inputs.items()} | _constraints(graph, mesh)
    outputs = _fixed_outputs(traced, graph, out_specs, mesh)
    clock.stop("rules")
    propagated = propagate(graph, mesh, fixed, outputs, _doors(graph, mesh))
    clock.stop("propagate")
    program = lower(graph, propagated, mesh)
    clock.stop("lower")
    names = tuple(zip(traced.input_names, graph.inputs, strict=True))
    return Compiled(traced, mesh, graph, propagated, program, names, fixed_inputs, clock.seconds)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._last = now - self._last, now


def _fixed_inputs(
    traced: Traced,
    graph: Graph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    in_specs: Any,
    static: Collection[int | str],
    mesh: Mesh,
    placed: Callable[[Any], Fixed | None],
) -> dict[int, Fixed]:
    """Layouts of the inputs that have one: from their spec, or because they are placed already."""
    specs = _input_specs(traced, args, kwargs, in_specs, static)
    items = [
        (i, (name, value.shape, spec, None))
        for i, (name, value, spec) in enumerate(zip(traced.input_names, graph.inputs, specs, strict=True))
        if spec is not None
    ]
    resolved = resolve_many([item for _, item in items], mesh, what="jit in_specs") if items else []
    fixed = {
        i: Fixed(r.layout, r.names, r.open, f"in_specs: {item[0]} {r.spec}")
        for (i, item), r in zip(items, resolved, strict=True)
    }
    wrong = []
    for i, (leaf, name) in enumerate(
        zip(_tensor_leaves(traced, args, kwargs, static), traced.input_names, strict=True)
    ):
        if (at := placed(leaf)) is not None:
            said = fixed.get(i)
            if said is not None and not any(said.open) and said.layout.canonical != at.layout.canonical:
                wrong.append(
                    f"{name} of shape {list(at.layout.shape)} is laid out [{at.layout}], in_specs say [{said.layout}]"
                )
            names = said.names if said is not None and said.layout == at.layout else at.names
            fixed[i] = Fixed(
                at.layout, names, (False,) * len(at.layout.dims), said.source if said else f"argument {name}"
            )
    if wrong:
        raise ShardingError(
            f"{traced.name}: {len(wrong)} arguments are not where in_specs say",
            wrong,
            rule="jit does not move its arguments",
            remedy="x.redistribute(spec) before the call, or leave the spec out (None) to take the argument as it is",
        )
    return fixed


def _tensor_leaves(
    traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], static: Collection[int | str]
) -> list[Any]:
    leaves = flatten_call(args, kwargs, static).leaves
    return [leaves[i] for i in traced.input_leaves]


def _input_specs(
    traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], in_specs: Any, static: Collection[int | str]
) -> list[SpecLike]:
    if in_specs is None:
        return [None] * len(traced.input_names)
    call = flatten_call(args, kwargs, static)
    positional, named = pytree.tree_unflatten(list(call.leaves), call.tree)
    if isinstance(in_specs, dict) and not args:
        tree: Any = ((), {k: in_specs.get(k) for k in named})
    else:
        specs = in_specs if isinstance(in_specs, tuple | list) and not isinstance(in_specs, P) else (in_specs,)
        if len(specs) > len(positional):
            raise ShardingError(
                f"{traced.name}: in_specs has {len(specs)} entries, the call {len(positional)} positional arguments",
                rule="in_specs is a tuple with one entry (or None) per positional argument",
            )
        tree = ((*specs, *(None,) * (len(positional) - len(specs))), dict.fromkeys(named))
    flat = broadcast_prefix(tree, (positional, named), f"{traced.name}: in_specs")
    return [flat[i] for i in traced.input_leaves]


def _fixed_outputs(traced: Traced, graph: Graph, out_specs: Any, mesh: Mesh) -> dict[int, Fixed]:
    if out_specs is None:
        return {}
    dummy = pytree.tree_unflatten(list(range(len(graph.outputs))), traced.out_tree)
    flat = broadcast_prefix(out_specs, dummy, f"{traced.name}: out_specs")
    items = [
        (i, (f"result{name}", value.shape, spec, None))
        for i, (value, spec, name) in enumerate(zip(graph.outputs, flat, traced.output_names, strict=True))
        if spec is not None and isinstance(value, Value)
    ]
    resolved = resolve_many([item for _, item in items], mesh, what="jit out_specs") if items else []
    return {
        i: Fixed(r.layout, r.names, r.open, f"out_specs: {item[0]} {r.spec}")
        for (i, item), r in zip(items, resolved, strict=True)
    }


def _constraints(graph: Graph, mesh: Mesh) -> dict[Value, Fixed]:
    fixed = {}
    for op in graph.ops:
        if is_constraint(op) or op.kind == "from_local":
            value = op.results[0]
            assert value is not None
            fixed[value] = _said(op, value, mesh)
    return fixed


def _doors(graph: Graph, mesh: Mesh) -> dict[Op, Fixed]:
    return {op: _said(op, op.operands[0], mesh) for op in graph.ops if op.kind == "to_local"}


def _said(op: Op, value: Value, mesh: Mesh) -> Fixed:
    """What the spec in an op's text says of a value."""
    r = Spec.of(str(op.node.args[1])).resolve(value.shape, mesh, name=op.operands[0].name)
    call = "shard" if is_constraint(op) else "shard_map"
    return Fixed(r.layout, r.names, r.open, f"{call}(..., {str(r.spec)!r}) at {place(op.line)}")


def is_spec(x: Any) -> bool:
    """Whether `x` is a leaf of a pytree of specs."""
    return x is None or isinstance(x, str | P | Spec)


def broadcast_prefix(prefix: Any, tree: Any, what: str) -> list[SpecLike]:
    """One spec per leaf of `tree`; a spec (or None) in `prefix` stands for everything below it.

    Example:
        >>> broadcast_prefix(("a", {"x": "b c"}), (1, {"x": 2, "y": 3}), "in_specs")
        ['a', 'b c', None]
    """
    out: list[SpecLike] = []
    wrong: list[str] = []

    def walk(spec: Any, node: Any, path: str) -> None:
        if is_spec(spec):
            out.extend([spec] * len(pytree.tree_leaves(node)))
            return
        if isinstance(spec, dict) and isinstance(node, dict):
            wrong.extend(
                f"{path} has no {key!r}; it has {', '.join(map(repr, node))}" for key in spec if key not in node
            )
            for key, child in node.items():
                walk(spec.get(key), child, f"{path}[{key!r}]")
        elif isinstance(spec, tuple | list) and isinstance(node, tuple | list) and len(spec) == len(node):
            for i, (s, n) in enumerate(zip(spec, node, strict=True)):
                walk(s, n, f"{path}[{i}]")
        else:
            got = (
                f"{type(node).__name__} of {len(node)}"
                if isinstance(node, tuple | list | dict)
                else type(node).__name__
            )
            said = f"{type(spec).__name__} of {len(spec)}" if isinstance(spec, tuple | list | dict) else repr(spec)
            wrong.append(f"{path}: the specs have a {said}, the values a {got}")

    walk(prefix, tree, "")
    if wrong:
        raise ShardingError(
            f"{what} do not fit the values",
            wrong,
            rule="specs are a prefix of the values' pytree: a spec, or None, at a node stands for all leaves below",
        )
    return out
