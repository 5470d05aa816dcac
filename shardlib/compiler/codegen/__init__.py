"""Turns a program into a function: on virtual devices in this process, or on this rank of torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlib.compiler.codegen import distributed, virtual
from shardlib.compiler.codegen.profiler_ranges import Runner
from shardlib.compiler.program.steps import Program
from shardlib.sharding.mesh.mesh import Mesh

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan


def load(program: Program, mesh: Mesh, plan: Plan, own: Program) -> Runner:
    """Returns a function from local inputs (per input, a tensor for each device of this process) to local outputs.

    `own` is what this process runs of the program: on a rank of a pipeline, the program of its stage.
    """
    if mesh.kind == "virtual":
        return virtual.load(program, mesh)
    return distributed.load(program, mesh, plan, stage=None if own is program else own)
