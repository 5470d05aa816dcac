"""Forward, backward or optimizer: the order in a training step, and one answer for the graph and for the program."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.compiler.plan.phases import BACKWARD, FORWARD, OPTIMIZER, PHASES, op_phases, step_phases
from shardlib.compiler.program.steps import Compute

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam with decay": (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}


def plan_step(name: str) -> sl.Plan:
    kind, options = OPTIMIZERS[name]
    with sl.Mesh(data=2):
        model = sl.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), strategy="ddp")
        optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        plan: sl.Plan = sl.jit(step).plan(model, optimizer, torch.ones(4, 4))
    return plan


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_follows_the_backward_pass(name: str) -> None:
    """Weight decay and the count of steps read no gradients, and belong to the optimizer nevertheless."""
    plan = plan_step(name)
    assert [phase for phase, _ in groupby(op_phases(plan.compiled.graph.ops).values())] == [*PHASES]
    assert [phase for phase, _ in groupby(step_phases(plan.compiled.program))] == [*PHASES]


def test_ops_and_their_steps_have_one_phase() -> None:
    compiled = plan_step("AdamW").compiled
    of_ops = op_phases(compiled.graph.ops)
    pairs = [
        (of_ops[v.value.op], phase)
        for step, phase in zip(compiled.program.steps, step_phases(compiled.program), strict=True)
        for v in (step.out_vars if isinstance(step, Compute) and step.operands else ())
        if v.value is not None and v.value.op is not None and not v.value.op.transparent
    ]
    assert {*pairs} == {(FORWARD, FORWARD), (BACKWARD, BACKWARD), (OPTIMIZER, OPTIMIZER)}


def test_a_function_that_returns_gradients_has_no_optimizer() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (w * w).sum() + (x @ w).square().sum()

    with sl.Mesh(data=2):
        plan = sl.jit(sl.value_and_grad(loss), in_specs=(None, "rows@data _")).plan(torch.ones(3, 2), torch.ones(4, 3))
    assert {*step_phases(plan.compiled.program)} == {FORWARD, BACKWARD}
