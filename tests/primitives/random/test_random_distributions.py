"""What random ops draw has the distribution that torch says it has."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl

# --- distributions ----------------------------------------------------------------------------------------------------


def drawn(f: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(1)
    with sl.global_random():
        return f()


N = 60_000
MEANS: dict[str, tuple[Callable[[], Tensor], float, float]] = {  # draws, mean, standard deviation
    "uniform": (lambda: torch.empty(N).uniform_(2, 5), 3.5, math.sqrt(9 / 12)),
    "bfloat16": (lambda: torch.rand(N, dtype=torch.bfloat16), 0.5 - 2**-9, math.sqrt(1 / 12)),
    "normal": (lambda: torch.normal(2.0, 3.0, (N,)), 2, 3),
    "complex": (lambda: torch.randn(N, dtype=torch.complex128).abs().square(), 1, 1),
    "exponential": (lambda: torch.empty(N).exponential_(4.0), 0.25, 0.25),
    "geometric": (lambda: torch.empty(N).geometric_(0.3), 1 / 0.3, math.sqrt(0.7) / 0.3),
    "geometric int": (lambda: torch.empty(N, dtype=torch.int64).geometric_(0.9), 1 / 0.9, math.sqrt(0.1) / 0.9),
    "log_normal": (
        lambda: torch.empty(N).log_normal_(0.5, 0.25),
        math.exp(0.5 + 1 / 32),
        math.exp(0.5 + 1 / 32) * math.sqrt(math.expm1(1 / 16)),
    ),
    "cauchy": (lambda: (torch.empty(N).cauchy_(1, 2) < 3).double(), 0.75, math.sqrt(3) / 4),
    "randint": (lambda: torch.randint(-3, 9, (N,)), 2.5, math.sqrt(143 / 12)),
    "randint wide": (lambda: torch.randint(1 << 60, (N,)).double() / 2**60, 0.5, math.sqrt(1 / 12)),
    "random_ int8": (lambda: torch.empty(N, dtype=torch.int8).random_(), 63.5, math.sqrt((2**14 - 1) / 12)),
    "random_ bool": (lambda: torch.empty(N, dtype=torch.bool).random_(), 0.5, 0.5),
    "random_ float16": (lambda: torch.empty(N, dtype=torch.float16).random_(), 1024, 2049 / math.sqrt(12)),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), 0.3, math.sqrt(0.21)),
    "dropout": (lambda: F.dropout(torch.ones(N), 0.2), 1, 0.5),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.randn(N), 0.2, training=True), 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_means_and_spreads(name: str) -> None:
    draw, mean, spread = MEANS[name]
    x = drawn(draw).double()
    assert len(x) == N
    assert abs(x.mean().item() - mean) < 4 * spread / math.sqrt(N)
    assert x.std().item() == pytest.approx(spread, rel=0.05)


def close_shares(x: Tensor, shares: Tensor) -> bool:
    n = x.numel()
    found = torch.bincount(x.flatten(), minlength=len(shares)) / n
    return bool(((found - shares).abs() <= 4.5 * (shares * (1 - shares) / n).sqrt()).all())


def test_multinomial_draws_by_weight() -> None:
    weights = torch.tensor([3.0, 0.0, 1.0, 4.0, 2.0])
    shares = weights / 10
    rows = weights.expand(N, 5)
    assert close_shares(drawn(lambda: torch.multinomial(rows, 1)), shares)
    assert close_shares(drawn(lambda: torch.multinomial(weights, N, replacement=True)), shares)
    assert not close_shares(drawn(lambda: torch.multinomial(weights, N, replacement=True)), shares.roll(1))
    pairs = drawn(lambda: torch.multinomial(rows, 2))
    assert close_shares(pairs[:, 0], shares)
    second = shares / (1 - shares[:, None]) * shares[:, None]  # [first, second]
    second.fill_diagonal_(0)
    assert close_shares(pairs[:, 0] * 5 + pairs[:, 1], second.flatten())
    assert drawn(lambda: torch.multinomial(weights, 4)).sort().values.tolist() == [0, 2, 3, 4]


@pytest.mark.long
def test_randperm_draws_every_order_as_often() -> None:
    torch.manual_seed(1)
    with sl.global_random():
        orders = torch.stack([torch.randperm(3) for _ in range(1200)])
        assert torch.randperm(1000).sort().values.equal(torch.arange(1000))
        assert torch.randperm(0).shape == (0,)
        assert torch.randperm(5, dtype=torch.int32).dtype == torch.int32
    assert close_shares(orders @ torch.tensor([9, 3, 1]), torch.bincount(torch.tensor([5, 7, 11, 15, 19, 21])) / 6)
