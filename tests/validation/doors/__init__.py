"""Families of models through both doors, on meshes, under strategies: three steps of Adam against one device.

    python -m tests.validation.doors [--only gptj llama] [--report]

The doors are the module's own loop (`parallelize`), and the whole step as one program (`jit(step)`). All parameters,
and all that Adam keeps of them, are compared.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardlib as sl
from tests.models import gpt2, llama, zoo
from tests.models.causal_lm import tokens
from tests.models.wide import Wide

Specs = Mapping[str, str] | None


@dataclass(frozen=True)
class Way:
    """How a model is cut: the mesh, the strategy, whether its table of weights is said."""

    axes: Mapping[str, int]
    strategy: str = "ddp"
    cut: bool = True


WAYS = {
    "data": Way({"data": 8}),
    "tensor+data": Way({"data": 2, "tensor": 4}),
    "sequence+tensor+data": Way({"data": 2, "seq": 2, "tensor": 2}),
    "fsdp": Way({"data": 8}, "fsdp"),
    "fsdp+tensor": Way({"data": 2, "tensor": 4}, "fsdp"),
    "hsdp+tensor": Way({"replica": 2, "shard": 2, "tensor": 2}, "hsdp"),
}
RULES = {"heads": "tensor", "kv": "tensor", "ff": "tensor", "vocab": "tensor"}
DOORS = ("parallelize", "jit")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


class Collaborative(nn.Module):
    """Neural collaborative filtering (He et al. 2017, arXiv:1708.05031): a product of two tables' rows beside a network
    on two others' rows."""

    def __init__(self, users: int = 48, items: int = 64, width: int = 16) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_mlp, self.item_mlp = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        self.up, self.down = nn.Linear(4 * width, 64), nn.Linear(64, width)
        self.score = nn.Linear(2 * width, 1)

    def forward(self, user: Tensor, item: Tensor, labels: Tensor) -> Any:
        """The mean loss of `labels [batch]`, 1 where a user took an item."""
        deep = torch.cat([self.user_mlp(user), self.item_mlp(item)], -1)
        deep = self.down(torch.relu(self.up(deep)))
        scores = self.score(torch.cat([self.user(user) * self.item(item), deep], -1)).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype))


_COLLABORATIVE = {
    "*user*.weight": "users@tensor embed", "*item*.weight": "items@tensor embed", "up.weight": "ff embed",
    "up.bias": "ff", "down.weight": "embed ff",
}  # fmt: skip


def build(family: str) -> tuple[nn.Module, Specs, dict[str, Any]]:
    """A small model, where its weights live, and what it is called with."""
    g = torch.Generator().manual_seed(1)
    if family == "ncf":
        torch.manual_seed(0)
        pairs = {"user": torch.randint(48, (16,), generator=g), "item": torch.randint(64, (16,), generator=g)}
        return Collaborative(), _COLLABORATIVE, pairs | {"labels": torch.randint(2, (16,), generator=g)}
    made = LLAMAS[family]() if family in LLAMAS else gpt2.build() if family == "gpt2" else zoo.build(family)
    batch = tokens(64, 8, 16)
    args = {"input_ids": batch, "labels": batch, **made.keywords}
    return made.module, made.specs(), args


LLAMAS = {"llama": llama.build, "llama, 2 KV heads": lambda: llama.build(kv_heads=2)}
FAMILIES = ("gpt2", *(name for name in zoo.FAMILIES if name != "qwen2"), *LLAMAS, "ncf")


def step(model: nn.Module, opt: torch.optim.Optimizer, args: Mapping[str, Any]) -> Tensor:
    found = model(**args)
    loss: Tensor = found if isinstance(found, Tensor) else found.loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def trained(model: nn.Module, args: Mapping[str, Any], run: Callable[..., Tensor], steps: int = 3) -> dict[str, Tensor]:
    """All that training leaves: losses, parameters, moments."""
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    left = {f"loss of step {i}": run(model, opt, args) for i in range(steps)}
    for name, p in model.named_parameters():
        left[name] = p
        left |= {f"{k} of {name}": x for k, x in opt.state[p].items()} if p in opt.state else {}
    return {name: _whole(x.detach()) for name, x in left.items()}


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x


def rounding(family: str) -> float:
    """The same difference, of one device in float32 from one device in float64: what rounding alone does.

    Adam divides a gradient by its size: where that is nothing but rounding (the bias of keys), so is the update.
    """
    model, _, args = build(family)
    single = trained(copy.deepcopy(model), args, step)
    with Wide():
        double = trained(model.double(), args, step)
    return _largest({name: x.double() for name, x in single.items()}, double)[0]


def error(family: str, way: Way, door: str, dtype: torch.dtype) -> tuple[float, str]:
    """The largest difference from one device, relative to each tensor's largest element, and where it is."""
    model, specs, args = build(family)
    model = model.to(dtype)
    plain = copy.deepcopy(model)
    with Wide() if dtype == torch.float64 else contextlib.nullcontext():
        want = trained(plain, args, step)
        with sl.Mesh(dict(way.axes), rules=RULES if "tensor" in way.axes else {}):
            said = {} if "tensor" not in way.axes else specs
            sl.parallelize(model, said, strategy=way.strategy)
            got = trained(model, args, sl.jit(step) if door == "jit" else step)
    return _largest(got, want)


def _largest(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    assert got.keys() == want.keys(), set(got) ^ set(want)
    errors = {
        name: float((got[name] - x).abs().max() / x.abs().max().clamp(min=1e-3))
        for name, x in want.items()
        if x.numel()
    }
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst
