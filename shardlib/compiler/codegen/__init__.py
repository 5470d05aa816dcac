"""Program -> something to call: on virtual devices in this process, or on this rank of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardlib.compiler.codegen import distributed, virtual
from shardlib.compiler.program.steps import Program
from shardlib.sharding.mesh.mesh import Mesh

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

Runner = Callable[..., tuple[Any, ...]]  # of the inputs' pieces, and of the leaves of the call, for its numbers


def load(program: Program, mesh: Mesh, plan: Plan) -> Runner:
    """A function from local inputs (per input, one tensor for each device of this process) to local outputs."""
    if mesh.kind == "virtual":
        return virtual.load(program, mesh)
    return distributed.load(program, mesh, plan)
