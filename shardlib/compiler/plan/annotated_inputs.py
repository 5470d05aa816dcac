"""The inputs whose layouts the user wrote."""

from __future__ import annotations

from shardlib.compiler.annotations import fixed_body_inputs, fixed_constraints
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan.module_tensors import input_positions


def annotated_inputs(compiled: Compiled) -> set[int]:
    """Returns the positions of inputs with a spec: of in_specs, of a `shard` of the input, or of a shard_map argument.

    An input that lives elsewhere, and is resharded for its `shard` or shard_map, has no spec by it.
    """
    graph, mesh = compiled.graph, compiled.mesh
    specs = [(op.operands[0], fixed) for op, fixed in fixed_body_inputs(graph, mesh).items()]
    specs += [(v.op.operands[0], x) for v, x in fixed_constraints(graph, mesh).items() if v.op and v.op.constrains]
    positions, inputs = input_positions(compiled), compiled.program.inputs
    read = [(positions[value], fixed.layout.canonical) for value, fixed in specs if value in positions]
    return {*compiled.fixed_inputs, *(at for at, layout in read if layout == inputs[at].layout)}
