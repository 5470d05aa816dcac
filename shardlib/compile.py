"""The pipeline, as a flat list of stages: trace -> normalise -> propagate -> lower."""

from __future__ import annotations

import dataclasses
import inspect
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
from shardlib.meshes.mesh import Mesh
from shardlib.normalise import normalise
from shardlib.plans.places import place
from shardlib.propagate import Propagated, propagate
from shardlib.propagate.flood import Fixed
from shardlib.propagate.units import is_constraint
from shardlib.specs.spec import P, Spec, resolve_many
from shardlib.state import paused_gc, tracing
from shardlib.tracing.trace import Static, Traced, flatten_call, is_tensor, trace

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
    fixed_inputs = _fixed_inputs(fn, traced, graph, args, kwargs, in_specs, static, mesh, placed)
    fixed = {graph.inputs[i]: f for i, f in fixed_inputs.items()} | _constraints(graph, mesh)
    _refuse_contradictions(traced, graph, fixed)
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
    fn: Callable[..., Any],
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
    specs = _input_specs(fn, traced, args, kwargs, in_specs, static)
    items = [
        (i, (name, value.shape, spec, None))
        for i, (name, value, spec) in enumerate(zip(traced.input_names, graph.inputs, specs, strict=True))
        if spec is not None
    ]
    resolved = resolve_many([item for _, item in items], mesh, what="jit in_specs") if items else []
    fixed = {
        i: Fixed(r.layout, r.names, r.open, f"in_specs: {item[0]} {r.spec}", r.exact)
        for (i, item), r in zip(items, resolved, strict=True)
    }
    wrong = []
    for i, (leaf, name) in enumerate(
        zip(_tensor_leaves(traced, args, kwargs, static), traced.input_names, strict=True)
    ):
        if (at := placed(leaf)) is not None:
            said = fixed.get(i)
            if said is not None and not any(said.open) and not said.agrees(at):
                wrong.append(
                    f"{name} of shape {list(at.layout.shape)} is laid out [{at.layout}], in_specs say [{said.layout}]"
                )
            names = said.names if said is not None and said.layout.chunked == at.layout.chunked else at.names
            fixed[i] = Fixed(
                at.layout, names, (False,) * len(at.layout.dims), said.source if said else f"argument {name}"
            )
    if wrong:
        verb = "is" if len(wrong) == 1 else "are"
        raise ShardingError(
            f"{traced.name}: {len(wrong)} of {len(items)} arguments with a spec {verb} elsewhere",
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
    fn: Callable[..., Any],
    traced: Traced,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    in_specs: Any,
    static: Collection[int | str],
) -> list[SpecLike]:
    if in_specs is None:
        return [None] * len(traced.input_names)
    call = flatten_call(args, kwargs, static)
    positional, named = pytree.tree_unflatten(list(call.leaves), call.tree)
    tree = _by_argument(fn, traced.name, in_specs, len(positional), named)
    flat = broadcast_prefix(tree, (positional, named), f"{traced.name}: in_specs", _describe)
    return [flat[i] for i in traced.input_leaves]


def _by_argument(
    fn: Callable[..., Any], name: str, in_specs: Any, positional: int, named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The specs of `(args, kwargs)`: `in_specs` is a tuple with an entry per positional argument, or a dict by name."""
    plain, everything = _parameters(fn)
    if isinstance(in_specs, dict):
        known = [*everything, *(k for k in named if k not in everything)]
        if unknown := [key for key in in_specs if key not in known]:
            raise ShardingError(
                f"{name}: in_specs do not fit the arguments",
                [f"{key!r} is no parameter; they are {', '.join(known) or 'none'}" for key in unknown],
                rule="in_specs is a tuple with an entry per positional argument, or a dict by parameter name",
                remedy="in_specs=({...},) for a first argument that is a dict itself",
            )
        first = tuple(in_specs.get(plain[i]) if i < len(plain) else None for i in range(positional))
        return first, {k: in_specs.get(k) for k in named}
    specs = tuple(in_specs) if isinstance(in_specs, tuple | list) else (in_specs,) * (positional + len(named))
    if len(specs) > positional + len(named):
        total = positional + len(named)
        raise ShardingError(
            f"{name}: in_specs has {len(specs)} entries, the call has {total} argument{'s' * (total != 1)}",
            [f"{i}: {spec!r}" for i, spec in enumerate(specs[total:], total)],
            rule="in_specs is a tuple with an entry (or None) per positional argument, or a dict by parameter name",
            remedy="a spec is one string, 'batch seq', not a tuple of names; in_specs=('batch seq',) for one argument",
        )
    rest = dict(zip(plain[positional:], specs[positional:], strict=False))  # given by name this time
    return (*specs[:positional], *(None,) * (positional - len(specs))), {k: rest.get(k) for k in named}


def _parameters(fn: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Names of the parameters that may be given by position, and of all."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):  # a builtin
        return [], []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind not in variadic]
    return [p.name for p in named if p.kind is not inspect.Parameter.KEYWORD_ONLY], [p.name for p in named]


def _describe(leaf: Any) -> str | None:
    """What a leaf is, if it can have no spec."""
    if is_tensor(leaf) or leaf is None:
        return None
    if isinstance(leaf, Static):
        return "a static argument"
    return f"{leaf!r}, which is no tensor" if isinstance(leaf, int | float | str) else f"a {type(leaf).__name__}"


def _fixed_outputs(traced: Traced, graph: Graph, out_specs: Any, mesh: Mesh) -> dict[int, Fixed]:
    if out_specs is None:
        return {}
    dummy = pytree.tree_unflatten(list(range(len(graph.outputs))), traced.out_tree)

    def describe(i: int) -> str | None:
        constant = graph.outputs[i]
        return None if isinstance(constant, Value) else _describe(constant)

    flat = broadcast_prefix(out_specs, dummy, f"{traced.name}: out_specs", describe)
    items = [
        (i, (f"result{name}", value.shape, spec, None))
        for i, (value, spec, name) in enumerate(zip(graph.outputs, flat, traced.output_names, strict=True))
        if spec is not None and isinstance(value, Value)
    ]
    resolved = resolve_many([item for _, item in items], mesh, what="jit out_specs") if items else []
    return {
        i: Fixed(r.layout, r.names, r.open, f"out_specs: {item[0]} {r.spec}", r.exact)
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
    call, exact = ("shard", r.exact) if is_constraint(op) else ("shard_map", None)
    return Fixed(r.layout, r.names, r.open, f"{call}(..., {str(r.spec)!r}) at {place(op.line)}", exact)


def _refuse_contradictions(traced: Traced, graph: Graph, fixed: Mapping[Value, Fixed]) -> None:
    """Two annotations of one value, with no op between them, must agree; a reshard is asked for of an op's result."""
    names = dict(zip(graph.inputs, traced.input_names, strict=True))
    wrong = []
    for op in graph.ops:
        if not is_constraint(op) or op.backward:
            continue
        value, result = op.operands[0], op.results[0]
        annotated = value.op is not None and is_constraint(value.op)
        annotated |= value.op is None and value in fixed and fixed[value].source.startswith("in_specs")
        assert result is not None
        if annotated and not any((*fixed[value].open, *fixed[result].open)):
            first, second = fixed[value], fixed[result]
            if not first.agrees(second):
                name = names.get(value, "a value")
                wrong.append(
                    f"{name} of shape {list(value.shape)}: [{first.layout}] by {first.source}, "
                    f"[{second.layout}] by {second.source}"
                )
    if wrong:
        raise ShardingError(
            f"{traced.name} has contradictory annotations",
            wrong,
            rule="two annotations of one value agree: it lives in one place",
            remedy="drop one of the two; to move a value on purpose, shard the result of the op that reads it",
        )


def is_spec(x: Any) -> bool:
    """Whether `x` is a leaf of a pytree of specs."""
    return x is None or isinstance(x, str | P | Spec)


def broadcast_prefix(
    prefix: Any, tree: Any, what: str, describe: Callable[[Any], str | None] = lambda leaf: None
) -> list[SpecLike]:
    """One spec per leaf of `tree`; a spec (or None) in `prefix` stands for everything below it.

    `describe` says what a leaf is that can have no spec of its own, and None of any other.

    Example:
        >>> broadcast_prefix(("a", {"x": "b c"}), (1, {"x": 2, "y": 3}), "in_specs")
        ['a', 'b c', None]
    """
    out: list[SpecLike] = []
    wrong: list[str] = []

    def walk(spec: Any, node: Any, path: str) -> None:
        if is_spec(spec):
            leaves = pytree.tree_leaves(node)
            if spec is not None and len(leaves) == 1 and leaves[0] is node and (said := describe(node)):
                wrong.append(f"{path}: spec {str(spec)!r} for {said}")
            out.extend([spec] * len(leaves))
            return
        specs, values = _children(spec), _children(node)
        if specs is not None and values is not None and dataclasses.is_dataclass(node) and type(spec) is type(node):
            specs = [getattr(spec, name) for name in _fields(node)]  # flattening leaves out what is None
        if specs is None or values is None or (isinstance(spec, dict) != isinstance(node, dict)):
            wrong.append(f"{path}: the specs have {_kind(spec)}, the values {_kind(node)}")
        elif isinstance(spec, dict):
            wrong.extend(
                f"{path} has no {key!r}; it has {', '.join(map(repr, node))}" for key in spec if key not in node
            )
            for key, child in node.items():
                walk(spec.get(key), child, f"{path}[{key!r}]")
        elif len(specs) != len(values):
            wrong.append(f"{path}: the specs have {_kind(spec)}, the values {_kind(node)}")
        else:
            for i, (s, n) in enumerate(zip(specs, values, strict=True)):
                walk(s, n, f"{path}[{i}]")

    walk(prefix, tree, "")
    if wrong:
        raise ShardingError(
            f"{what} do not fit the values",
            wrong,
            rule="specs are a prefix of the values' pytree: a spec, or None, at a node stands for all leaves below",
            remedy="write the spec of one tensor as a string ('batch seq') or a P, None where it is to be inferred",
        )
    return out


def _children(x: Any) -> list[Any] | None:
    """What a container holds, in order; None for a leaf."""
    node = pytree._get_node_type(x)
    return list(pytree.SUPPORTED_NODES[node].flatten_fn(x)[0]) if node in pytree.SUPPORTED_NODES else None


def _fields(x: Any) -> list[str]:
    """The fields of a registered dataclass that are children, in order."""
    flatten: Any = pytree.SUPPORTED_NODES[type(x)].flatten_with_keys_fn
    return [str(key.name) for key, _ in flatten(x)[0]]


def _kind(x: Any) -> str:
    children = _children(x)
    if children is None and not is_tensor(x):
        return repr(x) if isinstance(x, int | float | str) else f"a {type(x).__name__}"
    return f"a {type(x).__name__}" if children is None else f"a {type(x).__name__} of {len(children)}"
