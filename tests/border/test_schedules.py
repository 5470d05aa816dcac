"""Settings of optimizers that change from step to step: inputs of one program, whoever changes them, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import shardlib as sl

Schedule = Callable[[torch.optim.Optimizer], Any]

STEPS = 12
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}
CYCLES: dict[str, Schedule] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.05, step_size_up=4),
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batches() -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(8, 8, dtype=torch.float64) for _ in range(STEPS)]


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def settings(opt: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: x for k, x in group.items() if k != "params"} for group in opt.param_groups]


def same(a: nn.Module, b: nn.Module) -> None:
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x.full_tensor() if isinstance(x, sl.ShardedTensor) else x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cycle", CYCLES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_momenta_that_a_schedule_changes_are_inputs(name: str, cycle: str) -> None:
    def run(step: Callable[..., Tensor]) -> tuple[nn.Module, list[Any]]:
        model = net()
        opt = OPTIMIZERS[name](model.parameters())
        schedule, seen = CYCLES[cycle](opt), []
        for x in batches():
            step(model, opt, x)
            schedule.step()
            seen.append(settings(opt))
        return model, seen

    expected, seen = run(step)
    jitted = sl.jit(step)
    with sl.Mesh(data=2):
        model, found = run(jitted)
    same(model, expected)
    assert found == seen
    assert len(jitted.retraces) == 1, jitted.retraces


@pytest.mark.parametrize("shared", [True, False], ids=["one tuple", "two tuples"])
def test_groups_keep_their_own_momenta(shared: bool) -> None:
    """Groups begin with one tuple of defaults, and may get another one each, or one for both."""

    def run(step: Callable[..., Tensor]) -> nn.Module:
        model = net()
        opt = torch.optim.AdamW([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.01)  # type: ignore[index]
        for i, x in enumerate(batches()):
            step(model, opt, x)
            betas = 0.9 - 0.02 * i, 0.99 - 0.01 * i
            for group in opt.param_groups:
                group["betas"] = betas if shared or group is opt.param_groups[0] else (0.5 + 0.01 * i, betas[1])
        return model

    jitted = sl.jit(step)
    with sl.Mesh(data=2):
        model = run(jitted)
    same(model, run(step))
    assert len(jitted.retraces) <= 2, jitted.retraces


class Holder:
    def __init__(self) -> None:
        self.pair, self.items, self.deep = (1.0, 2), [3.0, 4.0], ((0.5, 1), "a")


def test_a_function_that_puts_other_tuples_and_lists_is_one_program() -> None:
    def run(jit: Callable[..., Any]) -> list[Any]:
        held, seen = Holder(), []

        def fn(x: Tensor) -> Tensor:
            a, b = held.pair
            held.pair = a / 2, b + 1
            held.items = [u + a for u in held.items]
            held.deep = ((held.deep[0][0] * 2, held.deep[0][1]), "a")
            return x * a + b * held.items[1] - held.deep[0][0]

        fn = jit(fn)
        for _ in range(5):
            before = held.items
            y = fn(torch.ones(2, dtype=torch.float64))
            assert held.items is not before
            seen.append((y.tolist(), held.pair, held.items, held.deep))
        assert not getattr(fn, "retraces", [])
        return seen

    with sl.Mesh(data=2):
        assert run(sl.jit) == run(lambda fn: fn)


def test_a_comparison_parts_programs_and_not_its_numbers() -> None:
    def warmed(x: Tensor, n: int, rate: float) -> Tensor:
        y = x * min(1.0, (n + 1) / 4) * rate
        return y * 2 if rate else y

    jitted = sl.jit(warmed)
    x = torch.ones(2, dtype=torch.float64)
    with sl.Mesh(data=2):
        for n in range(STEPS):
            rate = (n - 5) / 7
            assert jitted(x, n, rate).tolist() == warmed(x, n, rate).tolist()
    assert len(jitted.retraces) == 2, jitted.retraces  # the warmup is over; a rate of 0


def test_a_loop_that_compares_often_is_for_its_number() -> None:
    def power(x: Tensor, n: int) -> Tensor:
        while n > 0:
            x, n = x * 1.5, n - 1
        return x

    jitted = sl.jit(power)
    x = torch.ones(2, dtype=torch.float64)
    with sl.Mesh(data=2):
        for n in (3, 100, 99, 3, 100):
            assert jitted(x, n).tolist() == power(x, n).tolist()
    assert len(jitted.retraces) == 2, jitted.retraces
