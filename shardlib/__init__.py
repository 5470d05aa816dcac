"""Sharding for PyTorch the way JAX does it: write the program for one device, say where a few tensors live, run it.

Contents: meshes and specs; placing and typing tensors; compiling, planning and checking; per-device code by hand; rules
for custom ops; torch.func's transforms, which all compose with `jit`.
"""

from shardlib.budget import comm_budget
from shardlib.check import check
from shardlib.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    reduce_scatter,
)
from shardlib.errors import ShardingError
from shardlib.jit import jit
from shardlib.mesh import Mesh, current_mesh
from shardlib.plan import Plan
from shardlib.rules import rule
from shardlib.shard_map import shard_map
from shardlib.spec import P, Spec
from shardlib.tensor import ShardedTensor, from_dtensor, shard, to_dtensor, typeof
from shardlib.transforms import grad, value_and_grad, vmap

__all__ = [
    # where devices and tensors are
    "Mesh", "current_mesh", "P", "Spec", "ShardedTensor", "shard", "typeof", "to_dtensor", "from_dtensor",
    # compiling and planning
    "jit", "Plan", "check", "comm_budget", "rule",
    # per-device code by hand
    "shard_map", "psum", "pmean", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute",
    "axis_index", "axis_size",
    # transforms
    "grad", "value_and_grad", "vmap",
    # what goes wrong
    "ShardingError",
]  # fmt: skip
