"""Rows of own groups: what may go on with them, and what asks for the whole sum. Small whole numbers: no rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl

S, K, E = 16, 16, 4
ENDS = torch.tensor([3, 3, 11, 16], dtype=torch.int32)
OTHER = torch.tensor([8, 9, 10, 14], dtype=torch.int32)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, ends)


def chain(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return mm((mm(x, w, ends) + 1).relu() % 2, w, ends)


PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {  # with the collectives of the plan
    "one product": (mm, 1),
    "two, and what keeps no zeros between": (chain, 1),
    "bias by row": (lambda x, w, ends: mm(mm(x, w, ends) + x, w, ends), 1),
    "both are results": (lambda x, w, ends: (h := mm(x, w, ends), mm(h % 2, w, ends)), 2),
    "views between": (lambda x, w, ends: mm(mm(x, w, ends).view(S, 2, 8).mT.reshape(S, K) % 2, w, ends), 1),
    "halves between": (lambda x, w, ends: mm(torch.cat(mm(x, w, ends).chunk(2, 1)[::-1], 1) % 2, w, ends), 1),
    "a sum of every row": (lambda x, w, ends: mm(x, w, ends).sum(1), 1),
    "a sum of all rows": (lambda x, w, ends: mm(x, w, ends).sum(0), 1),
    "rows in another order": (lambda x, w, ends: mm(x, w, ends)[torch.arange(S).flip(0)], 1),
    "rows as columns": (lambda x, w, ends: (h := mm(x, w, ends)) + h.t(), 1),
    "rows in other groups": (lambda x, w, ends: mm(mm(x, w, ends) % 2, w, (ends + 1).clamp(max=S)), 2),
    "products of two groupings": (
        lambda x, w, ends: mm(x, w, ends) % 3 + mm(x, w, (ends + 1).clamp(max=S)) % 3, 2
    ),
    "rows sorted": (lambda x, w, ends: mm(x, w, ends).sort(0).values, 1),
    "rows summed up in order": (lambda x, w, ends: (mm(x, w, ends) % 2).cumsum(0), 1),
    "a mask": (lambda x, w, ends: mm(x, w, ends) > 0, 1),
    "a mask between": (lambda x, w, ends: (h := mm(x, w, ends)).where(h > 0, 1.0), 1),
    "positions": (lambda x, w, ends: x[mm(x, w, ends).long().clamp(0, 3)], 1),
    "another shape of rows": (lambda x, w, ends: mm(x, w, ends).view(2, 8, K) % 2, 1),
    "rows that are a column of a table": (lambda x, w, ends: (mm(x, w, ends) % 2) @ x, 1),
}  # fmt: skip


@pytest.mark.sampled(17)
@pytest.mark.parametrize("mesh", [{"e": 2}, {"e": 4}, {"e": 3}, {"a": 2, "e": 2}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_on_one_device(name: str, mesh: dict[str, int]) -> None:
    program, _ = PROGRAMS[name]
    for ends in (ENDS, OTHER + 2):
        args = numbers(S, K), numbers(E, K, K, seed=1), ends
        expected = program(*args)
        for spec in ("groups@e _ _", "groups@e _ n@a", "groups@e k@a _", "groups@(a e) _ _")[: 4 if "a" in mesh else 1]:
            for rows in ("...", "s@a _", "_ k@a")[: 3 if "a" in mesh and "a" not in spec else 1]:
                with sl.Mesh(mesh):
                    found = sl.jit(program, in_specs=(rows, spec, "..."))(*args)
                pairs = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
                for want, x in pairs:
                    assert torch.equal(want, x.full_tensor()), (spec, rows)


@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_are_taken_once(name: str) -> None:
    program, collectives = PROGRAMS[name]
    with sl.Mesh(e=4):
        plan = sl.jit(program, in_specs=("...", "groups@e _ _", "...")).plan(numbers(S, K), numbers(E, K, K), ENDS)
    assert len(plan.collectives) == collectives, plan


@pytest.mark.peer
@pytest.mark.parametrize("n", [2, 3, 4])
def test_rows_behind_the_last_group(n: int) -> None:
    pytest.importorskip("transformers.integrations.moe")
    product = torch.ops.transformers.grouped_mm_fallback

    def program(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return product(x, w, ends) + 1

    args = numbers(S, K), numbers(E, K, K, seed=1), OTHER
    with sl.Mesh(e=n):
        found = sl.jit(program, in_specs=("...", "groups@e _ _", "..."))(*args)
    assert torch.equal(program(*args), found.full_tensor())


@pytest.mark.parametrize("spec", ["groups@e _ _", "groups@e _ n@a", "groups@(a e) _ _"])
def test_gradients(spec: str) -> None:
    def grads(x: Tensor, w: Tensor, ends: Tensor) -> Any:
        return sl.grad(lambda x, w: (mm(mm(x, w, ends).relu(), w, ends) * x).sum(), (0, 1))(x, w)

    args = (
        numbers(S, K) * (torch.arange(S)[:, None] % 3 == 0),
        numbers(E, K, K, seed=1) * (torch.arange(K) % 4 == 0),
        ENDS,
    )
    expected = grads(*args)
    with sl.Mesh(a=2, e=2):
        found = sl.jit(grads, in_specs=("...", spec, "..."))(*args)
    for want, x in zip(expected, found, strict=True):
        assert torch.equal(want, x.full_tensor())
