"""Pipelined training against one device, by model, schedule, axes inside of stages and entry point; and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.core.errors import ShardingError
from tests.helpers.pipelines import INSIDE, MODELS, Case, Outcome, train

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
FAST = [
    Case("unet", 2, 1, "1f1b", "none", "inside", "automatic"),
    Case("unet", 2, 4, "1f1b", "ddp", "inside", "patterns"),
    Case("unet", 4, 2, "zb_h1", "data x tensor", "inside", "patterns"),
    Case("unet", 2, 2, "zb_v", "none", "around", "patterns"),
    Case("unet", 2, 2, "gpipe", "fsdp", "around", "automatic"),
    Case("unet", 2, 4, "1f1b", "fsdp", "loop", "automatic"),
    Case("unet", 2, 16, "1f1b", "none", "loop", "patterns"),
    Case("mlp", 2, 2, "1f1b", "none", "inside", "code"),
    Case("mlp", 2, 2, "gpipe", "ddp", "around", "code"),
    Case("mlp", 2, 4, "zb_v", "none", "loop", "patterns"),
    Case("mlp", 2, 8, "zb_v", "fsdp", "loop", "automatic"),
    Case("mlp", 4, 2, "1f1b", "tensor", "loop", "code"),
    Case("two_tower", 2, 2, "zb_h1", "tensor", "loop", "automatic"),
    Case("two_tower", 2, 2, "gpipe", "none", "inside", "patterns"),
    Case("encoder_decoder", 2, 2, "gpipe", "data x tensor", "loop", "automatic"),
]


def _many() -> list[Case]:
    """Returns every model with five combinations, which turn through all values of every factor."""
    doors = itertools.cycle(["inside", "around", "loop"])
    named = itertools.cycle(["automatic", "patterns"])
    inside = itertools.cycle(INSIDE)
    sizes = itertools.cycle([(2, 2), (4, 1), (2, 4)])
    return [
        Case(model, *next(sizes), schedule, next(inside), next(doors), next(named))
        for schedule in SCHEDULES
        for model in MODELS
    ]


def _matrix() -> list[Case]:
    """Returns every number of stages with every schedule; rows turn through microbatches, axes and entry points.

    8 stages with 16 microbatches follow, once per schedule.
    """
    counts, doors = itertools.cycle([1, 2, 4, 8, 16]), itertools.cycle(["inside", "around", "loop"])
    inside = itertools.cycle(["none", "ddp", "tensor", "fsdp"])
    rows = [
        Case("mlp", stages, next(counts), schedule, next(inside), next(doors))
        for schedule in SCHEDULES
        for stages in (2, 4, 8)
    ]
    return rows + [Case("mlp", 8, 16, schedule, "none", "inside", "patterns") for schedule in SCHEDULES]


def _check(case: Case) -> Outcome:
    outcome = train(case, rows=max(16, 2 * case.n))
    assert max(outcome.loss, outcome.parameters) <= outcome.tolerance
    return outcome


@pytest.mark.parametrize("case", FAST, ids=str)
def test_equal_to_one_device(case: Case) -> None:
    _check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", _many(), ids=str)
def test_many_are_equal_to_one_device(case: Case) -> None:
    if case.model in ("gpt2", "bert", "t5", "llama"):
        pytest.importorskip("transformers")
    if (case.model, case.schedule, case.named) == ("encoder_decoder", "zb_v", "automatic"):
        # Refused: one of the two parts of the last stage needs a gradient in front of the fragment that makes it.
        with pytest.raises(sl.ShardingError, match="the schedule runs fragments before what they need"):
            _check(case)
        return
    _check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", _matrix(), ids=str)
def test_stages_by_schedules_are_equal_to_one_device(case: Case) -> None:
    _check(case)


@pytest.mark.long
@pytest.mark.parametrize("named", ["code", "patterns", "automatic"])
@pytest.mark.parametrize("inside", ["none", "fsdp"])
def test_values_travel_once(named: str, inside: str) -> None:
    """One activation and one gradient per microbatch; per step the tied weight, its gradient and parts of the norm."""
    n = 4
    staged = _check(Case("mlp", 2, n, "1f1b", inside, "inside", named)).staged
    assert staged is not None
    large = [(m.sender, m.receiver) for m in staged.messages if m.bytes > 8]
    weight = 1
    assert large.count((0, 1)) == n + weight
    assert large.count((1, 0)) == n + weight
    scalars = [(m.sender, m.receiver) for m in staged.messages if m.bytes <= 8]
    assert scalars.count((0, 1)) == 1
    assert scalars.count((1, 0)) == 6, "the norm of each gradient of stage 1"


def test_statistics_of_batches_stay() -> None:
    """Running statistics are those of one device, and no stage waits for them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    reference = [x.clone() for x in model.state_dict().values()]
    one = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    one.load_state_dict(dict(zip(model.state_dict(), reference, strict=True)))
    x = torch.randn(8, 6, dtype=torch.float64)
    for m in range(2):
        one(x[m::2])
    with sl.Mesh(stage=2, stages="stage"):
        staged = sl.parallelize(model, stages={"[01]": 0, "[23]": 1})

        def loss(rows: Tensor) -> Tensor:
            loss = staged(rows).square().sum()
            loss.backward()
            return loss.detach()

        step = sl.jit(lambda x: sl.microbatch(loss, x, n=2))
        step(x)
        messages = step.plan(x).compiled.staged.messages
    for name, value in one.named_buffers():
        other = staged.get_buffer(name)
        torch.testing.assert_close(getattr(other, "full_tensor", lambda other=other: other)(), value)
    assert sum(m.bytes == 4 * 6 * 8 for m in messages) == 2 * 2  # an activation and a gradient per microbatch
    assert not any(m.target is not None and m.bytes == 6 * 8 for m in messages)


def test_evaluation_follows_the_parameters() -> None:
    """A program without gradients runs where training has put the parameters; only activations travel."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    expected = model(x).detach()
    with sl.Mesh(stage=2, stages="stage"):
        model = sl.parallelize(model)

        @sl.jit
        def train(model: nn.Module, x: Tensor) -> Tensor:
            loss = model(x).square().sum()
            loss.backward()
            return loss.detach()

        @sl.jit
        def evaluate(model: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                return model(x)

        train(model, x)
        torch.testing.assert_close(evaluate(model, x).full_tensor(), expected)
        plan = evaluate.plan(model, x)
        messages = plan.compiled.staged.messages
    assert "cut: follows the stages where parameters live" in plan.pipeline.brief()
    assert [(m.sender, m.receiver) for m in messages] == [(0, 1)]


# Refusals ------------------------------------------------------------------------------------------------------------


def _layers(x: Tensor, stages: tuple[int, ...]) -> Tensor:
    for i in stages:
        with sl.stage(i):
            x = torch.tanh(x @ torch.ones(2, 2))
    return x


def _microbatches(stages: tuple[int, ...], n: int = 2, schedule: Any = "1f1b") -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        def loss(rows: Tensor) -> Tensor:
            return torch.func.grad(lambda r: _layers(r, stages).sum())(rows).sum()

        return sl.microbatch(loss, x, n=n, schedule=schedule)

    return step


def _two_calls(x: Tensor) -> Tensor:
    return _microbatches((0, 1), 2)(x) + _microbatches((0, 1), 4)(x)


REFUSED = {
    "stage without work": (_microbatches((0,)), r"stages without work: 1"),
    "backwards": (_microbatches((1, 0)), r"values flow backwards(.|\n)*of stage 0 reads (.|\n)*of stage 1"),
    "rows": (_microbatches((0, 1), 3), r"3 does not divide 8"),
    "left out": (_microbatches((0, 1), 2, [["F0", "F1", "B0"], ["F0", "B0", "F1", "B1"]]), r"B1 of stage 0"),
    "deadlock": (_microbatches((0, 1), 2, [["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]]), r"deadlock(.|\n)*F1"),
    "two calls": (_two_calls, r"several calls of sl.microbatch(.|\n)*n=2(.|\n)*n=4"),
    "parts": (_microbatches((0, 1, 2, 3)), r"'1f1b' runs one part of the model per stage(.|\n)*names 4 stages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    step, message = REFUSED[name]
    with sl.Mesh(stage=2, stages="stage"), pytest.raises(ShardingError, match=message):
        sl.jit(step).plan(torch.ones(8, 2))


def test_too_many_stages() -> None:
    with sl.Mesh(stage=4, stages="stage"):
        model = sl.parallelize(nn.Linear(2, 2))
        with pytest.raises(ShardingError, match=r"4 stages need 3 cuts"):
            model(torch.ones(2, 2))
