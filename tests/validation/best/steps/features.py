"""Losses on features of a cut batch: products of all pairs of features or samples, of which little is made; and the
first token of a cut sequence."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, f32, gathered, reduced

X = {"x": 8}
N, D = 4096, 2048
SMALL = 512


def _off_diagonal(c: Tensor) -> Tensor:
    return c.square().sum() - c.diagonal().square().sum()


def _barlow(a: Tensor, b: Tensor) -> Tensor:
    """Zbontar et al. 2021, arXiv:2103.03230."""
    a, b = ((x - x.mean(0)) / x.std(0) for x in (a, b))
    c = a.t() @ b / len(a)
    return (c.diagonal() - 1).square().sum() + 0.005 * _off_diagonal(c)


def _vicreg(a: Tensor, b: Tensor) -> Any:
    """Bardes et al. 2021, arXiv:2105.04906."""
    loss: Any = 25 * F.mse_loss(a, b)
    for x in (a, b):
        loss = loss + 25 * F.relu(1 - (x.var(0) + 1e-4).sqrt()).mean()
        x = x - x.mean(0)
        loss = loss + _off_diagonal(x.t() @ x / (len(x) - 1)) / D
    return loss


def _infonce(a: Tensor, b: Tensor) -> Tensor:
    scores = a @ b.t() / 0.07
    return (scores.logsumexp(1) - scores.diagonal()).mean()


def _shrunk(w: Tensor, d: Tensor) -> Tensor:
    """Among zeros, and added."""
    return w + d.diag()


def _first_token(x: Tensor, w: Tensor) -> Tensor:
    """What a classifier reads, of a cut sequence."""
    return F.layer_norm(x, (1024,))[:, 0] @ w


TOKENS = (f32(256, 256, 1024), f32(1024, 1024))
FIRST = 256 * 1024 * 4
PAIR = (f32(N, D), f32(N, D))
ROWS_CUT = ("n@x d", "n@x d")
CORRELATIONS = D * D * 4
OF_FEATURE = D * 4
SAMPLES = N * SMALL * 4
ROWS = [
    # Means, variances, a piece of the correlations, and what each makes of it.
    Row("Barlow Twins, batch cut", _barlow, PAIR, ROWS_CUT, X,
        4 * reduced(OF_FEATURE, 8) + gathered(CORRELATIONS, 8) + reduced(4, 8), 6),
    Row("gradients of Barlow Twins", sl.grad(_barlow, (0, 1)), PAIR, ROWS_CUT, X,
        8 * reduced(OF_FEATURE, 8) + reduced(CORRELATIONS, 8), 9, short={"collectives": 11 / 9},
        why="variances' backward takes the means again, and may be what a checkpoint runs again"),
    # Of variances, too, each takes a piece.
    Row("VICReg, batch cut", _vicreg, PAIR, ROWS_CUT, X,
        2 * reduced(OF_FEATURE, 8) + 2 * gathered(OF_FEATURE, 8) + 2 * gathered(CORRELATIONS, 8) + reduced(4, 8), 7),
    Row("InfoNCE, batch cut", _infonce, (f32(N, SMALL),) * 2, ROWS_CUT, X, gathered(SAMPLES, 8) + reduced(4, 8), 2),
    Row("gradients of InfoNCE, batch cut", sl.grad(_infonce, (0, 1)), (f32(N, SMALL),) * 2, ROWS_CUT, X,
        2 * gathered(SAMPLES, 8), 2),
    # Who has the token hands out samples; all work on them.
    Row("first token of a cut sequence, projected", _first_token, TOKENS, ("b s@x d", "..."), X,
        2 * gathered(FIRST, 8), 2, out_specs="b d"),
    Row("first token of a cut sequence, columns cut", _first_token, TOKENS, ("b s@x d", "d f@x"), X,
        reduced(FIRST, 8), 1),
    Row("diagonal of a matrix, rows cut", lambda w: w.diagonal().sin(), (f32(N, N),), ("m@x n",), X),
    Row("matrix with more on its diagonal, rows cut", _shrunk, (f32(N, N), f32(N)), ("m@x n", "m@x"), X),
]  # fmt: skip
