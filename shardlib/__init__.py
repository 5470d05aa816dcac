"""Sharding for PyTorch the way JAX does it: write the program for one device, say where a few tensors live, run it.

Contents: meshes and specs; placing and typing tensors; compiling, planning and checking; per-device code by hand; rules
for custom ops; torch.func's transforms, which all compose with `jit`.
"""

from shardlib.budget import comm_budget
from shardlib.errors import ShardingError
from shardlib.jit import jit
from shardlib.mesh import Mesh, current_mesh
from shardlib.plan import Plan
from shardlib.rules import rule
from shardlib.spec import P, Spec
from shardlib.tensor import ShardedTensor, from_dtensor, shard, to_dtensor, typeof
from shardlib.transforms import grad, value_and_grad, vmap

__all__ = [
    # where devices and tensors are
    "Mesh", "current_mesh", "P", "Spec", "ShardedTensor", "shard", "typeof", "to_dtensor", "from_dtensor",
    # compiling and planning
    "jit", "Plan", "comm_budget", "rule",
    # transforms
    "grad", "value_and_grad", "vmap",
    # what goes wrong
    "ShardingError",
]  # fmt: skip
