"""What is written to between forward and backward is refused where torch refuses it, by name, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, Precision

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


class Ways(nn.Module):
    """Parameters that are read as they are, through views, as copies, by their values alone, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.copied, self.viewed = nn.Parameter(torch.rand(6, 6)), nn.Parameter(torch.rand(12))
        self.through, self.cut, self.unused = (nn.Parameter(torch.rand(6)) for _ in range(3))
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.copied.clone()) * self.through.exp() * self.scale + self.cut.sigmoid().detach() * x
        return y * self.viewed[::2].flip(0) + y @ self.viewed.view(2, 6)[1].expand(6, 6)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.argmax(-1)))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Parameter(torch.rand(8, 2, 6, 4)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        k = self.key(x)[:, None, None].expand(8, 2, 6, 4)
        return F.scaled_dot_product_attention(self.query, k, k)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
    "ways": Ways,
    "tied": Tied,
    "attention": Attends,
    "layer norm": lambda: nn.LayerNorm(6),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "rms norm": lambda: nn.RMSNorm(6),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
    "batch norm, twice": lambda: Twice(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
    "batch norm, evaluated": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval(),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Conv1d(2, 2, 3)),
    "layer": lambda: nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True),
    "lstm": lambda: nn.LSTM(6, 6),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Those that a user would write to; batch normalization in training has no use for what it has tracked."""
    tracked = [x for m in module.modules() if isinstance(m, nn.BatchNorm1d) and m.training for x in m.buffers()]
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {k: x for k, x in named.items() if x.is_floating_point() and all(x is not y for y in tracked)}


def refused(module: nn.Module, name: str, run: Callable[[nn.Module, Tensor], Any], calls: int) -> str:
    """What backward() says after forward passes and a write to a tensor of the module, then undone; "" if nothing."""
    found = [run(module, X * (i + 1)) for i in range(calls)]
    loss = sum((x[0] if isinstance(x, tuple) else x).square().sum() for x in found)
    written = tensors(module)[name]
    with torch.no_grad():
        before = written.clone()
        written.mul_(1.5)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    finally:
        with torch.no_grad():
            written.copy_(before)
    return ""


@pytest.mark.sampled(11)
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("door", ["parallelize", "jit"])
@pytest.mark.parametrize("kind", MODULES)
def test_it_is_refused_as_by_torch(kind: str, door: str, calls: int) -> None:
    torch.manual_seed(0)
    plain = MODULES[kind]().double()
    with Mesh(data=2):
        module = copy.deepcopy(plain)
        if door == "parallelize":
            sl.parallelize(module, strategy="fsdp")
        run = sl.jit(lambda m, x: m(x)) if door == "jit" else nn.Module.__call__
        for name in tensors(plain):
            said = refused(module, name, run, calls)
            expected = refused(plain, name, nn.Module.__call__, calls)
            assert bool(said) == bool(expected), name
            if door == "parallelize":
                assert not said or "modified by an inplace operation" in said
                assert not said or f"  * self.{name}, f64[" in said


def test_what_torch_allows() -> None:
    """Steps behind backward(), a second way back, other parameters' writes, and casts, which are copies."""
    torch.manual_seed(0)
    with Mesh(data=2):
        model = sl.parallelize(MODULES["linear"]().double(), strategy="fsdp")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(X).square().sum()
            loss.backward(retain_graph=True)
            once = [p.grad.full_tensor().clone() for p in model.parameters()]
            loss.backward()
            for p, g in zip(model.parameters(), once, strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), 2 * g)
            optimizer.step()
            optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(
            RuntimeError, match=r"self\.2\.weight, f64\[6@data, 6\], is at version \d; expected version"
        ):
            loss.backward()
        low = sl.parallelize(MODULES["linear"](), strategy="fsdp", precision=Precision(compute=torch.bfloat16))
        loss = low(X.float()).float().square().sum()
        with torch.no_grad():
            for p in low.parameters():
                p.mul_(2)
        loss.backward()


def test_arguments_too() -> None:
    w = torch.ones(6, dtype=torch.float64, requires_grad=True)
    with Mesh(data=2):
        x = sl.shard(X, "b@data _")
        loss = sl.jit(lambda w, x: (w * x).sum())(w, x)
        x.zero_()
        with pytest.raises(RuntimeError, match=r"\* x, f64\[8@data, 6\], is at version 1; expected version 0"):
            loss.backward()
