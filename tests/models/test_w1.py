"""W1 in its five modes: the same numbers as on one device, and no more bytes on the wire than were promised."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import Mesh, Plan
from tests.helpers.ranks import only, run_ranks
from tests.models import w1, w1_sharded

pytestmark = [pytest.mark.usefixtures("strict"), pytest.mark.together]

MODES = ["dp8", "tp", "tp_sp", "fsdp8", "fsdp_tp"]
SMALL = w1.Config(layers=2, d=64, heads=8, kv_heads=4, ff=96, vocab=128, batch=8, seq=16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@functools.cache
def _plan(name: str, layers: int) -> Plan:
    config = w1.Config(layers=layers)
    mode = w1.modes(config)[name]
    with w1_sharded.mesh_of(mode, abstract=True):
        plan: Plan = w1_sharded.sharded_step(mode, config).plan(*w1.abstract(config))
    return plan


def _errors(name: str, config: w1.Config, devices: int, steps: int = 2) -> list[float]:
    """Relative errors of the losses and of every updated parameter after `steps` steps."""
    mode = w1.modes(config, devices)[name]
    params, batch = w1.init(config), w1.batch(config)
    with w1_sharded.mesh_of(mode):
        step = w1_sharded.sharded_step(mode, config)
        sharded, *inputs = w1_sharded.place(mode, params, *batch)
        errors = []
        for _ in range(steps):
            value, sharded = step(sharded, *inputs)
            expected, params = w1.step(params, *batch, config)
            errors.append(_error(value, expected))
        assert not step.retraces, "results go in again as they came out"
        errors += [_error(a, b) for a, b in zip(pytree.tree_leaves(sharded), pytree.tree_leaves(params), strict=True)]
    return errors


def _error(sharded: Any, expected: torch.Tensor) -> float:
    assert isinstance(sharded, sl.ShardedTensor)
    return float((sharded.full_tensor() - expected).abs().max() / expected.abs().max())


@pytest.mark.long
@pytest.mark.sampled(11)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["f64", "f32"])
@pytest.mark.parametrize("name", MODES)
def test_virtual_devices_compute_what_one_computes(name: str, dtype: torch.dtype) -> None:
    assert max(_errors(name, SMALL.with_(dtype=dtype), 8)) <= TOLERANCE[dtype]


def _on_ranks(name: str) -> list[float]:
    return _errors(name, SMALL.with_(layers=1, dtype=torch.float64), 4)


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.ranks
@pytest.mark.parametrize("name", MODES[::-1])
def test_ranks_compute_what_one_device_computes(name: str) -> None:
    assert max(only(run_ranks(_on_ranks, 4, name))) <= 1e-12


# --- what is promised -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "megabytes"), [("dp8", 24.9), ("tp", 11.6), ("tp_sp", 11.8), ("fsdp8", 29.1), ("fsdp_tp", 12.3)]
)
def test_wire_bytes(name: str, megabytes: float) -> None:
    assert _plan(name, 2).comm_bytes <= megabytes * 1e6


@pytest.mark.parametrize("layers", [2, 4])
def test_megatron_reduces_no_activation_twice(layers: int) -> None:
    """4L + 2: twice a layer forward and twice backward, the embedding, and the head's gradient."""
    large = [c for c in _plan("tp", layers).collectives if c.axes == ("tensor",) and c.bytes > 1e5]
    reduced = [c for c in large if c.kind == "all_reduce"]
    assert len(reduced) <= 4 * layers + 2
    assert sum(c.bytes for c in large) <= (4 * layers + 2) * 2 * 3 / 4 * 4 * 128 * 256 * 4


def test_gradients_are_reduced_once_and_at_the_end() -> None:
    plan = _plan("dp8", 2)
    weights = len(pytree.tree_leaves(w1.abstract(w1.Config(layers=2))[0]))
    reduced = [c for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter") and c.bytes > 100]
    assert len(reduced) == weights - 1, "of the embedding, rows and tokens are gathered: that is less"
    assert {c.kind for c in plan.collectives if "rows and indices" in c.reason} == {"all_gather"}
    assert all("sum over" in c.reason for c in reduced)


def test_fsdp_scatters_gradients() -> None:
    kinds = {c.kind for c in _plan("fsdp8", 2).collectives if c.bytes > 1e4}
    assert {"all_gather", "reduce_scatter"} <= kinds
    assert "all_reduce" not in kinds


@pytest.mark.long
def test_fsdp_sends_no_more_than_fsdp() -> None:
    """Which gathers weights forward and backward, and scatters gradients; activations are larger than weights here."""
    config = w1.Config(layers=2, batch=64, seq=512)
    mode, args = w1.modes(config)["fsdp8"], w1.abstract(config)
    with w1_sharded.mesh_of(mode, abstract=True):
        plan = w1_sharded.sharded_step(mode, config).plan(*args)
    weights = sum(x.numel() * x.element_size() for x in pytree.tree_leaves(args[0]))
    assert plan.comm_bytes <= 3 * 7 / 8 * weights


@pytest.mark.long
def test_plan_on_four_axes() -> None:
    config = SMALL.with_(layers=1)
    mode = w1.modes(config)["tp"]
    rules = {"batch": ("pod", "data"), "heads": "tensor", "kv": "tensor", "ff": "tensor", "vocab": ("tensor", "expert")}
    with Mesh.abstract(pod=2, data=2, tensor=2, expert=2, rules=rules):
        plan = w1_sharded.sharded_step(mode, config).plan(*w1.abstract(config))
    assert str(plan.layout_of("tokens")) == "8@(pod data), 16"
    assert str(plan.layout_of("params.embedding")) == "128@(tensor expert), 64"
    with Mesh(pod=2, data=2, tensor=2, expert=2, rules=rules):
        value, _ = w1_sharded.sharded_step(mode, config)(w1.init(config), *w1.batch(config))
    assert abs(float(value) - float(w1.step(w1.init(config), *w1.batch(config), config)[0])) < 1e-4
