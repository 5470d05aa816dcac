"""Gradients themselves, not parameters after a step: fp64 and fp32, on three meshes, virtual and on four processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib.core.context import single_device
from tests.helpers.ranks import run_ranks
from tests.models import causal_lm, gpt2, llama, w1

SMALL = w1.Config(layers=1, d=64, heads=8, kv_heads=4, ff=96, vocab=128, batch=8, seq=16)
TENSOR = {"batch": "data", "heads": "tensor", "kv": "tensor", "ff": "tensor", "vocab": "tensor"}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "8": ({"data": 8}, {"batch": "data"}),
    "2x4": ({"data": 2, "tensor": 4}, TENSOR),
    "2x2x2": ({"pod": 2, "data": 2, "tensor": 2}, {**TENSOR, "embed": "pod"}),
    "2x2": ({"data": 2, "tensor": 2}, TENSOR),
}  # fmt: skip
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def programs(model: str, dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    """A loss in `dtype`, its arguments, and their specs."""
    if model == "w1":
        config = SMALL.with_(dtype=dtype)
        specs = (w1.specs(config), "batch _", "batch _")
        return (lambda *a: w1.loss(*a, config)), (w1.init(config), *w1.batch(config)), specs
    lm = {"gpt2": gpt2, "llama": llama}[model].build(layers=1)
    tokens = causal_lm.tokens(lm.module.config.vocab_size, 8, 16)
    params = {name: p.to(dtype) for name, p in lm.params().items()}
    return lm.loss, (params, tokens), (lm.specs(), "batch _")


def worst_error(model: str, mesh: str, dtype: torch.dtype) -> float:
    """The largest error of the loss and of every gradient, relative to the tensor's largest element."""
    loss, args, specs = programs(model, dtype)
    axes, rules = MESHES[mesh]
    with sl.Mesh(axes, rules=rules):
        found = pytree.tree_leaves(sl.jit(sl.value_and_grad(loss), in_specs=specs)(*args))
        found = [x.full_tensor() for x in found]
    with single_device():
        expected = pytree.tree_leaves(sl.value_and_grad(loss)(*args))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["f64", "f32"])
@pytest.mark.parametrize("mesh", ["8", "2x4", "2x2x2"])
@pytest.mark.parametrize("model", ["w1", "gpt2", "llama"])
def test_virtual(model: str, mesh: str, dtype: torch.dtype) -> None:
    assert worst_error(model, mesh, dtype) <= TOLERANCE[dtype]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("model", ["w1", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gpt2", "llama"))])
def test_ranks(model: str, dtype: torch.dtype) -> None:
    assert max(run_ranks(worst_error, 4, model, "2x2", dtype)) <= TOLERANCE[dtype]
