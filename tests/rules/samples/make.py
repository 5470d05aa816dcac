"""What samples are written with: random tensors, and one call of an op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.prover import Sample


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def pos(*shape: int) -> Tensor:
    return f(*shape).abs() + 0.5


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def s(name: str, *args: Any, **kwargs: Any) -> Sample:
    return name, args, kwargs
