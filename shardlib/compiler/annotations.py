"""Layouts that the user fixes: specs of inputs, arguments that are placed already, and `shard`s inside the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardlib.compiler.graph.ir import Graph, Op, Value, is_body_boundary
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.errors import ShardingError
from shardlib.core.func_transforms import name_of
from shardlib.core.source_lines import format_path_line
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.frontend.guards.argument_specs import describe_non_tensor, refuse_missing_specs, specs_by_argument
from shardlib.frontend.guards.flatten_call import FlatCall, argument_names, find_aliases
from shardlib.frontend.traced_graph import TracedFunction
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.spec import Spec, resolve_many
from shardlib.sharding.tree_prefix import SpecLike, broadcast_prefix
from shardlib.sharding.typos import Use, warn_of_typos
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def leaf_specs(fn: Callable[..., Any], call: FlatCall, in_specs: Any) -> list[SpecLike]:
    """Returns the spec of each leaf of the arguments."""
    if in_specs is None:
        return [None] * len(call.arguments)
    if callable(in_specs):
        computed: list[SpecLike] = list(in_specs(call.arguments))
        if len(computed) != len(call.arguments):
            raise ShardingError(
                f"in_specs, a function, returns {len(computed)} specs for {len(call.arguments)} leaves of the "
                "arguments",
                rule="it gets the list of all leaves, and returns a spec, or None, for each",
                remedy="lambda leaves: [None for _ in leaves]",
            )
        # An argument that is a buffer lives where the buffer does.
        state = find_aliases(call.arguments, call.state.tensors)
        return [None if state.get(i, 0) >= len(computed) else spec for i, spec in enumerate(computed)]
    name = name_of(fn)
    positional, named = pytree.tree_unflatten(list(call.arguments), call.tree)
    tree = specs_by_argument(fn, name, in_specs, len(positional), named)
    names = argument_names(fn, len(positional), named)
    specs, values = ([*a, *k.values()] for a, k in (tree, (positional, named)))
    leaves = broadcast_prefix(specs, values, f"{name}: in_specs", describe_non_tensor, names)
    refuse_missing_specs(fn, name, in_specs, positional, named)
    return leaves


def conflicting_twins(call: FlatCall, specs: Sequence[SpecLike]) -> set[int]:
    """Returns arguments that share a tensor with another leaf but not its spec: each becomes an input of its own."""
    pairs = find_aliases(call.arguments, call.state.tensors).items()
    return {i for i, twin in pairs if specs[i] != (specs[twin] if twin < len(specs) else None)}


def input_tensors(traced: TracedFunction, call: FlatCall) -> list[Any]:
    """Returns the leaf of the call that each input is; None for a cotangent."""
    leaves = call.leaves
    return [leaves[i] if i >= 0 else None for i in traced.input_leaves]


def fixed_inputs(
    traced: TracedFunction,
    call: FlatCall,
    specs: Sequence[SpecLike],
    mesh: Mesh,
    placed: Callable[[Any], FixedLayout | None],
) -> dict[int, FixedLayout]:
    """Returns the layouts of inputs that have a spec or are placed already, by position; notes on each node which dims
    are sharded (`cut`)."""
    nodes = traced.graph.graph.find_nodes(op="placeholder")
    input_specs = [specs[i] if 0 <= i < len(specs) else None for i in traced.input_leaves]
    items = [
        (i, (name, tuple(node.meta["val"].shape), spec, None))
        for i, (name, node, spec) in enumerate(zip(traced.input_names, nodes, input_specs, strict=True))
        if spec is not None
    ]
    resolved = resolve_many([item for _, item in items], mesh, call="jit in_specs") if items else []
    fixed = {i: r.by(f"in_specs: {item[0]} {r.spec}") for (i, item), r in zip(items, resolved, strict=True)}
    tensors = [*zip(input_tensors(traced, call), traced.input_names, strict=True)]
    _refuse_other_meshes(traced.name, tensors, mesh)
    wrong = []
    for i, (leaf, name) in enumerate(tensors):
        if (placement := placed(leaf)) is not None:
            spec, layout = fixed.get(i), placement.layout
            if spec is not None and not any(spec.open) and not spec.agrees_with(placement):
                wrong.append(
                    f"{name} of shape {list(layout.shape)} is laid out [{layout}], in_specs say [{spec.layout}]"
                )
            names = spec.names if spec is not None and spec.layout.chunked == layout.chunked else placement.names
            fixed[i] = FixedLayout.at(layout, names, spec.source if spec else f"argument {name}")
    if wrong:
        verb = "is" if len(wrong) == 1 else "are"
        raise ShardingError(
            f"{traced.name}: {len(wrong)} of {len(items)} arguments with a spec {verb} elsewhere",
            wrong,
            rule="jit does not move its arguments",
            remedy="x.redistribute(spec) before the call, or leave the spec out (None) to take the argument as it is",
        )
    for i, node in enumerate(nodes):
        dims = fixed[i].layout.dims if i in fixed else ()
        node.meta["cut"] = {d for d, dim in enumerate(dims) if any(factor.axes for factor in dim)}
        node.meta["fixed"] = i in fixed
    return fixed


def _refuse_other_meshes(name: str, tensors: Sequence[tuple[Any, str]], mesh: Mesh) -> None:
    others = [
        f"{label}, {typeof(x)}, lives on {x.mesh}"
        for x, label in tensors
        if isinstance(x, ShardedTensor) and x.mesh.whole != mesh.whole
    ]
    if others:
        raise ShardingError(
            f"{name} takes tensors of another mesh than the current one, {mesh}",
            others,
            rule="all tensors of a program live on one mesh",
            remedy="place it again: shard(x.full_tensor(), spec) inside `with` the current mesh; or, for tensors of a "
            "module, make the call inside `with` their mesh",
        )


def fixed_constraints(graph: Graph, mesh: Mesh) -> dict[Value, FixedLayout]:
    """Returns the layouts of results of `shard` and of shard_map bodies."""
    fixed = {}
    for op in graph.ops:
        if op.constrains or has_trait(op.target, "leaves_body"):
            value = op.results[0]
            assert value is not None
            fixed[value] = _annotated(op, value, mesh)
    return fixed


def fixed_body_inputs(graph: Graph, mesh: Mesh) -> dict[Op, FixedLayout]:
    """Returns the layouts in which shard_map bodies take their operands."""
    return {op: _annotated(op, op.operands[0], mesh) for op in graph.ops if has_trait(op.target, "enters_body")}


def _annotated(op: Op, value: Value, mesh: Mesh) -> FixedLayout:
    """Resolves the spec in an op's arguments for one of its values."""
    r = Spec.convert(str(op.node.args[1])).resolve(value.shape, mesh, name=op.operands[0].name)
    call, exact = ("shard", r.exact) if op.constrains else ("shard_map", (True,) * len(r.exact))
    return replace(r, exact=exact, source=f"{call}(..., {str(r.spec)!r}) at {format_path_line(op.line)}")


def warn_of_misspelled_names(
    traced: TracedFunction,
    graph: Graph,
    inputs: Mapping[int, FixedLayout],
    outputs: Mapping[int, FixedLayout],
    mesh: Mesh,
) -> None:
    """Warns of logical names, in any spec of the program, that nearly have a rule."""
    names = traced.input_names
    uses = [(f"in_specs of {names[i]}", f.spec) for i, f in inputs.items() if f.spec is not None]
    names = traced.result_names
    uses += [(f"out_specs of {names[i]}", f.spec) for i, f in outputs.items() if f.spec is not None]
    lines: dict[Any, Use] = {}  # a line in a loop counts once
    for op in graph.ops:
        if (op.constrains or is_body_boundary(op.target)) and not op.backward:
            call, spec = "shard" if op.constrains else "shard_map", Spec.convert(str(op.node.args[1]))
            lines.setdefault((op.line, spec), (f"{call}({op.operands[0].name}) at {format_path_line(op.line)}", spec))
    warn_of_typos([*uses, *lines.values()], mesh)
