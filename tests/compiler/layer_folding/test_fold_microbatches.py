"""Microbatches, and layers of several stages, are folded like other layers: programs are those of planning all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl

from .test_layer_folding import compare, folding

D = 256


class Deep(nn.Module):
    """Layers with an embedding whose weight the head shares, and dropout."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(32, D)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 2 * D), nn.Tanh(), nn.Dropout(0.1), nn.Linear(2 * D, D)) for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy((x @ self.table.weight.mT).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(
    ("layers", "n", "inside", "stages", "left_out"),
    [
        (2, 10, False, 2, [3]),  # microbatches
        (12, 2, False, 2, [5]),  # layers of both stages
        (2, 10, True, 2, [2]),
        (2, 10, False, 1, [2]),
        pytest.param(12, 10, False, 2, [5, 3], marks=pytest.mark.long),  # microbatches, and layers in what is left
        pytest.param(12, 10, True, 4, [5, 2], marks=pytest.mark.long),
    ],
)
def test_microbatches(layers: int, n: int, inside: bool, stages: int, left_out: list[int]) -> None:
    mesh = sl.Mesh.abstract(stage=stages, data=2, stages="stage") if stages > 1 else sl.Mesh.abstract(data=2)
    with torch.device("meta"):
        model = Deep(layers)
    named = {f"blocks.{i}": i * stages // layers for i in range(layers)} | {"table": 0}
    with mesh:
        sl.parallelize(model, strategy="fsdp", stages=named if stages > 1 else None)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    tokens = torch.empty(4 * n, 64, dtype=torch.int64, device="meta")

    def step(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
        def loss(rows: Tensor) -> Tensor:
            value: Tensor = model(rows)
            if inside:
                (value / n).backward()
            return value.detach() if inside else value

        value: Tensor = sl.microbatch(loss, tokens, n=n)
        if not inside:
            value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    def plan() -> sl.Plan:
        with mesh:
            return sl.jit(step).plan(model, optimizer, tokens)

    assert compare(plan) == left_out


@pytest.mark.long
@pytest.mark.parametrize(("stages", "schedule"), [(1, "1f1b"), (2, "1f1b"), (2, "zb_h1")])
def test_values(stages: int, schedule: str) -> None:
    """Steps of folded microbatches have the bits of those that are all planned, and numbers of dropout of their own."""

    def train(least: float) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        model = Deep(2).double()
        mesh = sl.Mesh(stage=stages, data=2, stages="stage") if stages > 1 else sl.Mesh(data=2)
        named = {"table": 0, "blocks.0": 0, "blocks.1": 1} if stages > 1 else None
        sl.parallelize(model, strategy="fsdp", stages=named, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        tokens = torch.randint(32, (40, 6))

        @sl.jit
        def step(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
            value: Tensor = sl.microbatch(model, tokens, n=10, schedule=schedule)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        with folding(least) as seen, mesh:
            losses = [step(model, optimizer, tokens).full_tensor() for _ in range(2)]
        return losses + [p.full_tensor().detach() for p in model.parameters()], seen

    folded, left_out = train(0)
    planned, _ = train(float("inf"))
    assert left_out[0] == (2 if stages == 1 else 3)
    for mine, theirs in zip(folded, planned, strict=True):
        assert torch.equal(mine, theirs)
