"""Sharding for PyTorch the way JAX does it: write the program for one device, say where a few tensors live, run it.

Start here: put a mesh around a function, give specs to a few arguments, read the plan, call the function.

Example:
    >>> import torch, shardlib as sl
    >>> def mlp(x, up, down):
    ...     return torch.relu(x @ up) @ down
    >>> args = torch.randn(16, 64), torch.randn(64, 256), torch.randn(256, 64)
    >>> with sl.Mesh(data=2, tensor=4):  # 8 virtual devices in this process, or the ranks of torchrun
    ...     step = sl.jit(mlp, in_specs=("batch@data embed", "embed ff@tensor", "ff@tensor embed"))
    ...     plan = step.plan(*args)  # print(plan) shows what each device sends; nothing has run yet
    ...     out = step(*args)
    >>> plan
    <plan of mlp on data=2, tensor=4 (8 devices, virtual): 1 collective, 3.07 kB sent per device, peak memory 38.9 kB>
    >>> torch.allclose(out.full_tensor(), mlp(*args), atol=1e-3)
    True

Next: `sl.parallelize(model)` puts a torch.nn.Module on a mesh and keeps its training loop, `sl.check(step, *args)`
compares a function with one device, and help(sl.jit), help(sl.shard), help(sl.Mesh) explain these names.

Contents: meshes and specs; placing and typing tensors; compiling, planning and checking; modules; per-device code by
hand; rules for custom ops; torch.func's transforms, which all compose with `jit`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from shardlib import integrations as _integrations  # noqa: F401  (teaches the rest of torch)
from shardlib.compiler.plan.budget import comm_budget, redundancy_budget
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.schedule_options import Schedule
from shardlib.compiler.stages.best_schedule import best_schedule
from shardlib.compiler.stages.partition import partition
from shardlib.core import errors as _errors
from shardlib.core.errors import ShardingError
from shardlib.core.func_transforms import grad, value_and_grad, vmap
from shardlib.eager import composite_hooks as _composite_hooks  # noqa: F401  (registers itself with torch)
from shardlib.eager import dispatch as _dispatch  # noqa: F401  (and this, with tensors)
from shardlib.eager import local_autograd as _local_autograd  # noqa: F401  (and this, with tensors)
from shardlib.jit.global_random import global_random
from shardlib.jit.jit import jit
from shardlib.jit.microbatch import microbatch
from shardlib.jit.scan import scan
from shardlib.jit.shard import shard
from shardlib.jit.shard_map import shard_map
from shardlib.jit.stage import stage
from shardlib.nn import load_assign as _load_assign  # noqa: F401  (registers itself with torch)
from shardlib.nn import optimizer_hooks as _optimizer_hooks  # noqa: F401  (registers itself with torch)
from shardlib.nn import strategies
from shardlib.nn.checkpoints import Checkpoints
from shardlib.nn.materialize import materialize
from shardlib.nn.mixed_precision import Precision
from shardlib.nn.parallelize import parallelize
from shardlib.nn.suggest import suggest
from shardlib.primitives.collectives import (
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
from shardlib.primitives.debug_print import debug_print
from shardlib.rules import rule
from shardlib.sharding.mesh.machine import Machine
from shardlib.sharding.mesh.mesh import Mesh, current_mesh, no_mesh
from shardlib.sharding.spec import P, Spec
from shardlib.tensor import serialize as _serialize  # noqa: F401  (tells torch.load what it may read)
from shardlib.tensor import tensor_repr as _tensor_repr  # noqa: F401  (says how tensors print)
from shardlib.tensor.dtensor import from_dtensor, to_dtensor
from shardlib.tensor.rank_checks import from_local
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof
from shardlib.tensor.visualize import visualize
from shardlib.testing.check import check
from shardlib.testing.compare_meshes import compare_meshes
from shardlib.testing.measure_machine import measure as _measure  # noqa: F401  (tells Machine how)
from shardlib.testing.prove_rule import Proof, prove
from shardlib.testing.scaling import scaling

__all__ = [
    # where devices and tensors are
    "Mesh", "current_mesh", "no_mesh", "P", "Spec", "ShardedTensor", "shard", "from_local", "typeof", "visualize",
    "to_dtensor", "from_dtensor",
    # compiling and planning
    "jit", "Plan", "check", "comm_budget", "redundancy_budget", "rule", "prove", "Proof", "debug_print",
    # what a step would take
    "Machine", "Schedule", "scaling", "compare_meshes",
    # modules of torch
    "parallelize", "materialize", "strategies", "Precision", "suggest", "Checkpoints",
    # per-device code by hand
    "shard_map", "psum", "pmean", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute",
    "axis_index", "axis_size", "piece",
    # transforms
    "grad", "value_and_grad", "vmap", "scan",
    # pipelines
    "stage", "microbatch", "partition", "best_schedule",
    # random numbers
    "global_random",
    # what goes wrong
    "ShardingError",
]  # fmt: skip


def __dir__() -> list[str]:
    """Returns the public names; the packages behind them stay importable."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


if not _TYPE_CHECKING:

    def __getattr__(name: str) -> type[Exception]:
        """Returns a class of errors or warnings that is shown as `shardlib.NAME` and is not among the public names."""
        if name not in _errors.PUBLIC:
            raise AttributeError(f"module 'shardlib' has no attribute {name!r}")
        return _errors.PUBLIC[name]
