"""Settings of optimizers that change from step to step: inputs of one program, whoever changes them, and where."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import shardlib as sl
from tests.helpers.training import step

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
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=30),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.05, step_size_up=4),
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batches() -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(8, 8, dtype=torch.float64) for _ in range(STEPS)]


def settings(opt: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: x for k, x in group.items() if k != "params"} for group in opt.param_groups]


def same(a: nn.Module, b: nn.Module) -> None:
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x.full_tensor() if isinstance(x, sl.ShardedTensor) else x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(4)
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
        opt = torch.optim.AdamW([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.01)
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


# --- stepped inside ---------------------------------------------------------------------------------------------------


class Warm(lr_scheduler.LRScheduler):
    """A schedule of a user's own."""

    def __init__(self, opt: torch.optim.Optimizer, steps: int) -> None:
        self.steps = steps
        super().__init__(opt)

    def get_lr(self) -> list[Any]:
        return [rate * min(1, (self.last_epoch + 1) / self.steps) for rate in self.base_lrs]


def _in_turn(opt: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(opt, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)]
    return lr_scheduler.SequentialLR(opt, parts, milestones=[4])


SCHEDULES: dict[str, Schedule] = {
    **CYCLES,
    "CyclicLR, exponential": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.05, 4, mode="exp_range", gamma=0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 7]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.95**n if n < 5 else 0.5),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.95),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SequentialLR": _in_turn,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "a user's own": lambda o: Warm(o, 5),
}


def scheduled(model: nn.Module, opt: torch.optim.Optimizer, schedule: Any, x: Tensor, loss: float) -> Tensor:
    found = step(model, opt, x)
    schedule.step(*[loss] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else [])
    return found


def scheduled_first(model: nn.Module, opt: torch.optim.Optimizer, schedule: Any, x: Tensor, loss: float) -> Tensor:
    for part in x.chunk(2):
        model(part).square().mean().backward()
        schedule.step(*[loss] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else [])
    rate = schedule.get_last_lr()[0]
    opt.step()
    opt.zero_grad()
    return model(x).sum().detach() * rate


def trained(run: Callable[..., Tensor], make: str, schedule: Schedule) -> tuple[nn.Module, list[Any], list[Tensor]]:
    model = net()
    opt = OPTIMIZERS[make](model.parameters())
    plan, seen, found = schedule(opt), [], []
    for i, x in enumerate(batches()):
        found.append(run(model, opt, plan, x, 1.0 / (1 + i // 4)))
        held = {k: v for k, v in vars(plan).items() if type(v) in (int, float) or k in ("_last_lr", "base_lrs")}
        seen.append((settings(opt), plan.get_last_lr(), held))
    return model, seen, found


@pytest.mark.sampled(29)
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("run", [scheduled, scheduled_first])
@pytest.mark.parametrize("make", ["AdamW", "SGD"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_is_stepped_inside_is_one_program(name: str, make: str, run: Callable[..., Tensor]) -> None:
    expected, seen, losses = trained(run, make, SCHEDULES[name])
    jitted = sl.jit(run)
    with sl.Mesh(data=2):
        model, found, own = trained(jitted, make, SCHEDULES[name])
    same(model, expected)
    assert found == seen, "all that torch has, each list as it was when it was asked for"
    for a, b in zip(own, losses, strict=True):
        assert isinstance(a, sl.ShardedTensor)
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-10, atol=1e-12)
    asks = run is scheduled_first and name in ("LambdaLR", "MultiplicativeLR", "a user's own")  # before opt has a state
    assert len(jitted.retraces) <= asks, jitted.retraces


def test_a_schedule_by_what_changes_outside_is_right() -> None:
    """What a user's function reads may change, in between or inside: then it is code like any other."""

    def trained(jit: Callable[..., Any], inside: bool) -> list[Any]:
        factor = 0.9
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = lr_scheduler.LambdaLR(opt, lambda n: factor**n)

        def run(model: nn.Module, opt: torch.optim.Optimizer, schedule: Any, x: Tensor) -> Tensor:
            nonlocal factor
            loss = step(model, opt, x)
            if inside:
                factor = factor / 2
            schedule.step()
            return loss

        run, seen = jit(run), []
        for i, x in enumerate(batches()[:6]):
            run(model, opt, schedule, x)
            seen.append(schedule.get_last_lr())
            factor = 0.8 if i == 3 else factor
        return seen

    with sl.Mesh(data=2):
        for inside in (False, True):
            assert trained(sl.jit, inside) == trained(lambda fn: fn, inside)


def test_a_schedule_goes_back_and_on() -> None:
    """Its numbers are those of the call: also of one that begins again, or was loaded."""

    def run(step: Callable[..., Tensor]) -> list[Any]:
        model = net()
        opt = torch.optim.AdamW(model.parameters())
        schedule, seen = lr_scheduler.CosineAnnealingLR(opt, 4), []
        kept = schedule.state_dict() | {"_last_lr": [0.001]}, copy.deepcopy(opt.state_dict()["param_groups"])
        for i, x in enumerate(batches()):
            if i == 6:
                schedule.load_state_dict(kept[0])
                opt.param_groups[0].update({k: v for k, v in kept[1][0].items() if k != "params"})
            step(model, opt, schedule, x, 0.0)
            seen.append((schedule.last_epoch, schedule.get_last_lr(), opt.param_groups[0]["lr"]))
        return seen

    jitted = sl.jit(scheduled)
    with sl.Mesh(data=2):
        assert run(jitted) == run(scheduled)


def test_a_rate_that_is_a_tensor_is_filled() -> None:
    def run(step: Callable[..., Tensor]) -> list[float]:
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        schedule, seen = lr_scheduler.ExponentialLR(opt, 0.5), []
        for x in batches()[:4]:
            step(model, opt, schedule, x, 0.0)
            seen.append(float(opt.param_groups[0]["lr"]))
        return seen

    with sl.Mesh(data=2):
        assert run(sl.jit(scheduled)) == run(scheduled)


def test_a_schedule_by_the_loss_of_the_call_is_refused() -> None:
    def run(model: nn.Module, opt: torch.optim.Optimizer, schedule: Any, x: Tensor) -> Tensor:
        loss = step(model, opt, x)
        schedule.step(loss)
        return loss

    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    with sl.Mesh(data=2), pytest.raises(sl.ShardingError) as raised:
        sl.jit(run)(model, opt, lr_scheduler.ReduceLROnPlateau(opt), batches()[0])
    said = str(raised.value)
    assert "ReduceLROnPlateau is stepped by a value that the traced function computes, f64[]" in said
    assert "schedule.step(float(loss))" in said
    assert all(map(torch.equal, before, model.parameters()))


def test_a_schedule_that_ends_raises_what_torch_raises() -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=3)
    jitted = sl.jit(scheduled)
    with sl.Mesh(data=2):
        for x in batches()[:3]:
            jitted(model, opt, schedule, x, 0.0)
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(ValueError, match="Tried to step 4 times"):
            jitted(model, opt, schedule, batches()[3], 0.0)
        assert all(map(torch.equal, before, model.parameters()))
