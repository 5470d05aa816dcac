"""The inputs whose layouts the user wrote."""

from __future__ import annotations

from shardlib.compiler.annotations import fixed_body_inputs, fixed_constraints
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan.module_tensors import input_positions


def annotated_inputs(compiled: Compiled) -> set[int]:
    """Returns the positions of inputs with a spec: of in_specs, of a `shard` of the input, or of a shard_map argument.

    An input that lives elsewhere, and is resharded for its `shard` or shard_map, has no spec by it.
    """
    pinned, bodies = (find(compiled.graph, compiled.mesh) for find in (fixed_constraints, fixed_body_inputs))
    positions, annotated = input_positions(compiled), {*compiled.fixed_inputs}
    for op in compiled.graph.ops:
        fixed = bodies.get(op) or (pinned[op.results[0]] if op.constrains and op.results[0] is not None else None)
        at = positions.get(op.operands[0]) if fixed is not None else None
        layout = None if at is None else compiled.program.inputs[at].layout
        if fixed is not None and at is not None and layout == fixed.layout.canonical:
            annotated.add(at)
    return annotated
