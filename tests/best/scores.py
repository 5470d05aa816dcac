"""Losses of single tokens, rankings, statistics of samples, and stacks of small matrices, on one and two axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.best import Row, f32, ints, reduced

X, DT = {"x": 8}, {"data": 2, "tensor": 4}
D, V, N = 512, 16384, 4096


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


# Losses of single tokens ----------------------------------------------------------------------------------------------


def _each(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((h @ w).flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def _grpo(h: Tensor, w: Tensor, reference: Tensor, y: Tensor, advantage: Tensor, there: Tensor) -> Tensor:
    """Shao et al. 2024, arXiv:2402.03300, with the divergence's estimate that is never negative."""
    new, old = -_each(h, w, y), -_each(h, reference, y)
    ratio, apart = (new - new.detach()).exp(), (old - new).exp() - (old - new) - 1
    return ((0.04 * apart - ratio * advantage[:, None]) * there).sum(1).div(there.sum(1)).mean()


TOKENS = (f32(8, 512, D), f32(D, V), ints(8, 512))
GROUPS = (f32(8, 512, D), f32(D, V), f32(D, V), ints(8, 512), f32(8), f32(8, 512))
ROW = reduced(N / 2 * 4, 4)  # of one number for each token

STACK = f32(64, 16, 16)

ROWS = [
    Row("losses of tokens, batch cut", _each, TOKENS, ("b@x s d", "...", "b@x s"), X),
    Row("gradients of GRPO, sequence cut", sl.grad(_grpo, (0, 1)), GROUPS,
        ("b s@x d", "...", "...", "b s@x", "b", "b s@x"), X, reduced(D * V * 4, 8) + reduced(8 * 4, 8), 2),
    Row("gradients of GRPO, batch and vocabulary cut", sl.grad(_grpo, (0, 1)), GROUPS,
        ("b@data s d", "d v@tensor", "d v@tensor", "b@data s", "b@data", "b@data s"), DT,
        6 * ROW + reduced(N / 2 * D * 4, 4) + reduced(D * V, 2), 8),
    Row("singular values of a cut stack", torch.linalg.svdvals, (STACK,), ("n@x i j",), X),
    Row("triangles of a cut stack", lambda a: torch.linalg.qr(a, mode="r")[1], (STACK,), ("n@x i j",), X),
    Row("gradients of least squares of a cut stack", _of_loss(lambda a, b: torch.linalg.lstsq(a, b).solution, 0, 1),
        (f32(64, 32, 8), f32(64, 32, 4)), ("n@x i j", "n@x i k"), X),
]  # fmt: skip
