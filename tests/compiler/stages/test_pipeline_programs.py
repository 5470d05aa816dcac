"""Pipelined programs that are no training steps, against one device; and numbers, draws and messages on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.compiler.stages.merge import merge
from shardlib.ops.transfers import RECEIVE
from tests.helpers.ranks import run_ranks

STAGES = {"[01]": 0, "[234]": 1}


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)


def assert_equal(ours: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a.full_tensor() if isinstance(a, sl.ShardedTensor) else a, b, rtol=1e-12, atol=1e-12)


def test_gradients_go_back_through_microbatches_from_outside() -> None:
    """A view of the batch belongs to no stage: it runs in the forward pass of one, and in the backward pass of all."""
    model = make()
    want = model(batch())
    want.sum().backward()
    with sl.Mesh(stage=2, data=2, stages="stage"):
        ours = sl.parallelize(make(), strategy="ddp", stages=STAGES)
        out = sl.jit(lambda m, x: sl.microbatch(m, x, n=2, reduce="cat"))(ours, batch())
        out.sum().backward()
    assert_equal(
        [out.detach(), *(p.grad for p in ours.parameters())], [want.detach(), *(p.grad for p in model.parameters())]
    )


def test_code_behind_the_gradients_of_a_microbatch_runs_with_them() -> None:
    def gradients(model: nn.Module, rows: Tensor) -> list[Tensor]:
        taken = torch.autograd.grad(model(rows).square().mean(), list(model.parameters()))
        return [g / (1 + g.abs().max()) for g in taken]

    parts = [gradients(make(), batch()[m::4]) for m in range(4)]
    with sl.Mesh(stage=2, stages="stage"):
        ours = sl.parallelize(make(), strategy="ddp", stages=STAGES)
        step = sl.jit(lambda m, x: sl.microbatch(lambda rows: gradients(m, rows), x, n=4, schedule="1f1b"))
        assert_equal(step(ours, batch()), [sum(gs) / 4 for gs in zip(*parts, strict=True)])


def test_a_model_without_stages_is_cut_for_evaluation() -> None:
    with sl.Mesh(stage=2, stages="stage"), torch.no_grad():
        assert_equal([sl.parallelize(make(), strategy="ddp")(batch())], [make()(batch())])


def three_stages(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Stage 0 sends small values to both others, and they lie next to each other."""
    with sl.stage(0):
        h = x @ a
        k = h.sum(0)
    with sl.stage(1):
        y = (h + k) @ b
    with sl.stage(2):
        return (h - k) + y @ c


def test_a_stage_that_receives_messages_in_another_order_is_refused() -> None:
    with sl.Mesh(stage=3, stages="stage"):
        plan = sl.jit(three_stages).plan(torch.ones(4, 3), torch.ones(3, 3), torch.ones(3, 2), torch.ones(2, 3))
    staged = plan.compiled.staged
    assert staged is not None
    steps = list(staged.programs[1].steps)
    first, second = (i for i, s in enumerate(steps) if getattr(s, "target", None) is RECEIVE)
    steps[first], steps[second] = steps[second], steps[first]
    programs = staged.programs[0], replace(staged.programs[1], steps=tuple(steps)), staged.programs[2]
    with pytest.raises(sl.ShardingError, match=r"of stage 1 waits for .* of F0 of stage 0"):
        merge(replace(staged, programs=programs))


def send_to_two() -> float:
    torch.manual_seed(0)
    tensors = torch.randn(4, 3), torch.randn(3, 3), torch.randn(3, 2), torch.randn(2, 3)
    with sl.Mesh(stage=3, stages="stage"):
        return float((sl.jit(three_stages)(*tensors).full_tensor() - three_stages(*tensors)).abs().max())


def scale(x: Tensor, a: Tensor, b: Tensor, s: float) -> Tensor:
    with sl.stage(0):
        h = torch.relu(x @ a)
    with sl.stage(1):
        return (h @ b) * s


def read_a_number_on_one_stage() -> list[float]:
    tensors = torch.randn(4, 3), torch.randn(3, 3), torch.randn(3, 2)
    with sl.Mesh(stage=2, stages="stage"):
        step = sl.jit(scale)
        return [float((step(*tensors, s).full_tensor() - scale(*tensors, s)).abs().max()) for s in (2.0, 3.0)]


def drop(x: Tensor) -> Tensor:
    with sl.stage(0):
        h = torch.nn.functional.dropout(x, 0.5)
    with sl.stage(1):
        return h.sum()


def draw_behind_a_call() -> list[float]:
    with sl.Mesh(stage=2, stages="stage"):
        sl.jit(drop)(torch.ones(4, 3))
    return torch.rand(2).tolist()


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(("job", "ranks"), [(send_to_two, 3), (read_a_number_on_one_stage, 2), (draw_behind_a_call, 2)])
def test_ranks_agree(job: Callable[[], object], ranks: int) -> None:
    results = run_ranks(job, ranks, timeout=400)
    assert results == [results[0]] * ranks
    if job is not draw_behind_a_call:
        assert torch.tensor(results[0]).max() < 1e-5
