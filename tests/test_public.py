"""The public surface, name by name: users' scripts call these."""

from __future__ import annotations

import types

import shardlib as sl

PUBLIC = [
    "Mesh", "current_mesh", "no_mesh", "P", "Spec", "ShardedTensor", "shard", "from_local", "typeof", "visualize",
    "to_dtensor", "from_dtensor",
    "jit", "Plan", "check", "comm_budget", "redundancy_budget", "rule", "prove", "Proof", "debug_print",
    "Machine", "Schedule", "scaling",
    "parallelize", "materialize", "strategies", "Precision", "suggest", "Checkpoints",
    "shard_map", "psum", "pmean", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute",
    "axis_index", "axis_size", "piece",
    "grad", "value_and_grad", "vmap", "scan",
    "global_random",
    "ShardingError",
]  # fmt: skip


def test_contents() -> None:
    assert sl.__all__ == PUBLIC


def test_every_name_is_there_and_explained() -> None:
    for name in PUBLIC:
        value = getattr(sl, name)
        assert value.__doc__, f"{name} has no docstring"


def test_nothing_else_looks_public() -> None:
    loose = [n for n, v in vars(sl).items() if not n.startswith("_") and not isinstance(v, types.ModuleType)]
    assert sorted([*loose, "strategies"]) == sorted(PUBLIC)


def test_members_that_scripts_use() -> None:
    for name in [
        "collectives",
        "comm_bytes",
        "peak_memory",
        "flops",
        "redundant",
        "diff",
        "lower_bound",
        "layout_of",
        "explain",
        "summary",
        "to_dict",
    ]:
        assert hasattr(sl.Plan, name), name
    for name in ["spec", "mesh", "full_tensor", "to_local", "redistribute", "shards"]:
        assert hasattr(sl.ShardedTensor, name), name
    for name in ["abstract", "from_device_mesh", "device_mesh"]:
        assert hasattr(sl.Mesh, name), name
