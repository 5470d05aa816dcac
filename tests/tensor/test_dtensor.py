"""DTensors given to shardlib: refused, all of them by name, with the way to convert them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardlib as sl
from tests.helpers.ranks import run_ranks


def grid() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))


def placed(*shape: int, placement: Any = None) -> Any:
    return distribute_tensor(torch.ones(*shape), grid(), [placement or Shard(0)])


def linear(*, bias: bool = True) -> nn.Linear:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(placed(4, 4))
    if bias:
        module.bias = nn.Parameter(placed(4))
    return module


def normalization() -> nn.Module:
    module = nn.BatchNorm1d(4)
    module.running_mean = placed(4)
    return module


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss


def stepped(model: nn.Module, *moments: str) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    if moments:
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        for name in moments:
            optimizer.state[model.weight][name] = placed(4, 4)
    return sl.jit(step)(model, optimizer, torch.ones(4, 4))


def closing_over(held: Tensor) -> Any:
    return sl.jit(lambda x: held + x)(torch.ones(4))


# What is called -> the names of all offenders.
DOORS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "parallelize": (lambda: sl.parallelize(linear(), strategy="fsdp"), ("weight", "bias")),
    "parallelize, one": (lambda: sl.parallelize(linear(bias=False), {"weight": "a@data b"}), ("weight",)),
    "parallelize, nested": (lambda: sl.parallelize(nn.Sequential(linear()), strategy="ddp"), ("0.weight", "0.bias")),
    "parallelize, fully_shard": (
        lambda: sl.parallelize(fully_shard(nn.Linear(4, 4), mesh=grid()), strategy="fsdp"), ("weight", "bias"),
    ),
    "parallelize, buffer": (lambda: sl.parallelize(normalization(), strategy="ddp"), ("running_mean",)),
    "argument of a module": (lambda: sl.parallelize(nn.Linear(4, 4), strategy="ddp")(placed(4, 4)), ("input",)),
    "jit": (lambda: sl.jit(lambda x: x.sum())(placed(4, 4)), ("x",)),
    "jit, replicated": (lambda: sl.jit(lambda x: x.sum())(placed(4, 4, placement=Replicate())), ("x",)),
    "jit, in_specs": (lambda: sl.jit(lambda x: x.sum(), in_specs="a@data b")(placed(4, 4)), ("x",)),
    "jit, gradient": (lambda: sl.jit(lambda x: x.sum())(placed(4, 4).requires_grad_()), ("x",)),
    "plan": (lambda: sl.jit(lambda x: x.sum()).plan(placed(4, 4)), ("x",)),
    "jit, containers": (
        lambda: sl.jit(lambda d: d["a"][0].sum() + d["b"])({"a": [placed(4, 4)], "b": placed(4)}),
        ("d['a'][0]", "d['b']"),
    ),
    "jit, closure": (lambda: closing_over(placed(4, 4)), ("held",)),
    "jit of a module": (lambda: sl.jit(linear())(torch.ones(4, 4)), ("self.weight", "self.bias")),
    "jit of a step": (lambda: stepped(linear()), ("model.weight", "model.bias")),
    "moments": (lambda: stepped(nn.Linear(4, 4), "exp_avg"), ("opt",)),
    "shard": (lambda: sl.shard(placed(4, 4), "_@data _"), ("x",)),
    "shard_map": (lambda: sl.shard_map(lambda x: x * 2, "a@data _", "a@data _")(placed(4, 4)), ("x",)),
    "from_local": (lambda: sl.from_local(placed(4, 4), "a@data _"), ("x",)),
    "check": (lambda: sl.check(lambda x: x * 2, placed(4, 4)), ("x",)),
    "suggest": (
        lambda: sl.suggest(linear(), sl.Mesh.abstract(tensor=2), torch.ones(4, 4)), ("module.weight", "module.bias"),
    ),
    "an op": (lambda: sl.shard(torch.ones(4, 4), "a@data _") + placed(4, 4), ("its operand",)),
}  # fmt: skip


def refusals() -> list[str]:
    wrong = []
    with sl.Mesh(data=dist.get_world_size()):
        for door, (call, names) in DOORS.items():
            try:
                call()
            except sl.ShardingError as error:
                text = str(error)
                bullets = [line for line in text.splitlines() if line.startswith("  * ")]
                is_named = all(any(f"  * {name}" in line for line in bullets) for name in names)
                if not is_named or "is a DTensor of shape" not in text or "sl.from_dtensor(x)" not in text:
                    wrong.append(f"{door}: {text}")
            else:
                wrong.append(f"{door}: ran")
    return wrong


def conversions() -> list[float]:
    """The two remedies work."""
    n = dist.get_world_size()
    with sl.Mesh(data=n):
        x = distribute_tensor(torch.arange(16.0).view(4, 4), grid(), [Shard(0)])
        total = sl.jit(lambda x: (x * 2).sum())
        module = nn.Linear(4, 4)
        module.load_state_dict({"weight": placed(4, 4).full_tensor(), "bias": placed(4).full_tensor()})
        out = sl.parallelize(module, strategy="fsdp")(torch.ones(4, 4))
        return [float(total(sl.from_dtensor(x))), float(total(x.full_tensor())), float(out.full_tensor().sum())]


@pytest.mark.ranks
@pytest.mark.parametrize("n", [1, 2])
def test_dtensors_are_refused_by_name(n: int) -> None:
    assert run_ranks(refusals, n) == [[]] * n
    assert run_ranks(conversions, n) == [[240.0, 240.0, 80.0]] * n
