"""The work of planning under a budget of memory, counted in whole programs, and its determinism."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.compiler.passes.memory import memory_budget
from shardlib.compiler.passes.memory.budget_programs import Candidates


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


def planned(layers: int, memory: int | None) -> sl.Plan:
    with sl.Mesh(data=4):
        return sl.jit(sl.grad(unlike), in_specs=("...", "b@data _"), memory=memory).plan(*arguments(layers))


def counted(layers: int, memory: int) -> tuple[sl.Plan | None, int]:
    """A plan, or None where it is refused, and the whole programs that were made for it."""
    searches: list[Candidates] = []

    def kept(*args: Any) -> Candidates:
        searches.append(Candidates(*args))
        return searches[-1]

    with mock.patch.object(memory_budget, "Candidates", kept):
        try:
            plan = planned(layers, memory)
        except sl.ShardingError:
            plan = None
    return plan, len(searches[0].programs)


@pytest.mark.parametrize("layers", [2, 4, 8])
@pytest.mark.parametrize("share", [0.9, 0.8])
def test_whole_programs_are_few(layers: int, share: float) -> None:
    budget = int(share * planned(layers, None).peak_memory)
    plan, programs = counted(layers, budget)
    assert plan is not None
    assert plan.peak_memory <= budget
    assert programs <= memory_budget.PROGRAMS + 2  # the last exchange may be corrected once


def test_whole_programs_are_bounded_where_none_fits() -> None:
    plan, programs = counted(4, 1)
    assert plan is None
    assert 0 < programs <= memory_budget.LAST_RESORT


def test_equal_searches_make_equal_programs() -> None:
    budget = int(0.8 * planned(3, None).peak_memory)
    (first, count), (second, again) = counted(3, budget), counted(3, budget)
    assert first is not None
    assert second is not None
    assert (first.listing(), count) == (second.listing(), again)
