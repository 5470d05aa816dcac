"""An ordinary training step, as tests of what is around it take it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()
