"""Gradients of 16 bits that microbatches add up in 32 bits: one message for all microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl


@pytest.mark.parametrize("inside", [True, False])
def test_microbatches_under_autocast_send_once(inside: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    parameters, x, microbatches = list(model.parameters()), torch.randn(2048, 16), 4

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(rows).float().square().mean()

    def gradients(x: torch.Tensor) -> Any:
        losses = [loss_of(x.view(-1, microbatches, 16).select(1, m)) for m in range(microbatches)]
        if not inside:
            return torch.autograd.grad(sum(losses), parameters)
        first, *others = [torch.autograd.grad(loss, parameters) for loss in losses]
        for other in others:
            first = tuple(a + b for a, b in zip(first, other, strict=True))
        return first

    expected = gradients(x)
    with sl.Mesh(data=4):
        step = sl.jit(gradients, in_specs="b@data _")
        plan, actual = step.plan(x), step(x)
    assert [c.kind for c in plan.collectives] == ["all_reduce"] * len(parameters)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=2e-2, atol=1e-3)
