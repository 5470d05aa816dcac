"""Sharding for PyTorch the way JAX does it: write the program for one device, say where a few tensors live, run it.

Contents: meshes and specs; placing and typing tensors; compiling, planning and checking; modules; per-device code by
hand; rules for custom ops; torch.func's transforms, which all compose with `jit`.
"""

from shardlib import beside as _beside  # noqa: F401  (teaches the rest of torch)
from shardlib.check import check
from shardlib.eager import above as _above  # noqa: F401  (registers itself with torch)
from shardlib.eager import dispatch as _dispatch  # noqa: F401  (and this, with tensors)
from shardlib.eager import functional as _functional  # noqa: F401  (and this)
from shardlib.errors import ShardingError
from shardlib.jit import jit
from shardlib.machine import Machine
from shardlib.manual.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    piece,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    reduce_scatter,
)
from shardlib.measuring import measure as _measure  # noqa: F401  (tells Machine how)
from shardlib.meshes.mesh import Mesh, current_mesh, no_mesh
from shardlib.modules import assigned as _assigned  # noqa: F401  (registers itself with torch)
from shardlib.modules import optimizers as _optimizers  # noqa: F401  (registers itself with torch)
from shardlib.modules import strategies
from shardlib.modules.checkpoints import Checkpoints
from shardlib.modules.materialize import materialize
from shardlib.modules.parallelize import parallelize
from shardlib.modules.precision import Precision
from shardlib.modules.suggest import suggest
from shardlib.placing import shard
from shardlib.plain import global_random
from shardlib.plans.budget import comm_budget, redundancy_budget
from shardlib.plans.plan import Plan
from shardlib.printing import debug_print
from shardlib.prove import Proof, prove
from shardlib.rules import rule
from shardlib.scaling import scaling
from shardlib.scanning import scan
from shardlib.schedule import Schedule
from shardlib.shard_map import shard_map
from shardlib.specs.spec import P, Spec
from shardlib.tensors import persist as _persist  # noqa: F401  (tells torch.load what it may read)
from shardlib.tensors import show as _show  # noqa: F401  (says how tensors print)
from shardlib.tensors.agreed import from_local
from shardlib.tensors.dtensor import from_dtensor, to_dtensor
from shardlib.tensors.tensor import ShardedTensor, typeof
from shardlib.tensors.visualize import visualize
from shardlib.transforms import grad, value_and_grad, vmap

__all__ = [
    # where devices and tensors are
    "Mesh", "current_mesh", "no_mesh", "P", "Spec", "ShardedTensor", "shard", "from_local", "typeof", "visualize",
    "to_dtensor", "from_dtensor",
    # compiling and planning
    "jit", "Plan", "check", "comm_budget", "redundancy_budget", "rule", "prove", "Proof", "debug_print",
    # what a step would take
    "Machine", "Schedule", "scaling",
    # modules of torch
    "parallelize", "materialize", "strategies", "Precision", "suggest", "Checkpoints",
    # per-device code by hand
    "shard_map", "psum", "pmean", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute",
    "axis_index", "axis_size", "piece",
    # transforms
    "grad", "value_and_grad", "vmap", "scan",
    # random numbers
    "global_random",
    # what goes wrong
    "ShardingError",
]  # fmt: skip
