"""A plan as plain data, ready for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardlib.compiler.program.steps import Var

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Returns dicts, lists, texts and numbers."""
    naming, program = plan.rows.naming, plan.compiled.program
    outputs = zip(plan.compiled.traced.result_names, program.outputs, strict=True)
    return {
        "name": plan.name,
        "mesh": dict(plan.mesh.shape),
        "inputs": {name: naming.typed(var) for name, var in zip(naming.inputs, program.inputs, strict=True)},
        "outputs": {name: naming.typed(v) if isinstance(v, Var) else repr(v) for name, v in outputs},
        "collectives": [asdict(c) | {"axes": list(c.axes)} for c in plan.collectives],
        "comm_bytes": plan.comm_bytes,
        "flops": plan.flops,
        "redundant": [asdict(r) | {"axes": list(r.axes)} for r in plan.redundant],
        "peak_memory": plan.peak_memory,
        "host_memory": plan.host_memory,
        "replicated_ops": list(plan.replicated_ops),
    }
