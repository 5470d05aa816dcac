"""Pending sums that several read: what is made of them is added up instead, where that is less; values stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl


def _merged(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.relu(x @ (w + a @ b))


def _dora(x: Tensor, w: Tensor, a: Tensor, b: Tensor, m: Tensor) -> Tensor:
    v = w + a @ b
    return torch.tanh(x @ (v * (m / v.norm(dim=0))))


def _parts(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A weight in parts, one of them no linear function of what it is made of; its gradient is one, of the weight's."""
    return torch.tanh(x @ torch.cat([a @ b, (a @ b).exp()], 1))


def _grads(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which)


def _clipped(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    """Whoever wants the largest element of the gradient needs the sum."""
    g = sl.grad(lambda w: torch.tanh(x @ w).sum())(w)
    return a.mT @ g, g @ b.mT, g.abs().max()


def _both(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    """One of two sums is returned: its readers have it for nothing."""
    g = sl.grad(lambda w: torch.tanh(x @ w).sum())(w)
    return a.mT @ g, g @ b.mT, g


def _sized(n: int, d: int, f: int, r: int) -> dict[str, tuple[int, ...]]:
    return {"x": (n, d), "w": (d, f), "a": (d, r), "b": (r, f), "m": (f,)}


CASES = {
    _grads(_merged, 2, 3): "xwab",
    _grads(_dora, 2, 3, 4): "xwabm",
    _grads(_parts, 1, 2): "xab",
    _clipped: "xwab",
    _both: "xwab",
}
SPECS = [
    ({"data": 4}, {"x": "n@data d"}),
    ({"data": 4}, {"x": "n@data d", "w": "d@data f"}),
    ({"data": 2, "tensor": 3}, {"x": "n@data d", "w": "d f@tensor", "b": "r f@tensor", "m": "f@tensor"}),
    ({"data": 2, "tensor": 2}, {"x": "n@data d@tensor", "w": "d@tensor f", "a": "d@tensor r"}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", CASES, ids=["merged", "dora", "parts", "clipped", "both"])
@pytest.mark.parametrize(("mesh", "specs"), SPECS)
@pytest.mark.parametrize("sizes", [(64, 24, 36, 2), (13, 29, 31, 3)])
def test_values(
    program: Callable[..., Any], mesh: dict[str, int], specs: dict[str, str], sizes: tuple[int, int, int, int]
) -> None:
    torch.manual_seed(0)
    shapes = _sized(*sizes)
    args = [torch.randn(shapes[name], dtype=torch.float64) for name in CASES[program]]
    with sl.Mesh(mesh):
        sl.check(program, *args, in_specs=tuple(specs.get(name, "...") for name in CASES[program]))


@pytest.mark.parametrize(
    ("program", "summed", "share"), list(zip(CASES, (2, 3, 2, 3, 1), (0.02, 0.02, 0.02, 0.51, 1), strict=True))
)
def test_what_is_added_up(program: Callable[..., Any], summed: int, share: float) -> None:
    """Small gradients in place of a large one; the large one where somebody needs it, in pieces where little is made
    of it."""
    shapes = _sized(4096, 1024, 2048, 8)
    args = [torch.empty(shapes[name], device="meta") for name in CASES[program]]
    with sl.Mesh.abstract(data=8):
        plan = sl.jit(program, in_specs=("n@data d", *["..."] * (len(args) - 1))).plan(*args)
    large = 2 * 7 / 8 * 4 * 1024 * 2048
    assert len(plan.collectives) == summed
    assert plan.comm_bytes <= large * share
