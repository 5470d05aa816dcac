"""Dims that nobody annotated take an axis where that pays; and sums that go on are no reason for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.compiler.propagate.solver import propose_axes

Program = Callable[..., Any]
TWO_MOVES = ["all_to_all", "all_to_all"]


def _mixed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Tokens of a cut image are mixed, channel by channel, beside much more work on each of them."""
    x = x + (F.gelu(x.mT @ a) @ a.mT).mT
    return x + F.gelu(x @ b) @ b.mT


def _swept(x: Tensor, a: Tensor) -> Tensor:
    return ((a @ x).sin() @ a).cos()


def _summed(x: Tensor, a: Tensor) -> Tensor:
    return (x @ a).sin()


def _gated(x: Tensor, a: Tensor) -> Tensor:
    """The small one of two cut weights is whole then."""
    return torch.einsum("st,btd->bsd", a, x.sin()) * x


def _convolved(x: Tensor, a: Tensor) -> Tensor:
    n = 2 * x.shape[0]
    y = torch.fft.rfft((x @ a).sin(), n, dim=0)
    return torch.fft.irfft(y * y, n, dim=0)[: x.shape[0]] * x


def _sorted(x: Tensor, a: Tensor) -> Tensor:
    """By much less work than a product next to it."""
    return (x @ a).sort(0).values @ a


def _megatron(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ a) @ b


CASES: dict[str, tuple[Program, tuple[tuple[int, ...], ...], tuple[str, ...], str | None, list[str]]] = {
    "mixed": (_mixed, ((64, 256, 512), (256, 256), (512, 4096)), ("b s@x d", "...", "..."), "b s@x d", TWO_MOVES),
    "swept": (_swept, ((2048, 2048), (2048, 2048)), ("h@x w", "..."), "h@x w", TWO_MOVES),
    "summed": (_summed, ((2048, 2048), (2048, 2048)), ("h w@x", "..."), "h w@x", TWO_MOVES),
    "gated": (_gated, ((64, 256, 512), (256, 256)), ("b s@x d", "s@x t"), "b s@x d", ["all_gather", *TWO_MOVES]),
    "convolved": (_convolved, ((8192, 512), (512, 512)), ("s@x d", "..."), "s@x d", TWO_MOVES),
    "sorted": (_sorted, ((8192, 64), (64, 64)), ("n@x d", "..."), "n@x d", TWO_MOVES),
    "megatron": (_megatron, ((2048, 512), (512, 4096), (4096, 512)), ("n d", "d f@x", "f@x d"), "n d", ["all_reduce"]),
}


@pytest.mark.parametrize("name", CASES)
def test_messages(name: str) -> None:
    program, shapes, specs, out, kinds = CASES[name]
    args = [torch.empty(shape, device="meta") for shape in shapes]
    with sl.Mesh.abstract(x=8):
        plan = sl.jit(program, in_specs=specs, out_specs=out).plan(*args)
    assert sorted(c.kind for c in plan.collectives) == sorted(kinds)


@pytest.mark.parametrize("name", CASES)
def test_values_of_whatever_is_offered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, shapes, specs, out, _ = CASES[name]
    small = [tuple(max(n // 64, 3) if n > 8 else n for n in shape) for shape in shapes]
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, dtype=torch.float64, generator=generator) / shape[0] for shape in small]
    monkeypatch.setattr(propose_axes, "_is_better", lambda *args, **kwargs: True)
    with sl.Mesh(x=3):
        sl.check(program, *args, in_specs=specs, out_specs=out)


def _squared(x: Tensor) -> Tensor:
    """A matrix times itself, turned round, over and over."""
    for _ in range(5):
        a = x @ x.mT
        x = x + (a @ a).sin() @ x
    return x


@pytest.mark.parametrize(
    ("shape", "spec", "kinds"),
    [
        ((256, 256), "m@x _", ["all_gather"]),  # so small that nothing need be shared out
        ((256, 256), "_ n@x", ["all_gather"]),
        ((1024, 1024), "m@x _", ["all_gather"] * 5),  # its product with itself is made alike, of what is there
        ((1024, 4096), "m@x _", ["all_gather"] * 6),
    ],
)
def test_two_dims_of_one_class_contradict_each_other(shape: tuple[int, int], spec: str, kinds: list[str]) -> None:
    """Only one of them can be cut in a product, so the axis may go unused, or elsewhere."""
    with sl.Mesh.abstract({"x": 8}, machine="h100"):
        plan = sl.jit(_squared, in_specs=(spec,), out_specs=spec).plan(
            torch.empty(shape, device="meta", dtype=torch.bfloat16)
        )
    assert sorted(c.kind for c in plan.collectives) == sorted(kinds)
