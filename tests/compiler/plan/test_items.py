"""The names of the modules, weights and gradients whose values a plan's collectives move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Plan


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 8))


def in_turn(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = second(first(x))
    return y


def in_a_loop(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    for module in (first, second):
        x = module(x)
    return x


def beside(first: nn.Module, second: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return first(x), second(x)


TABLE = {"0.*": "ff@tensor ...", "2.weight": "_ ff@tensor"}


@pytest.mark.parametrize("step", [in_turn, in_a_loop, beside])
@pytest.mark.parametrize("sharded", [("first",), ("second",), ("first", "second")])
def test_modules_of_one_class_have_their_own_names(step: object, sharded: Sequence[str]) -> None:
    with sl.Mesh.abstract(data=2, tensor=4), torch.device("meta"):
        modules = {name: sl.parallelize(mlp(), TABLE if name in sharded else {}) for name in ("first", "second")}
        plan: Plan = sl.jit(step).plan(*modules.values(), torch.empty(512, 8))
    forward = [item for item in plan.items.collectives if item.phase == "forward"]
    sums = Counter(item.path for item in forward if "sum over ff" in item.note)
    assert sums == {f"{name}.{child}": 1 for name in sharded for child in (1, 2)}


def test_a_module_with_two_sets_of_weights_has_the_name_of_its_class() -> None:
    """An op that reads a weight belongs to the weight's set; for other ops both sets are possible."""
    model = mlp()
    weights = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}

    def step(first: dict[str, Tensor], second: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, first, x)
        z: Tensor = torch.func.functional_call(model, second, y)
        return z

    specs = {"0.weight": "ff _", "0.bias": "ff", "2.weight": "_ ff", "2.bias": "_"}
    with sl.Mesh.abstract(tensor=4, rules={"ff": "tensor"}):
        plan = sl.jit(step, in_specs=(specs, specs, None)).plan(weights, weights, torch.empty(4, 8, device="meta"))
    paths = Counter(item.path for item in plan.items.collectives)
    assert paths == {"Sequential.1": 4, "first.2": 1, "second.2": 1}


def with_average(model: nn.Module, average: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.1)


def clipped(model: nn.Module, average: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()


def with_moment(model: nn.Module, average: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
    moment: Tensor = sl.shard(opt.state[model.weight]["momentum_buffer"], "_ _")
    return moment


ADAM, SGD = torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)
GRADIENT, NEW_WEIGHT = ("model.weight", "gradient"), ("model.weight", "new value")
NEW_MOMENT = ("opt.state[model.weight].momentum_buffer", "new value")


@pytest.mark.parametrize(
    ("step", "optimizer", "moved"),
    [
        (with_average, ADAM, {GRADIENT, NEW_WEIGHT}),
        (with_average, SGD, {GRADIENT, NEW_WEIGHT}),
        (clipped, ADAM, {GRADIENT, NEW_WEIGHT}),
        (with_moment, SGD, {GRADIENT, NEW_MOMENT}),
    ],
)
def test_new_values_are_no_gradients(
    step: object, optimizer: Callable[..., torch.optim.Optimizer], moved: set[tuple[str, str]]
) -> None:
    """The mean of weights and a moment have the shape of a gradient, and are read by the optimizer, too."""
    with sl.Mesh.abstract(data=2), torch.device("meta"):
        model, average = (sl.parallelize(nn.Linear(8, 16, bias=False), strategy=s) for s in ("zero1", "fsdp"))
        opt = optimizer(model.parameters())
        plan = sl.jit(step, in_specs=(None, None, None, "batch@data _")).plan(model, average, opt, torch.empty(512, 8))
    assert {(item.path, item.role) for item in plan.items.collectives if item.is_tensor} == moved


def test_a_star_stands_for_all_layers() -> None:
    """Every second layer is sharded; the row of its gathers lists these layers, for the others are inputs, too."""

    def step(layers: nn.Sequential, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x).relu()
        return x

    with sl.Mesh.abstract(tensor=4), torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        sl.parallelize(layers, {f"{i}.*": "out@tensor ..." for i in (0, 2, 4)})
        plan = sl.jit(step).plan(layers, torch.empty(256, 64))
    rows = [line.split()[0] for line in str(plan).splitlines() if " all_gather[tensor] " in f"{line} "]
    assert rows == ["layers.{0,2,4}.weight"]
