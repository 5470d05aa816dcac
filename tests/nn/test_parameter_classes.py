"""Parameters of classes of their own, as quantized weights are: refused, all at once, before anything is placed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, ShardingError


class Special(nn.Parameter):
    def double(self) -> Tensor:
        return 2 * self


class Tagged(Tensor):
    pass


class Scaled(Tensor):
    """An integer matrix with a scale, which it multiplies when it is read."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: Any, q: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].q, args[0].scale)
        plain = [x.q * x.scale if isinstance(x, Scaled) else x for x in args]
        return func(*plain, **(kwargs or {}))


def net() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].weight = Special(torch.ones(4, 4))
    module[1].weight = nn.Parameter(Scaled(torch.ones(4, 4), torch.tensor(2.0)), requires_grad=False)
    module[2].bias = nn.Parameter(torch.ones(4).as_subclass(Tagged))
    return module


PLACE: dict[str, Callable[[nn.Module], Any]] = {
    "fsdp": lambda m: sl.parallelize(m, strategy="fsdp"),
    "specs": lambda m: sl.parallelize(m, {"0.bias": "_@data"}),
    "precision": lambda m: sl.parallelize(m, strategy="ddp", precision=torch.bfloat16),
}


@pytest.mark.parametrize("how", PLACE)
def test_parallelize_refuses_them(how: str) -> None:
    module = net()
    before = dict(module.named_parameters())
    with Mesh(data=2), pytest.raises(ShardingError, match="would lose the classes of parameters") as error:
        PLACE[how](module)
    for at, kind in (("0.weight", "Special"), ("1.weight", "Scaled"), ("2.bias", "Tagged")):
        assert f"{at} of [4{', 4' * (at != '2.bias')}] is a {__name__}.{kind}" in str(error.value)
    assert "0.bias" not in str(error.value)
    assert all(x is before[at] for at, x in module.named_parameters())
    assert "forward" not in vars(module)


def test_submodules_without_them_are_placed() -> None:
    module = net()
    with Mesh(data=2):
        module[2].bias = nn.Parameter(module[2].bias.detach().as_subclass(Tensor))
        sl.parallelize(module[2], strategy="fsdp")
    assert isinstance(module[2].bias, sl.ShardedTensor)
    assert type(module[0].weight) is Special


def test_materialize_refuses_them() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4))
        module[0].weight = Special(torch.empty(4, 4))
    with Mesh(data=2), pytest.raises(ShardingError, match=r"materialize\(Sequential\) would lose the classes") as error:
        sl.materialize(module)
    assert "0.weight of [4, 4]" in str(error.value)
    assert type(module[0].weight) is Special


def test_load_state_dict_refuses_to_assign_them() -> None:
    with Mesh(data=2):
        module = sl.parallelize(nn.Sequential(nn.Linear(4, 4)), strategy="fsdp")
        before = module[0].weight
        state = {"0.weight": Special(torch.ones(4, 4)), "0.bias": torch.ones(4).as_subclass(Tagged)}
        with pytest.raises(RuntimeError) as error:
            module.load_state_dict(state, assign=True)
    for at, kind in (("0.weight", "Special"), ("0.bias", "Tagged")):
        assert f"{at} lives on Mesh(data=2), and what is assigned is a {__name__}.{kind}" in str(error.value)
    assert module[0].weight is before


def test_buffers_stay_as_they_are() -> None:
    class Net(nn.Module):
        def __init__(self, x: Tensor) -> None:
            super().__init__()
            self.l, self.b = nn.Linear(4, 4), nn.Buffer(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x) + self.b

    with Mesh(data=2):
        plain = sl.parallelize(Net(torch.ones(4)), strategy="fsdp")
        torch.testing.assert_close(plain(torch.ones(2, 4)).full_tensor(), plain.l(torch.ones(2, 4)).full_tensor() + 1)
        other = sl.parallelize(Net(torch.ones(4).as_subclass(Tagged)), strategy="fsdp")
        assert type(other.b) is Tagged
        with pytest.raises(ShardingError, match=f"self.b is a {__name__}.Tagged"):
            other(torch.ones(2, 4))
