"""How long planning may take, what it says meanwhile, and that it can be stopped."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.compiler import pipeline
from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.propagate.solver.effort import Effort
from shardlib.compiler.propagate.solver.search import Search
from shardlib.core import progress


class Mixed(nn.Module):
    """Unlike layers, whose plan takes some search."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 16), (16, 12)))
        self.norms = nn.ModuleList(nn.GroupNorm(4, n) for n in (8, 16, 12))
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        tokens = x.flatten(2).mT
        mixed, weights = self.attention(tokens, tokens, tokens)
        return self.head(mixed.mean(1)) + weights.square().mean()


def step(model: Mixed, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


@pytest.fixture
def placed() -> Iterator[tuple[Mixed, torch.Tensor]]:
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(4, 3, 6, 6)
    with sl.Mesh(data=2, tensor=2) as mesh:
        sl.parallelize(model, sl.suggest(model, mesh, x), strategy="fsdp")
        yield model, x


@pytest.mark.long
def test_every_effort_gives_the_same_values(placed: Any) -> None:
    model, x = placed
    plans = {p: sl.jit(step, planning=p).plan(model, x) for p in ("fast", 1e-3, None, "best")}
    again = sl.jit(step, planning="best").plan(model, x)
    assert again.compiled.search.effort == plans["best"].compiled.search.effort
    losses = [sl.jit(step, planning=p)(model, x).full_tensor() for p in plans]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0])
    efforts = {p: plan.compiled.search.effort for p, plan in plans.items()}
    assert efforts["fast"].stopped
    assert efforts[1e-3].stopped
    assert not efforts["best"].stopped
    assert efforts["fast"].spent <= efforts[1e-3].spent <= efforts["best"].spent
    assert plans["best"].comm_bytes < plans["fast"].comm_bytes


def test_moves_of_one_axis_take_no_effort() -> None:
    def losses(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return sum(((x @ w).sin().sum() + (x @ w).amax(1).sum() for w in weights), torch.zeros(()))

    weights = [torch.ones(64, 64 + 2 * i) for i in range(4)]
    with sl.Mesh.abstract(a=2, b=2, c=2):
        step = sl.jit(sl.grad(losses, (0, 1, 2, 3, 4)), in_specs=("p@a q@b",) + ("k@c n@a",) * 4, planning="fast")
        plan = step.plan(torch.ones(64, 64), *weights)
    assert plan.compiled.search.effort.stopped
    assert plan.comm_bytes == 51_712, "the first choice of every unit sends 83,328"


@pytest.mark.long
def test_a_module_has_an_effort_of_its_own(placed: Any) -> None:
    model, x = placed
    with sl.current_mesh() as mesh:
        sl.parallelize(model, sl.suggest(model, mesh, x), strategy="fsdp", planning="fast")
        assert model.forward.plan(x).compiled.search.effort.limit == 0
        sl.parallelize(model, sl.suggest(model, mesh, x), strategy="fsdp", remat="full")
        assert model.forward.plan(x).compiled.search.effort.limit == 0


@pytest.mark.long
@pytest.mark.parametrize("count", [65, 140])
def test_a_value_with_many_unlike_readers(count: int) -> None:
    def heads(x: torch.Tensor) -> list[torch.Tensor]:
        return [x @ torch.ones(4, i + 1) for i in range(count)]

    x = torch.randn(4, 4)
    with sl.Mesh(data=2):
        results = sl.jit(heads, in_specs=("a@data _",))(x)
    for result, expected in zip(results, heads(x), strict=True):
        torch.testing.assert_close(result.full_tensor(), expected)


@pytest.mark.long
def test_a_sum_of_many_unlike_terms() -> None:
    def total(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return sum((x @ w).sin().sum() for w in weights)  # type: ignore[return-value]

    weights = [torch.randn(4, i + 1) for i in range(70)]
    gradients = sl.grad(total, tuple(range(71)))
    x = torch.randn(4, 4)
    with sl.Mesh(data=2):
        results = sl.jit(gradients, in_specs=("a@data _",) + ("...",) * 70)(x, *weights)
    for result, expected in zip(results, gradients(x, *weights), strict=True):
        torch.testing.assert_close(result.full_tensor(), expected)


@pytest.mark.parametrize("planning", ["fast", "best"])
def test_the_same_message_brings_two_results(planning: str) -> None:
    def places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.max(0)[0], x.argmax(0), x.argmax(0), x.max(0)[1]

    x = torch.randn(4, 4)
    with sl.Mesh(data=2):
        results = sl.jit(places, in_specs=("a@data _",), planning=planning)(x)
    for result, expected in zip(results, places(x), strict=True):
        assert torch.equal(result.full_tensor(), expected)


@pytest.mark.long
def test_a_plan_says_that_the_search_stopped(placed: Any) -> None:
    text = sl.jit(step, planning="fast").plan(*placed).full
    assert "the search stopped after 0" in text
    assert 'planning="best" goes on, see plan.lower_bound' in text
    assert "the search stopped" not in sl.jit(step, planning="best").plan(*placed).full


@pytest.mark.parametrize("planning", ["slow", 0, -1.0, float("nan"), True, [1], "3"])
def test_what_is_no_effort(planning: Any) -> None:
    with pytest.raises(sl.ShardingError, match=r"planning=.* does not say how long the search for a plan goes on") as e:
        sl.jit(step, planning=planning)
    assert 'planning="fast", or planning=10' in str(e.value)


def test_inside_another_function() -> None:
    inner = sl.jit(lambda x: 2 * x, planning="best")
    with sl.Mesh(data=2), pytest.raises(sl.ShardingError, match=r"says planning='best'"):
        sl.jit(lambda x: inner(x))(torch.ones(4))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_while_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "_AFTER", 0.01)
    monkeypatch.setattr(progress, "_EVERY", 0.01)

    def slow(x: torch.Tensor) -> torch.Tensor:
        end = time.monotonic() + 100
        while terminal.getvalue().count("\r") < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return 2 * x

    with sl.Mesh(data=2):
        plan = sl.jit(slow).plan
        plan(torch.ones(4))
    text = terminal.getvalue()
    assert text.count("\n") == 1
    assert text.startswith("\rshardlib plans slow: trace, 0 s\rshardlib plans slow: ")


def test_nothing_where_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with sl.Mesh(data=2):
        sl.jit(lambda x: 2 * x).plan(torch.ones(4))
    assert terminal.getvalue() == ""


@pytest.mark.long
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(nn.Linear, "forward"), (Search, "improve"), (Builder, "compute"), (pipeline, "_finish")],
    ids=["trace", "propagate", "lower", "passes"],
)
def test_interrupted(placed: Any, owner: Any, name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is interrupted, the next plan is as if it had not been. (In torch's own code, Ctrl-C may abort.)"""

    def plan() -> Any:
        return sl.jit(step).plan(*placed)

    calls, function = [], getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == last:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    last = 0
    monkeypatch.setattr(owner, name, interrupted)
    expected = plan()
    last = len(calls) + 1 + int(share * len(calls))
    with pytest.raises(KeyboardInterrupt):
        plan()
    assert plan().full == expected.full


def test_the_limit_grows_with_the_program() -> None:
    limits = [Effort.limited(*case).limit for case in (("fast", 100), (None, 100), (None, 2000))]
    assert limits == [0.0, 4.0, 10.0]
