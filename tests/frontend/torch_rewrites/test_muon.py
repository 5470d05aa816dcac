"""Muon on matrices that are cut: the same steps as on one device, and each matrix sent to one device and back."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh
from tests.helpers.ranks import run_ranks

SHAPES = [(16, 8), (8, 16), (8, 8), (16, 8), (8, 8), (8, 16), (8, 8)]  # [out, in]; four are alike on their side
BOTH = {"*.weight": "o@data i@tensor"}


class Net(nn.Module):
    def __init__(self, shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for o, i in shapes)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            total = total + torch.tanh(layer(x[:, : layer.in_features])).square().mean()
        return total


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def _trained(run: Any, model: nn.Module, **settings: Any) -> list[Tensor]:
    """Weights and momenta after three steps."""
    opt = torch.optim.Muon(model.parameters(), **{"lr": 0.02} | settings)
    for i in range(3):
        run(model, opt, torch.randn(8, 16, generator=torch.Generator().manual_seed(i)))
    found = [*model.parameters(), *(opt.state[p]["momentum_buffer"] for p in model.parameters())]
    return [x.full_tensor() if isinstance(x, sl.ShardedTensor) else x.detach() for x in found]


def _refuse_other(found: list[Tensor], plain: list[Tensor]) -> None:
    """An iteration in bfloat16 rounds to 2^-8 of an update."""
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


SPECS: dict[str, Any] = {
    "over two axes": BOTH,
    "one dim over both": {"*.weight": "o@(data tensor) i"},
    "each otherwise": {
        "layers.0.weight": "o i@tensor",
        "layers.1.weight": "o@tensor i@data",
        "layers.2.weight": "o@data i",
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without Nesterov": {"nesterov": False, "weight_decay": 0.0},
    "rates like AdamW's": {"adjust_lr_fn": "match_rms_adamw"},
    "other numbers": {"momentum": 0.5, "ns_steps": 3, "ns_coefficients": (3.0, -4.0, 2.0), "eps": 1e-3},
}


@pytest.mark.long
@pytest.mark.sampled(12, first=6)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_as_on_one_device(model: Net, specs: Any, settings: dict[str, Any]) -> None:
    plain = _trained(step, copy.deepcopy(model), **settings)
    with Mesh(data=2, tensor=2):
        sl.parallelize(model, specs)
        _refuse_other(_trained(sl.jit(step), model, **settings), plain)


@pytest.mark.long
def test_fully_sharded(model: Net) -> None:
    plain = _trained(step, copy.deepcopy(model))
    with Mesh(data=4):
        sl.parallelize(model, strategy=sl.strategies.fsdp("data", threshold=0))
        _refuse_other(_trained(sl.jit(step), model), plain)


# A plan over two axes takes long to find.
AXES: list[Any] = [({"data": 2}, {"*.weight": "o@data i"})]
AXES += [pytest.param({"data": 2, "tensor": 2}, BOTH, marks=pytest.mark.slow)]


def _on_a_rank(axes: dict[str, int], specs: Any) -> None:
    torch.manual_seed(0)
    model = Net(SHAPES[:3])
    plain = _trained(step, copy.deepcopy(model), ns_steps=2)
    with Mesh(axes):
        sl.parallelize(model, specs)
        _refuse_other(_trained(sl.jit(step), model, ns_steps=2), plain)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(("axes", "specs"), AXES)
def test_on_ranks(axes: dict[str, int], specs: Any) -> None:
    run_ranks(_on_a_rank, math.prod(axes.values()), axes, specs)


@pytest.mark.long
@pytest.mark.sampled(4, first=3)
@pytest.mark.parametrize("count", [1, 5, 8, 11])
def test_each_matrix_goes_to_one_device_and_back(count: int) -> None:
    """In no more bytes than if one device after the other was the owner of the next matrix."""
    devices, size = 8, 64
    with Mesh.abstract(data=4, tensor=2), torch.device("meta"):
        model = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(count))
        sl.parallelize(model, BOTH)
        opt = torch.optim.Muon(model.parameters())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        plan = sl.jit(lambda model, opt: opt.step()).plan(model, opt)
    each, rounds = 2 * size * size, -(-count // devices)
    assert [c.kind for c in plan.collectives] == ["all_to_all", "all_to_all"]
    assert plan.comm_bytes == 2 * rounds * each * (devices - 1) / devices
    assert "data tensor from o i to matrix" in plan.full


def test_what_nobody_cuts_is_not_sent(model: Net) -> None:
    with Mesh(data=4):
        sl.parallelize(model, strategy=sl.strategies.ddp("data"))
        opt = torch.optim.Muon(model.parameters())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        assert not sl.jit(lambda model, opt: opt.step()).plan(model, opt).collectives


@pytest.mark.long
@pytest.mark.parametrize(("axes", "specs"), AXES)
def test_a_step_that_overflows_changes_nothing(axes: dict[str, int], specs: Any) -> None:
    model = Net(SHAPES[:3])

    def scaled(model: nn.Module, opt: torch.optim.Optimizer, scaler: Any, x: Tensor) -> None:
        scaler.scale(model(x)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    with Mesh(axes):
        sl.parallelize(model, specs)
        opt, scaler = torch.optim.Muon(model.parameters(), ns_steps=1), torch.amp.GradScaler("cpu", init_scale=8.0)
        run = sl.jit(scaled)
        run(model, opt, scaler, torch.ones(8, 16))
        before = [p.full_tensor() for p in model.parameters()]
        run(model, opt, scaler, torch.full((8, 16), torch.inf))
        assert scaler.get_scale() == 4.0
        assert all(torch.equal(p.full_tensor(), was) for p, was in zip(model.parameters(), before, strict=True))
        run(model, opt, scaler, torch.ones(8, 16))
        assert not any(torch.equal(p.full_tensor(), was) for p, was in zip(model.parameters(), before, strict=True))
