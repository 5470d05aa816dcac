"""Values that share a message: counts, and that no stage waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import shardlib as sl
from shardlib.compiler.program.steps import Compute
from shardlib.compiler.stages.message_groups import SMALL, group_messages
from shardlib.compiler.stages.staged import Staged
from shardlib.ops.transfers import RECEIVE, SEND

FEATURES = 4


class Chain(torch.nn.Module):
    """One linear layer per stage."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(FEATURES, FEATURES) for _ in range(stages)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with sl.stage(i):
                x = layer(x).tanh()
        return x


def staged_step(stages: int, schedule: str, n: int) -> Staged:
    with sl.Mesh(stage=stages, stages="stage"):
        model = sl.parallelize(Chain(stages), strategy="ddp")
        optimizer = torch.optim.Adam(model.parameters())

        @sl.jit
        def step(model, optimizer, x):
            optimizer.zero_grad()
            loss = sl.microbatch(lambda rows: model(rows).square().mean(), x, n=n, schedule=schedule)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        x = torch.ones(8, FEATURES)
        step(model, optimizer, x)  # makes the optimizer's state
        return step.plan(model, optimizer, x).compiled.staged


def messages(staged: Staged) -> dict[int, list[int]]:
    """Numbers of values, by the number of their message."""
    groups: dict[int, list[int]] = {}
    for number, last in group_messages(staged, staged.programs[0]).items():
        groups.setdefault(last, []).append(number)
    return groups


def runs_to_its_end(staged: Staged) -> bool:
    """Runs all stages in turn, with messages that are sent by their last value and read in their first."""
    last = group_messages(staged, staged.programs[0])
    at, sent, progress = [0] * len(staged.programs), set(), True
    while progress:
        progress = False
        for stage, program in enumerate(staged.programs):
            while at[stage] < len(program.steps):
                step = program.steps[at[stage]]
                number = step.args[-1] if isinstance(step, Compute) and step.target in (SEND, RECEIVE) else None
                if number is not None and step.target is RECEIVE and last[number] not in sent:
                    break
                if number is not None and step.target is SEND and last[number] == number:
                    sent.add(number)
                at[stage] += 1
                progress = True
    return at == [len(p.steps) for p in staged.programs]


def test_small_values_that_are_read_in_one_place_share_a_message():
    staged = staged_step(2, "1f1b", 4)
    sizes = Counter(len(numbers) for numbers in messages(staged).values())
    # Alone: 4 activations, 4 gradients and the clip's factor. Together: 2 norms, and each stage's 2 step counters.
    assert sizes == {1: 9, 2: 1}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("stages", [2, 4])
def test_each_value_is_in_one_message_and_no_stage_waits_for_ever(stages, schedule):
    staged = staged_step(stages, schedule, 4)
    groups = messages(staged)
    assert sorted(n for numbers in groups.values() for n in numbers) == [m.number for m in staged.messages]
    for numbers in groups.values():
        assert len({(staged.by_number[n].sender, staged.by_number[n].receiver) for n in numbers}) == 1
    assert runs_to_its_end(staged)


@pytest.mark.parametrize(("rows", "count"), [(8, 1), (SMALL, 2)])
def test_large_values_travel_alone(rows, count):
    with sl.Mesh(stage=2, stages="stage"):

        def fn(x):
            with sl.stage(0):
                left, right = x.sin(), x.cos()
            with sl.stage(1):
                return left * right

        staged = sl.jit(fn).plan(torch.ones(rows)).compiled.staged
    assert len(messages(staged)) == count
