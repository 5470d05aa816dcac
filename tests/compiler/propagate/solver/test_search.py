"""The work of planning, counted: one problem, few searches for a minimum, few prices for each decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib.compiler import propagate
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.propagate.solver.problem import Problem


class Unlike(nn.Module):
    """Blocks of which no two are of one width."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        widths = [64 + 16 * i for i in range(blocks)]
        self.up = nn.ModuleList(nn.Linear(64, width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, 64) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = F.layer_norm(x + down(F.gelu(up(x))), (64,))
        return x


def _plan(model: nn.Module, *args: Tensor) -> Plan:
    with sl.Mesh(data=2, tensor=2) as mesh:
        sl.parallelize(model, sl.suggest(model, mesh, *args), strategy="fsdp")
        plan: Plan = model.forward.plan(*args)  # type: ignore[operator, union-attr]
    return plan


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "two unlike blocks": lambda: (Unlike(2), torch.randn(8, 4, 64)),
    "eight unlike blocks": lambda: (Unlike(8), torch.randn(8, 4, 64)),
    "encoder": lambda: (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(8, 6, 32)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU()),
        torch.randn(8, 8, 8, 8),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_one_problem_and_few_minima(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[Problem] = []

    def build(*args: Any) -> Problem:
        problems.append(Problem(*args))
        return problems[-1]

    model, x = CASES[name]()
    monkeypatch.setattr(propagate, "Problem", build)
    search = _plan(model, x).compiled.propagated.search
    assert sum(problem is search.problem for problem in problems) == 1
    graphs = {id(problem.graph) for problem in problems}
    assert len(problems) <= 2 * len(graphs), "one, and another where an annotation may be given up"
    decisions = len(search.choices)
    assert search.solves <= 40
    assert search.estimate.evaluations <= 100 * decisions


@pytest.mark.long
def test_prices_grow_with_the_model_alone() -> None:
    few, many = (_plan(Unlike(n), torch.randn(8, 4, 64)).compiled.propagated.search for n in (2, 8))
    share = len(many.choices) / len(few.choices)
    assert many.estimate.evaluations <= 1.3 * share * few.estimate.evaluations
    assert many.solves <= few.solves + 10
