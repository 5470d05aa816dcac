"""Weights that are gathered once for all microbatches, and jitted functions of tensors on several stages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.core.errors import ShardingError


@pytest.mark.long
def test_a_gather_for_the_backward_pass_serves_the_microbatch_that_runs_first() -> None:
    """Autograd begins with the last microbatch, and 1F1B with the first one. The call is outside the mesh."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), torch.randn(8, 6)
    plain = copy.deepcopy(model)
    (plain(x) - x).square().mean().backward()
    with sl.Mesh(stage=2, data=2, stages="stage"):
        sl.parallelize(model, strategy="fsdp", stages={"0": 0, "2": 1})

    def step(model: nn.Module, x: Tensor) -> None:
        sl.microbatch(lambda rows: (model(rows) - rows).square().mean(), x, n=2, schedule="1f1b").backward()

    sl.jit(step)(model, x)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-6)


def test_tensors_on_stages_of_two_meshes_name_no_mesh() -> None:
    """Tensors on several stages of one mesh name the whole mesh; those of two meshes are refused."""
    one, other = sl.Mesh(stage=2, stages="stage"), sl.Mesh(stage=2, data=2, stages="stage")
    with one.at(stage=0):
        x = sl.shard(torch.ones(2), "a")
    with other.at(stage=1):
        y = sl.shard(torch.ones(2), "a")
    with pytest.raises(ShardingError, match=r"called outside any mesh:\n.*stage=2, stages=.*\n.*data=2"):
        sl.jit(torch.add)(x, y)
