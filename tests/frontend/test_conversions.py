"""`.double()`, `.half()`, `.to(dtype)` and `copy.deepcopy` inside a traced function: of values, and of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from tests.helpers.oracle import same


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def back_through_a_copy(m: Any, x: Tensor) -> Tensor:
    other = copy.deepcopy(m).double()
    loss: Tensor = other(x.double()).square().sum()
    loss.backward()
    for p, q in zip(m.parameters(), other.parameters(), strict=True):
        assert q.grad.dtype is torch.float64
        p.grad = q.grad.float()
    return loss.detach()


def step_beside_a_copy(m: Any, x: Tensor) -> Tensor:
    before = copy.deepcopy(m)
    loss: Tensor = m(x).square().sum()
    loss.backward()
    with torch.no_grad():
        for p in m.parameters():
            p.sub_(p.grad * 0.01)
    return (loss + before(x).sum()).detach()


def a_module_made_inside(m: Any, x: Tensor) -> Tensor:
    made = nn.Linear(6, 6, bias=False)
    nn.init.ones_(made.weight)
    y: Tensor = m(made.half().double()(x.double()).float())
    return y.sum()


def copies_that_are_one(m: Any, x: Tensor) -> Tensor:
    a, b = copy.deepcopy([x, x])
    a.add_(1)
    y: Tensor = m(b)
    return (x + b).sum() + y.sum()


RIGHT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a result": lambda m, x: m(x).double().sum(),
    "halves": lambda m, x: m(x.half().float()).half().sum().float(),
    "a weight": lambda m, x: (x.double() @ m[0].weight.double().t()).sum(),
    "back through a copy": back_through_a_copy,
    "a step beside a copy": step_beside_a_copy,
    "a module made inside": a_module_made_inside,
    "copies that are one": copies_that_are_one,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placed", [False, True], ids=["plain", "placed"])
@pytest.mark.parametrize("name", RIGHT)
def test_conversions_are_those_of_one_device(name: str, placed: bool) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def run(fn: Callable[..., Tensor], place: Callable[[Any], Any]) -> Any:
        model = net()
        place(model)
        out = fn(model, x)
        return out, dict(model.state_dict()), [p.grad for p in model.parameters()]

    expected = run(RIGHT[name], lambda model: None)
    with sl.Mesh(data=2):
        found = run(sl.jit(RIGHT[name]), lambda model: sl.parallelize(model, strategy="fsdp") if placed else None)
    same(found, expected)


@pytest.mark.parametrize("placed", [False, True], ids=["plain", "placed"])
def test_a_module_of_the_call_is_not_converted(placed: bool) -> None:
    model = net()
    with sl.Mesh(data=2):
        if placed:
            sl.parallelize(model, strategy="fsdp")
        with pytest.raises(sl.ShardingError) as raised:
            sl.jit(lambda m, x: m.double()(x.double()).sum())(model, torch.ones(8, 6))
    said = str(raised.value)
    assert "Linear.weight is [8, 6] of torch.float32, and would be torch.float64" in said
    assert "convert the module before the call" in said
    assert all(p.dtype is torch.float32 for p in model.parameters())
