"""What is made again for the backward pass: values, memory, messages, arithmetic, by name and under a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib import Mesh

D, HEADS, SEQ, BATCH = 16, 4, 8, 8


class Attention(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.written = nn.Linear(D, 3 * D), nn.Linear(D, D), written

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.written:
            scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
            out = nn.functional.dropout(scores, 0.1, self.training) @ v
        else:
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1, self.training)


class Block(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.mlp = Attention(written), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    """Layers with attention, as one op or written out; `again`: in checkpoints."""

    def __init__(self, layers: int = 3, written: bool = False, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(Block(written) for _ in range(layers))
        self.head, self.again = nn.Linear(D, 2 * D), again
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


def batch() -> Tensor:
    return torch.randn(BATCH, SEQ, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(model: Model) -> Any:
    """A step, which returns the loss and all gradients."""

    def step(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        loss = model(x).square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    return step


SPECS = {
    "*.qkv.weight": "(three heads hd)@tensor embed",
    "*.up.weight": "ff@tensor embed",
    "*.up.bias": "ff@tensor",
    "*.down.weight": "embed ff@tensor",
}
PLACES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp": ({"data": 2, "tensor": 2}, {"specs": {k: v for k, v in SPECS.items() if "qkv" not in k}, "strategy": "ddp"}),
    "fsdp": ({"data": 4}, {"strategy": "fsdp"}),
    "hsdp": ({"replica": 2, "shard": 2}, {"strategy": "hsdp"}),
    "kept": ({"data": 4}, {"strategy": sl.strategies.fsdp(regather=False)}),
}
WAYS: list[dict[str, Any]] = [
    {},
    {"remat": "full"},
    {"remat": "attention"},
    {"remat": ["MLP", "h.1.attn"]},
    {"remat": "gelu"},
    {"memory": 0.7},
]


def ids(x: Any) -> str:
    return "-".join(f"{v}" for v in x.values()) or "none"


def jitted(place: str, model: Model, **way: Any) -> tuple[Any, Mesh]:
    axes, options = PLACES[place]
    mesh = Mesh(**axes)
    with mesh:
        sl.parallelize(model, **options)
        if isinstance(share := way.get("memory"), float):
            way["memory"] = int(share * sl.jit(train(model)).plan(batch()).peak_memory)
        return sl.jit(train(model), in_specs=(f"b@({' '.join(n for n in axes if n != 'tensor')}) ...",), **way), mesh


def run(place: str, way: dict[str, Any], written: bool = False, again: bool = False, training: bool = True) -> Any:
    model = Model(written=written, again=again).train(training)
    step, mesh = jitted(place, model, **way)
    with mesh:
        torch.manual_seed(3)
        loss, grads = step(batch())
        return [x.full_tensor() for x in (loss, *grads)], step.plan(batch())


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("way", WAYS[1:], ids=ids)
@pytest.mark.parametrize("place", PLACES)
def test_values_are_those_of_one_device(place: str, way: dict[str, Any], written: bool) -> None:
    found, _ = run(place, way, written, training=False)
    loss, grads = train(Model(written=written).eval())(batch())
    torch.testing.assert_close(found, [loss, *grads], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS[1:], ids=ids)
def test_what_is_dropped_out_is_the_same(way: dict[str, Any]) -> None:
    found, plan = run("tp", way, written=True)
    kept, before = run("tp", {}, written=True)
    torch.testing.assert_close(found, kept, rtol=0, atol=0)
    assert plan.peak_memory < before.peak_memory
