"""Fourier transforms of what is cut compute what one device computes, there, back, and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fft import fftn, ifftn, irfftn, rfftn

import shardlib as sl
from tests.validation.best.grids.transforms import mixing, poisson, split_steps

PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "there and back": (poisson, (8, 6, 10), (8, 6, 10)),
    "uneven": (poisson, (7, 5, 9), (5, 9)),
    "steps": (split_steps, (4, 6, 8), (4, 6, 8)),
    "back and there": (lambda x, k: fftn(ifftn(x) * k, norm="ortho").real, (8, 6, 4), (8, 6, 4)),
    "real": (lambda x, k: irfftn(rfftn(x) * k, s=x.shape), (6, 5, 8), (6, 5, 5)),
    "mixed": (mixing, (4, 2, 6, 4, 5), (2, 3, 6, 4, 5)),
    "two that meet": (lambda x, k: ifftn(fftn(x) * fftn(k, dim=(1, 2))).real, (6, 4, 8), (6, 4, 8)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spec", ["{}@x ...", "... {}@y", "{}@x _ {}@y ...", "_ {}@(x y) ..."])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name: str, spec: str) -> None:
    program, *shapes = PROGRAMS[name]
    x, k = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    both = sl.grad(lambda x, k: program(x, k).sin().sum(), (0, 1))
    want = program(x, k), *both(x, k)
    with sl.Mesh(x=2, y=2):
        cut = sl.shard(x, spec.format(*"ab"))
        for at, found in enumerate((sl.jit(program)(cut, k), *sl.jit(both)(cut, k))):
            torch.testing.assert_close(found.full_tensor(), want[at], rtol=1e-12, atol=1e-12)
