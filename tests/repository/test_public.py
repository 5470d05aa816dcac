"""The public surface, name by name: users' scripts call these."""

from __future__ import annotations

import importlib
import pickle
import types
import warnings

import pytest
import torch

import shardlib as sl

PUBLIC = [
    "Mesh", "current_mesh", "no_mesh", "P", "Spec", "ShardedTensor", "shard", "from_local", "typeof", "visualize",
    "to_dtensor", "from_dtensor",
    "jit", "Plan", "check", "comm_budget", "redundancy_budget", "rule", "prove", "Proof", "debug_print",
    "Machine", "Schedule", "scaling", "compare_meshes",
    "parallelize", "materialize", "strategies", "Precision", "suggest", "Checkpoints",
    "shard_map", "psum", "pmean", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute",
    "axis_index", "axis_size", "piece",
    "grad", "value_and_grad", "vmap", "scan",
    "stage", "microbatch", "partition", "best_schedule",
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


def test_dir_shows_the_public_names_alone() -> None:
    assert {name for name in dir(sl) if not name.startswith("__")} == set(PUBLIC)
    assert "__doc__" in dir(sl)


def test_help_says_where_to_start() -> None:
    assert sl.__doc__ is not None
    assert "Start here" in sl.__doc__.split("\n\n")[1]
    assert ">>> with sl.Mesh" in sl.__doc__  # which runs as a doctest


SHOWN = [
    ("core.errors", "ShardingError"), ("core.errors", "ValueNeededError"), ("core.errors", "NoStorageError"),
    ("core.errors", "CollectiveError"), ("jit.call.compile_call", "RetraceWarning"), ("nn.forward", "EagerWarning"),
    ("compiler.passes.memory.recompute", "RematWarning"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "name"), SHOWN)
def test_errors_and_warnings_are_shown_under_a_name_that_stays(file: str, name: str) -> None:
    kind = getattr(importlib.import_module(f"shardlib.{file}"), name)
    assert (kind.__module__, getattr(sl, name)) == ("shardlib", kind)
    again = pickle.loads(pickle.dumps(kind("wrong")))
    assert (type(again), str(again)) == (kind, "wrong")
    if issubclass(kind, Warning):
        for where in ("shardlib", f"shardlib.{file}"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings._setoption(f"ignore::{where}.{name}")  # type: ignore[attr-defined]  # as -W and pytest do
                warnings.warn("ignored", kind, stacklevel=1)


def test_an_error_of_torchs_own_kind_keeps_its_name_and_can_be_pickled() -> None:
    with sl.Mesh(data=2), pytest.raises(RuntimeError) as error:
        sl.jit(torch.mm)(torch.ones(2, 3), torch.ones(2, 3))
    assert isinstance(error.value, sl.ShardingError)
    assert (type(error.value).__module__, type(error.value).__name__) == ("shardlib", "ShardingRuntimeError")
    assert type(pickle.loads(pickle.dumps(error.value))) is type(error.value)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'shardlib' has no attribute 'jti'"):
        sl.jti  # type: ignore[attr-defined]  # noqa: B018


def test_errors_of_users_stay_theirs() -> None:
    class OwnError(sl.ShardingError):
        pass

    assert OwnError.__module__ == __name__


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
