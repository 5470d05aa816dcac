"""Selections along a dim that a view made of several, any of which may be cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardlib as sl

CUTS = ["b k v@x", "b k@x v", "b k@y v@x", "b k@x v@y"]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("n", "k"), [(8, 2), (7, 2), (8, 15), (5, 4), (2, 1), (9, 1)])
def test_the_best_of_two_dims(cut: str, n: int, k: int) -> None:
    def selected(x: Tensor) -> object:
        flat = x.flatten(1)
        return flat.topk(k), flat.topk(k, largest=False), flat.max(1), flat.argmin(1), flat.argmax(1, True)

    x = torch.randn(3, 4, n, dtype=torch.float64)
    with sl.Mesh(x=4, y=2):
        sl.check(selected, x, in_specs=(cut,))
        sl.check(lambda x: (x.flatten(1).topk(k)[0] ** 2).sum() + x.flatten(1).amax(1).sum(), x, in_specs=(cut,))


@pytest.mark.parametrize("cut", CUTS)
def test_no_row_is_gathered(cut: str) -> None:
    with sl.Mesh.abstract(x=4, y=2):
        plan = sl.jit(lambda x: x.flatten(1).topk(2), in_specs=(cut,)).plan(torch.empty(3, 4, 1024, device="meta"))
    assert plan.comm_bytes <= 2 * 3 * 8 * 12


@pytest.mark.parametrize("cut", CUTS)
def test_the_first_of_equals_counts(cut: str) -> None:
    x = torch.randint(2, (3, 4, 6)).double()
    with sl.Mesh(x=4, y=2):
        sl.check(lambda x: (x.flatten(1).argmax(1), x.flatten(1).min(1), x.argmax()), x, in_specs=(cut,))
