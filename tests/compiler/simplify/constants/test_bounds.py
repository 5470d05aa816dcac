"""Bounds of integers, by brute force; a loss counts its targets only if it may ignore one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.compiler.simplify.constants.evaluate import Constants
from shardlib.frontend.trace import trace

N, V = 8, 12
_where = torch.where

MADE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int] | None]] = {
    "arange": (lambda x: torch.arange(5), (0, 4)),
    "downwards": (lambda x: torch.arange(4, -4, -2), (-2, 4)),
    "sums": (lambda x: torch.arange(5) + torch.full((5,), -3), (-3, 1)),
    "side by side": (lambda x: torch.cat([torch.zeros(2, dtype=torch.int64), torch.arange(3)]).view(5, 1), (0, 2)),
    "one that wraps": (lambda x: torch.full((5,), 300).to(torch.int8).long(), (44, 44)),
    "none": (lambda x: torch.arange(0), None),
    "rests": (lambda x: (x * 2) % 7, (0, 6)),
    "rests of a negative": (lambda x: x % -7, None),
    "either": (lambda x: _where(x > 0, torch.arange(5), -100), None),
    "places": (lambda x: x.view(1, -1).argmax(1), (0, 4)),
    "places, viewed": (lambda x: x.view(1, -1).argmax(1).view(1, 1).clone(), (0, 4)),
    "other numbers": (lambda x: x.argmax().to(torch.int8).long(), None),
    "input": (lambda x: x + 1, None),
    "other bytes": (lambda x: (x % 7).view(torch.int32), None),
    "a fraction": (lambda x: x / 2, None),
}


@pytest.mark.parametrize("name", MADE)
def test_ranges(name: str) -> None:
    make, within = MADE[name]
    x = torch.tensor([3, -8, 0, 5, 1])
    gm = trace(make, (x,)).graph
    (out,) = gm.graph.output_node().args[0]
    assert Constants(gm).find_range(out) == within
    if within is not None:
        values = make(x)
        assert within[0] <= values.min().item() <= values.max().item() <= within[1]


def _pairs(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(N))


def _shifted(x: Tensor) -> Tensor:
    return F.cross_entropy(x, (torch.arange(N) + N // 2) % N)


def _first(x: Tensor) -> Tensor:
    return F.cross_entropy(x, x.new_zeros(N, dtype=torch.int64))


def _own_guess(x: Tensor) -> Tensor:
    return F.cross_entropy(x, (2 * x).argmax(-1))


def _planes(x: Tensor) -> Tensor:
    return F.cross_entropy(x.view(N, 3, 2, 2), (torch.arange(N * 4) % 3).view(N, 2, 2))


def _ignored(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(N), ignore_index=3)


def _maybe_ignored(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.where(x[:, 0] > 0, torch.arange(N), -100))


def _weighed(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(N), torch.linspace(0.5, 1, V).double())


COUNTS = {_pairs: 1, _shifted: 1, _first: 1, _own_guess: 1, _planes: 1, _ignored: 2, _maybe_ignored: 2, _weighed: 2}


@pytest.mark.parametrize("program", COUNTS, ids=lambda f: f.__name__)
def test_messages_of_a_cut_batch(program: Callable[[Tensor], Any]) -> None:
    """The sum; and how many count, where that is not known."""
    x = torch.randn(N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with sl.Mesh(n=4):
        step = sl.jit(sl.value_and_grad(program), in_specs=("n@n v",))
        assert len(step.plan(x).collectives) == COUNTS[program]
        sl.check(sl.value_and_grad(program), x, in_specs=("n@n v",))
    with sl.Mesh(n=3):
        sl.check(sl.value_and_grad(program), x, in_specs=("n@n v",))
