"""`sl.microbatch` against the whole batch: values, gradients inside and around it, messages, and bad arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.core.errors import ShardingError

MESHES = [{"data": 2}, {"data": 2, "tensor": 2}]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 4)).double()


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, n, dtype=torch.float64, generator=generator) for n in (6, 4))  # type: ignore[return-value]


def loss_of(model: nn.Module, pair: Any) -> torch.Tensor:
    return (model(pair[0]) - pair[1]).square().mean()


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("reduce", ["mean", "sum", "cat"])
def test_results(model: nn.Module, n: int, reduce: Any) -> None:
    x, _ = batch()

    def fn(rows: dict[str, Any]) -> dict[str, Any]:
        return {"out": model(rows["x"]) * rows["scale"], "rows": rows["x"].shape[0], "nothing": None}

    out = sl.microbatch(fn, {"x": x, "scale": 3.0}, n=n, reduce=reduce)
    parts = [3 * model(x[m::n]) for m in range(n)]
    whole = {"mean": sum(parts) / n, "sum": sum(parts), "cat": 3 * model(x)}[reduce]
    torch.testing.assert_close(out["out"], whole)
    assert out["nothing"] is None
    assert torch.as_tensor(out["rows"]).double().sum() == (8 / n if reduce == "mean" else 8)


def test_scalars_are_stacked() -> None:
    assert sl.microbatch(lambda x: x.sum(), torch.arange(4.0), n=2, reduce="cat").tolist() == [2.0, 4.0]


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_are_reduced_once(model: nn.Module, axes: dict[str, int], inside: bool) -> None:
    x, y = batch()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss_of(model, (x, y)), parameters)

    def gradients(x: torch.Tensor, y: torch.Tensor) -> Any:
        if inside:
            return sl.microbatch(lambda pair: torch.autograd.grad(loss_of(model, pair), parameters), (x, y), n=4)
        return torch.autograd.grad(sl.microbatch(lambda pair: loss_of(model, pair), (x, y), n=4), parameters)

    with sl.Mesh(axes):
        step = sl.jit(gradients, in_specs="b@data _")
        plan = step.plan(x, y)
        for actual, whole in zip(step(x, y), expected, strict=True):
            torch.testing.assert_close(actual.full_tensor(), whole)
    reductions = [c for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter")]
    assert len(reductions) == len(parameters), "microbatches are added up on each device first"
    assert not [c for c in plan.collectives if c not in reductions and "b@data" in c.reason], (
        "no row of the batch moves"
    )


@pytest.mark.long
def test_training_steps(model: nn.Module) -> None:
    x, y = batch()
    losses: dict[int, list[float]] = {}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for n in (1, 4):
        model.load_state_dict(state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def train(x: torch.Tensor, y: torch.Tensor, n: int = n, optimizer: Any = optimizer) -> torch.Tensor:
            loss = sl.microbatch(lambda pair: loss_of(model, pair), (x, y), n=n)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        with sl.Mesh(data=2, tensor=2):
            step = sl.jit(train, in_specs="b@data _")
            losses[n] = [float(step(x, y)) for _ in range(3)]
    assert losses[4] == pytest.approx(losses[1], rel=1e-12)


BAD = {
    "n does not divide": (
        {"n": 3},
        r"(?s)\* batch\[0\] of shape \[8, 6\]: 3 does not divide 8.*\* batch\[1\] of shape",
    ),
    "n": ({"n": 0}, r"n=0 is no number of microbatches"),
    "reduce": ({"reduce": "max"}, r"reduce='max' is none of 'mean', 'sum', 'cat'"),
    "schedule": ({"schedule": "2f2b"}, r"schedule='2f2b' is none of 'gpipe', '1f1b'"),
    "unequal rows": (
        {"batch": (torch.ones(8, 2), torch.ones(6, 2))},
        r"(?s)\* batch\[0\] of shape \[8, 2\] has 8 rows.*\* batch\[1\] of shape \[6, 2\] has 6 rows",
    ),
    "results of other shapes": (
        {"fn": lambda pair: pair[0][: 1 + int(pair[0][0, 0] > 0)]},
        r"one microbatch has a result of shape \[2, 6\], another one of \[1, 6\]",
    ),
    "no tensor": ({"batch": (1, 2)}, r"batch has no tensor"),
    "no dim": ({"batch": torch.tensor(1.0)}, r"batch has no dim"),
    "other structures": ({"fn": lambda pair: [0] * int(pair[0][0, 0] > 0)}, r"(?s)microbatch 0: .*microbatch 1: "),
    "other objects": (
        {"fn": lambda pair: str(float(pair[0][0, 0]))},
        r"combine results that are no tensors or numbers",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    other, text = BAD[case]
    x, y = batch()
    x[0], x[1] = 1, -1
    with pytest.raises(ShardingError, match=text):
        sl.microbatch(**{"fn": lambda pair: pair[0].sum(), "batch": (x, y), "n": 2, **other})
