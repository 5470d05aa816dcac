"""Fixes layouts of outputs: by a spec, by the value that an output replaces, or by the value whose gradient it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardlib.compiler.graph.ir import Graph, Value
from shardlib.compiler.schedule_options import MOMENTS, PARAMETERS, Schedule
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.frontend.guards.argument_specs import describe_non_tensor
from shardlib.frontend.guards.flatten_call import FlatCall
from shardlib.frontend.side_effects.mutation_values import Part, Result
from shardlib.frontend.traced_graph import TracedFunction
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.spec import resolve_many
from shardlib.sharding.tree_prefix import broadcast_prefix
from shardlib.tensor.sharded_tensor import ShardedTensor


def place_outputs(
    traced: TracedFunction,
    graph: Graph,
    call: FlatCall,
    fixed_inputs: Mapping[int, FixedLayout],
    placed: Callable[[Any], FixedLayout | None],
    mesh: Mesh,
) -> dict[int, FixedLayout]:
    """Returns layouts of outputs that the caller's tensors determine.

    A tensor that is written keeps its layout. A gradient has the layout of its value, or of the value's
    `gradient_at`. Plain tensors are whole.
    """
    leaves, after = call.leaves, traced.after
    names = defaultdict(lambda: "an argument", zip(traced.input_leaves, traced.input_names, strict=True))
    by_leaf = {traced.input_leaves[i]: f for i, f in fixed_inputs.items()}
    out = {}
    for leaf, position in (*after.written, *after.data, *after.gradients, *after.grads):
        if position is not None:
            is_placed = placed(leaves[leaf]) is not None and leaf in by_leaf
            fixed = by_leaf[leaf] if is_placed else _whole(graph.outputs[position])
            out[position] = fixed.by(f"the place of {names[leaf]}")
    for leaf, position in (*after.gradients, *after.grads):
        at = getattr(leaves[leaf], "gradient_at", None)
        if position is not None and isinstance(at, str) and placed(leaves[leaf]) is not None:
            item = (f"the gradient of {names[leaf]}", graph.outputs[position].shape, at, None)
            out[position] = resolve_many([item], mesh, call="gradient_at")[0].by(f"the gradient_at of {item[0]}")
    for part in (part for kept in after.rebound for part in kept.parts if isinstance(part, Result)):
        if part.plain is not None:
            out[part.at] = _whole(graph.outputs[part.at])
        elif (home := part.home) is not None:
            out[part.at] = FixedLayout.at(home.layout, home.names, "the place of what was there")
    return out


def state_away(
    name: str, leaves: Sequence[Any], names: Sequence[str], kept: Iterable[Any], how: Schedule
) -> frozenset[int]:
    """Returns the inputs that the schedule moves to the host's memory between calls; `kept` are the call's objects.

    Raises `ShardingError` if there is no such state, and for plain tensors, which stay where their owner put them.
    """
    optimizers = [x for x in kept if isinstance(x, torch.optim.Optimizer)]
    moments = {id(x) for optimizer in optimizers for entries in optimizer.state.values() for x in entries.values()}
    state = {
        MOMENTS: [i for i, x in enumerate(leaves) if id(x) in moments and x.dim()],
        PARAMETERS: [i for i, x in enumerate(leaves) if isinstance(x, torch.nn.Parameter)],
    }
    wrong = [f"{name} is given no optimizer"] if MOMENTS in how.state and not optimizers else []
    wrong += [f"{name} is given no parameters"] if PARAMETERS in how.state and not state[PARAMETERS] else []
    away = [i for word in how.state for i in state[word]]
    plain = [i for i in away if not isinstance(leaves[i], ShardedTensor)]
    wrong += [f"{names[i]} of shape {list(leaves[i].shape)} is a plain tensor" for i in plain]
    if wrong:
        raise ShardingError(
            f"offload={how.offload!r} moves what there is not",
            wrong,
            rule='"moments" are what a torch.optim optimizer keeps of parameters on a mesh, "parameters" these; they '
            "live in the host's memory between the calls of a function that takes them",
            remedy="sl.parallelize(model) first, then sl.jit(step, schedule=...)(model, optimizer, batch)",
        )
    return frozenset(away)


def outputs_of_state(traced: TracedFunction, away: Collection[int]) -> frozenset[int]:
    """Returns the outputs that replace these inputs: as another `data`, or in an object."""
    leaves = {traced.input_leaves[i] for i in away}
    parts = (part for kept in traced.after.rebound for part in kept.parts if isinstance(part, Result))
    replacing = [part.at for part in parts if part.was in leaves and part.plain is None]
    return frozenset(replacing + [at for leaf, at in traced.after.data if leaf in leaves])


def forget_moved(traced: TracedFunction, graph: Graph) -> TracedFunction:
    """Forgets the old places of values in objects, if the function ends by a `shard` of the new value."""
    moved = {op.results[0] for op in graph.ops if op.constrains}
    at = {i for i, x in enumerate(graph.outputs) if isinstance(x, Value) and x in moved}

    def forget(part: Part) -> Part:
        return replace(part, plain=None, home=None) if isinstance(part, Result) and part.at in at else part

    rebound = tuple(replace(kept, parts=tuple(map(forget, kept.parts))) for kept in traced.after.rebound)
    return replace(traced, after=replace(traced.after, rebound=rebound)) if at else traced


def _whole(value: Value) -> FixedLayout:
    return FixedLayout.at(Layout.replicated(value.shape))


def fixed_outputs(traced: TracedFunction, graph: Graph, out_specs: Any, mesh: Mesh) -> dict[int, FixedLayout]:
    if out_specs is None:
        return {}
    own = graph.outputs[: traced.out_tree.num_leaves]
    names = traced.output_names[: len(own)]
    leaves = [torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Value) else x for x in own]
    result = pytree.tree_unflatten(leaves, traced.out_tree)
    flat = broadcast_prefix([out_specs], [result], f"{traced.name}: out_specs", describe_non_tensor, ["the result"])
    items = [
        (i, (name, value.shape, spec, None))
        for i, (value, spec, name) in enumerate(zip(own, flat, names, strict=True))
        if spec is not None and isinstance(value, Value)
    ]
    resolved = resolve_many([item for _, item in items], mesh, call="jit out_specs") if items else []
    return {i: r.by(f"out_specs: {item[0]} {r.spec}") for (i, item), r in zip(items, resolved, strict=True)}


def gradients(traced: TracedFunction, graph: Graph, fixed_inputs: Mapping[int, FixedLayout]) -> dict[int, FixedLayout]:
    """Returns the layouts of returned gradients: those of their inputs."""
    at = {graph.inputs[i]: (traced.input_names[i], fixed) for i, fixed in fixed_inputs.items()}
    fixed_at = {}
    for i, value in enumerate(graph.outputs):
        if isinstance(value, Value) and value.like in at:
            name, fixed = at[value.like]
            fixed_at[i] = fixed.by(f"the place of {name}")
    return fixed_at
