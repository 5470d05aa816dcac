"""Pipelines on ranks: the numbers of one device, and errors that name ranks."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.ops.collectives.p2p import Mailbox
from tests.helpers.ranks import Pool, RankError, only, run_ranks

pytestmark = pytest.mark.ranks
VOCABULARY, WIDTH, STEPS, BATCH = 16, 8, 2, 8


class Net(torch.nn.Module):
    """An embedding, residual layers of which each stage has one, and a head."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)) for _ in range(stages)]
        )
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with sl.stage(0):
            x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            with sl.stage(i):
                x = x + layer(x)
        with sl.stage(len(self.layers) - 1):
            return self.head(x)


def make(stages: int) -> tuple[Net, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    return Net(stages).double(), [torch.randint(VOCABULARY, (BATCH, 3), generator=generator) for _ in range(STEPS)]


def loss_of(model, tokens):
    out = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def update(model, optimizer, loss):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def one_device(stages: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of plain torch."""
    model, batches = make(stages)
    optimizer, losses = adam(model), []
    for tokens in batches:
        optimizer.zero_grad()
        losses.append(update(model, optimizer, loss_of(model, tokens)).item())
    return losses, [p.detach() for p in model.parameters()]


def train(door: str, stages: int, data: int, strategy: str, schedule: str) -> tuple[list[float], float]:
    """On a rank: the losses, and the largest error of a parameter."""
    model, batches = make(stages)
    expected, parameters = one_device(stages)
    with sl.Mesh(stage=stages, data=data, stages="stage"):
        model = sl.parallelize(model, strategy=strategy)
        optimizer = adam(model)

        def step(model, optimizer, tokens):
            optimizer.zero_grad()
            loss = sl.microbatch(lambda rows: loss_of(model, rows), tokens, n=4, schedule=schedule)
            return update(model, optimizer, loss)

        run = sl.jit(step) if door == "jit" else step
        losses = [run(model, optimizer, tokens) for tokens in batches]
        values = [loss.item() for loss in losses]
        assert values == [loss.full_tensor().item() for loss in losses]
        error = max(
            (p.full_tensor() - q).abs().max().item() for p, q in zip(model.parameters(), parameters, strict=True)
        )
        assert max(abs(a - b) for a, b in zip(values, expected, strict=True)) < 1e-10
        print(losses)
        return values, error


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("door", ["jit", "loop"])
@pytest.mark.parametrize(
    ("stages", "data", "strategy", "schedule"),
    [(2, 1, "ddp", "gpipe"), (2, 2, "fsdp", "1f1b"), (4, 1, "ddp", "zb_h1")],
)
def test_training_on_ranks_is_that_of_one_device(stages, data, strategy, schedule, door, transport, monkeypatch):
    monkeypatch.setenv("SHARDLIB_OPS", "torch" if transport == "gloo" else "")
    _, error = only(run_ranks(train, stages * data, door, stages, data, strategy, schedule, timeout=400))
    assert error < 1e-10


def in_two_stages(x):
    with sl.stage(0):
        x = x * 2
    with sl.stage(1):
        return (x + 1).sum()


def seeded(kind: str) -> None:
    torch.manual_seed(dist.get_rank() // 2)
    with sl.Mesh(stage=2, data=2, stages="stage"):
        if kind == "module":
            sl.parallelize(Net(2), strategy="ddp")
        else:
            sl.jit(lambda x: sl.microbatch(in_two_stages, x, n=2))(torch.randn(4, WIDTH))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("module", "ranks 0 and 1 have one value, ranks 2 and 3 have another"),
        ("tensor", "ranks 0 and 1 have one value, ranks 2 and 3 have another"),
    ],
)
def test_stages_with_different_seeds_are_refused(kind, text):
    with pytest.raises(RankError) as caught:
        run_ranks(seeded, 4, kind, timeout=400)
    assert len(caught.value.errors) == 4
    for error in caught.value.errors.values():
        assert isinstance(error, sl.ShardingError)
        assert text in str(error)


def die_at_message(stages: int, data: int, victim: int, count: int) -> None:
    if dist.get_rank() == victim:
        receive, seen = Mailbox.receive, iter(range(count))

        def receive_or_die(mailbox: Mailbox) -> torch.Tensor:
            if next(seen, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return receive(mailbox)

        Mailbox.receive = receive_or_die  # type: ignore[method-assign]
    train("jit", stages, data, "ddp", "1f1b")


@pytest.mark.long
@pytest.mark.parametrize(
    ("stages", "data", "victim", "count", "transport"),
    [(2, 2, 0, 1, "shm"), (2, 2, 3, 5, "gloo"), (4, 1, 2, 3, "shm"), (4, 1, 3, 0, "shm")],
)
def test_a_rank_that_dies_in_a_step_is_named_by_all_others(stages, data, victim, count, transport, monkeypatch):
    monkeypatch.setenv("SHARDLIB_OPS", "torch" if transport == "gloo" else "")
    with closing(Pool(stages * data)) as pool, pytest.raises(RankError) as caught:
        pool.run(die_at_message, stages, data, victim, count, timeout=400)
    errors = caught.value.errors
    assert errors.pop(victim) == f"died with exit code {-signal.SIGKILL}"
    assert len(errors) == stages * data - 1
    for error in errors.values():
        assert isinstance(error, sl.ShardingError)
        assert f"rank {victim} is dead: its process is gone" in str(error)


def skip_a_step() -> None:
    """Stage 1 leaves out one of two steps, which are at two lines."""
    with sl.Mesh(stage=2, stages="stage"):
        step, x = sl.jit(in_two_stages), torch.ones(4)
        step(x)
        if dist.get_rank() == 0:
            step(x)
        step(x)
        dist.barrier()


def test_a_stage_that_leaves_out_a_step_is_out_of_step():
    with closing(Pool(2)) as pool, pytest.raises(RankError) as caught:
        pool.run(skip_a_step, timeout=400)
    errors = [str(e) for e in caught.value.errors.values() if isinstance(e, sl.ShardingError)]
    assert any("out of step" in e or "different" in e for e in errors), errors
