"""The work of planning under a budget of memory, counted in whole programs, and its determinism."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.compiler.passes.memory import memory_budget
from shardlib.compiler.passes.memory.budget_programs import Candidates, Choice
from tests.compiler.passes.memory.test_remat import PLACES, Model, batch, train


def unlike(ws: list[Tensor], x: Tensor) -> Tensor:
    """Layers of several sizes, with a norm, an activation and a residual each."""
    for a, b in zip(ws[::2], ws[1::2], strict=True):
        y = nn.functional.layer_norm(x, x.shape[-1:])
        x = x + torch.tanh(y @ a).exp() @ b
    return x.square().mean()


def arguments(layers: int) -> list[Any]:
    sizes = [8 * (k + 2) for k in range(layers)]
    ws = [torch.empty(s, device="meta") for n in sizes for s in ((16, n), (n, 16))]
    return [ws, torch.empty(64, 16, device="meta")]


def planned(layers: int, memory: int | None, planning: str | None = None) -> sl.Plan:
    with sl.Mesh(data=4):
        step = sl.jit(sl.grad(unlike), in_specs=("...", "b@data _"), memory=memory, planning=planning)
        return step.plan(*arguments(layers))


def counted(plan: Callable[[], sl.Plan]) -> tuple[sl.Plan | None, int]:
    """A plan, or None where it is refused, and the whole programs that were made for it."""
    searches: list[Candidates] = []

    def kept(*args: Any) -> Candidates:
        searches.append(Candidates(*args))
        return searches[-1]

    with mock.patch.object(memory_budget, "Candidates", kept):
        try:
            result = plan()
        except sl.ShardingError:
            result = None
    return result, len(searches[0].programs)


def tanhs(ws: list[Tensor], x: Tensor) -> Tensor:
    for w in ws:
        x = torch.tanh(x @ w)
    return x.square().mean()


def tight(memory: int | None) -> sl.Plan:
    """A program that fits into 8,104 bytes only if it begins with what layers hand on."""
    with sl.Mesh(data=4):
        step = sl.jit(torch.func.grad_and_value(tanhs), in_specs=("a@data _", "b@data _"), memory=memory)
        return step.plan([torch.empty(8, 8) for _ in range(3)], torch.empty(64, 8))


@pytest.mark.long
@pytest.mark.parametrize("layers", [2, 4, 8])
@pytest.mark.parametrize("share", [0.9, 0.8])
def test_whole_programs_are_few(layers: int, share: float) -> None:
    budget = int(share * planned(layers, None).peak_memory)
    plan, programs = counted(lambda: planned(layers, budget))
    assert plan is not None
    assert plan.peak_memory <= budget
    assert programs <= memory_budget.PROGRAMS + 2  # the last exchange may be corrected


@pytest.mark.long
def test_whole_programs_are_bounded_where_none_fits() -> None:
    plan, programs = counted(lambda: planned(4, 1))
    assert plan is None
    assert 0 < programs <= memory_budget.LAST_RESORT


def test_values_are_exchanged_also_behind_a_late_program() -> None:
    plan, programs = counted(lambda: tight(8104))
    assert plan is not None
    assert plan.peak_memory <= 8104
    assert memory_budget.PROGRAMS < programs <= memory_budget.LAST_RESORT
    assert plan.simulate().seconds <= 8.2e-7


@pytest.mark.parametrize(("place", "share"), [pytest.param("fsdp", 0.45, marks=pytest.mark.long), ("kept", 0.5)])
def test_tight_budgets_are_met(place: str, share: float) -> None:
    """Both fit only if some layers' values are kept, some dropped and some offloaded."""
    axes, options = PLACES[place]

    def stepped(memory: int | None) -> sl.Plan:
        with sl.Mesh(**axes):
            model = sl.parallelize(Model(2).eval(), **options)
            return sl.jit(train(model), in_specs=("b@data ...",), memory=memory).plan(batch())

    budget = int(share * stepped(None).peak_memory)
    plan, programs = counted(lambda: stepped(budget))
    assert plan is not None
    assert plan.peak_memory <= budget
    assert programs <= memory_budget.LAST_RESORT


@pytest.mark.long
def test_messages_stay_together_and_ahead_where_no_call_may_move() -> None:
    """A budget between the program in which nothing moves, and the one that hides most, costs little time."""
    axes, options = PLACES["tp"]

    def stepped(memory: int | None) -> sl.Plan:
        with sl.Mesh(**axes):
            model = sl.parallelize(Model(2, written=True).eval(), **options)
            return sl.jit(train(model), in_specs=("b@data ...",), memory=memory).plan(batch())

    free = stepped(None)
    plan = stepped(int(0.7 * free.peak_memory))
    assert plan.simulate().seconds < 1.2 * free.simulate().seconds  # where all stay it is 2.5 times


@pytest.mark.long
def test_the_best_plan_makes_more_programs() -> None:
    budget = int(0.8 * planned(4, None).peak_memory)
    quick, best = (counted(lambda p=p: planned(4, budget, p)) for p in (None, "best"))
    assert quick[0] is not None
    assert best[0] is not None
    assert quick[1] < best[1] <= memory_budget.LAST_RESORT + 2
    assert best[0].simulate().seconds <= quick[0].simulate().seconds


@pytest.mark.long
def test_equal_searches_make_equal_programs() -> None:
    budget = int(0.8 * planned(3, None).peak_memory)
    (first, count), (second, again) = (counted(lambda: planned(3, budget)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first.listing(), count) == (second.listing(), again)


@pytest.mark.parametrize("seconds", [*permutations([1e16, 1.0, -1e16])])
def test_an_estimate_does_not_depend_on_the_order_of_values(seconds: tuple[float, ...]) -> None:
    """Ranks find their programs by themselves, and sets of values have another order on each."""
    candidates = mock.Mock(again=lambda choice: set(), seconds=[])
    choice = Choice(moved=frozenset(range(3)))  # type: ignore[arg-type]
    assert Candidates.estimate(candidates, choice, dict(enumerate(seconds))) == 1.0  # type: ignore[arg-type]
