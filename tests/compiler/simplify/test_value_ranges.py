"""What whole numbers may be is known of how they are made: targets that no loss ignores are not counted by devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.compiler.simplify.value_ranges import Range, Ranges
from shardlib.frontend.trace import trace

N, V = 8, 12
_where = torch.where

MADE: dict[str, tuple[Callable[[Tensor], Tensor], Range | None]] = {
    "arange": (lambda x: torch.arange(5), Range(0, 4)),
    "from a start": (lambda x: torch.arange(3, 9), Range(3, 8)),
    "downwards": (lambda x: torch.arange(4, -4, -2), Range(-2, 4)),
    "none": (lambda x: torch.arange(0), Range(0, 0)),
    "rests": (lambda x: (x * 2) % 7, Range(0, 6)),
    "rests of a negative": (lambda x: x % -7, None),
    "sums": (lambda x: torch.arange(5) + torch.full((5,), -3), Range(-3, 1)),
    "sums times a number": (lambda x: torch.add(torch.arange(5), torch.arange(5), alpha=-2), None),
    "either": (lambda x: _where(x > 0, torch.arange(5), -100), Range(-100, 4)),
    "side by side": (lambda x: torch.cat([torch.zeros(2, dtype=torch.int64), torch.arange(3)]).view(5, 1), Range(0, 2)),
    "places": (lambda x: x.view(1, -1).argmax(1), Range(0, 4)),
    "places of the best": (lambda x: x.topk(2)[1], Range(0, 4)),
    "the best": (lambda x: x.topk(2)[0], None),
    "narrow": (lambda x: x.to(torch.uint8), Range(0, 255)),
    "too narrow": (lambda x: torch.full((5,), 300).to(torch.int8), None),
    "given": (lambda x: x + 1, None),
    "other bytes": (lambda x: torch.arange(5).view(torch.int32), None),
    "a fraction": (lambda x: x / 2, None),
}


@pytest.mark.parametrize("name", MADE)
def test_ranges(name: str) -> None:
    make, within = MADE[name]
    x = torch.tensor([3, -8, 0, 5, 1])
    (out,) = next(n for n in trace(make, (x,)).graph.graph.nodes if n.op == "output").args[0]
    assert Ranges().find(out) == within
    if within is not None and (made := make(x)).numel():
        assert within.low <= made.min().item() <= made.max().item() <= within.high


def test_long_chains_end() -> None:
    def doubled(x: Tensor) -> Tensor:
        made = torch.arange(2)
        for _ in range(40):
            made = made + made
        for _ in range(2000):
            made = made % 5
        return made

    (out,) = next(n for n in trace(doubled, (torch.zeros(1),)).graph.graph.nodes if n.op == "output").args[0]
    assert Ranges().find(out) == Range(0, 4)


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
