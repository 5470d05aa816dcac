"""A plan has no effect: all that the function finds is afterwards what it was, object by object, unwritten."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import shardlib as sl

X = torch.linspace(-1, 1, 64).reshape(8, 8)
Found = tuple[nn.Module, Any, Any, Any]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
}


def step(model: nn.Module, opt: Any, schedule: Any, scaler: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    schedule.step()
    opt.zero_grad()
    return loss.detach()


def _stepped(jitted: Any, found: Found) -> None:
    jitted(*found, X)


def _as_loaded(_: Any, found: Found) -> None:
    """Gradients are there, and moments of one device, which a step would place."""
    model, opt, *_ = found
    model(X).square().mean().backward()
    opt.step()
    for kept in opt.state.values():
        kept.update({k: x.full_tensor() for k, x in kept.items() if isinstance(x, sl.ShardedTensor)})


BEFORE: dict[str, Callable[[Any, Found], None]] = {
    "nothing": lambda jitted, found: None,
    "a step": _stepped,
    "a step outside": _as_loaded,
}


def look(x: Any, seen: set[int]) -> Any:
    """Everything that is held, tensors by identity, memory and version."""
    if isinstance(x, Tensor):
        pieces = id(x._locals) if isinstance(x, sl.ShardedTensor) else x.data_ptr()
        grad = look(x.grad, seen) if x.is_leaf else None
        return id(x), x._version, pieces, grad, x.requires_grad, sorted(set(vars(x)) - {"_memory", "_path"})
    if isinstance(x, int | float | str | None):
        return x
    if id(x) in seen:
        return id(x)
    seen.add(id(x))
    if isinstance(x, dict):
        return id(x), [(id(k) if isinstance(k, Tensor) else k, look(y, seen)) for k, y in x.items()]
    if isinstance(x, list | tuple):
        return [look(y, seen) for y in x]
    return id(x), look(vars(x), seen) if isinstance(x, LOOKED_INTO) else None


LOOKED_INTO = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


CASES = [
    ("Adam", None, "nothing"),
    ("Adam", None, "a step"),
    ("Adam", "zero1", "a step outside"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            *(("Adam", "zero1", before) for before in ("nothing", "a step")),
            *((name, "zero1", "a step outside") for name in ("SGD", "AdamW, fused", "ASGD", "NAdam")),
        )
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "strategy", "before"), CASES)
def test_a_plan_leaves_all_as_it_was(name: str, strategy: str | None, before: str) -> None:
    torch.manual_seed(0)
    with sl.Mesh(data=2, tensor=2):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
        if strategy:
            sl.parallelize(model, {"0.weight": "o@tensor i"}, strategy=strategy)
        opt = OPTIMIZERS[name](model.parameters())
        schedule = SequentialLR(opt, [LinearLR(opt), CosineAnnealingLR(opt, 5)], [2])
        found = model, opt, schedule, torch.amp.GradScaler("cpu")
        jitted = sl.jit(step)
        BEFORE[before](jitted, found)

        def held() -> Any:
            return look(found, set()), found[3].state_dict(), torch.get_rng_state().tolist(), random.getstate()

        was = held()
        jitted.plan(*found, X)
        assert held() == was


def test_a_plan_between_forward_and_backward() -> None:
    with sl.Mesh(data=2):
        weight = nn.Parameter(sl.shard(X, "_ o@data"))
        opt = torch.optim.SGD([weight])

        @sl.jit
        def update(weight: Tensor, opt: Any) -> None:
            weight.sum().backward()
            opt.step()

        loss = weight.sin().sum()
        update.plan(weight, opt)
        loss.backward()  # what it saved was not written to
