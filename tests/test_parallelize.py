"""`parallelize`: modules whose parameters live on a mesh train as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, ShardedTensor, ShardingError
from tests.ranks import run_ranks


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks, a tied table, statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8, 12) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        x = self.norm(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * scale


SPECS = {
    "*.up.weight": "ff@tensor embed",
    "*.up.bias": "ff@tensor",
    "*.down.weight": "embed ff@tensor",
    "table.weight": "vocab@tensor embed",
}
TOKENS = [torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(i)) for i in range(3)]


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def train(model: nn.Module, place: Callable[[Tensor], Tensor], make: Any = torch.optim.Adam) -> list[float]:
    opt, losses = make(model.parameters(), lr=0.05), []
    for tokens in map(place, TOKENS):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def whole(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, ShardedTensor) else x.detach()


def same(model: nn.Module, plain: nn.Module) -> None:
    mine, theirs = model.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    for name, x in theirs.items():
        torch.testing.assert_close(whole(mine[name]), x, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize(
    "axes", [{"data": 2, "tensor": 2}, {"data": 2, "tensor": 4}, {"data": 1, "tensor": 3}], ids=str
)
def test_it_trains_as_on_one_device(axes: dict[str, int], make: Any) -> None:
    mesh, plain, model = Mesh(**axes), net(), net()
    assert sl.parallelize(model, SPECS, mesh=mesh) is model
    assert model.head.weight is model.table.weight
    assert all(isinstance(p, nn.Parameter) and isinstance(p, ShardedTensor) for p in model.parameters())
    expected = train(plain, lambda x: x, make)

    def place(x: Tensor) -> Tensor:
        with mesh:
            return sl.shard(x, "batch@data ...")

    found = train(model, place, make)
    assert found == pytest.approx(expected, rel=1e-10)
    same(model, plain)
    plain.eval(), model.eval()
    torch.testing.assert_close(whole(model(place(TOKENS[0]), scale=0.5)), plain(TOKENS[0], scale=0.5))


def _on_ranks() -> list[float]:
    mesh, model = Mesh(data=2, tensor=2), sl.parallelize(net(), SPECS, mesh=Mesh(data=2, tensor=2))
    with mesh:
        return train(model, lambda x: sl.shard(x, "batch@data ..."))


@pytest.mark.ranks
def test_on_ranks_it_trains_as_on_one_device() -> None:
    expected = train(net(), lambda x: x)
    for found in run_ranks(_on_ranks, 4):
        assert found == pytest.approx(expected, rel=1e-10)


def test_a_step_of_it_is_one_program() -> None:
    plain, model = net(), net()
    train(plain, lambda x: x)
    with Mesh(data=2, tensor=2):
        sl.parallelize(model, SPECS)
        opt = torch.optim.Adam(model.parameters(), lr=0.05)

        @sl.jit
        def step(tokens: Tensor) -> Tensor:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        for tokens in TOKENS:
            step(sl.shard(tokens, "batch@data ..."))
    same(model, plain)


def test_the_plan_is_megatron() -> None:
    with Mesh(data=1, tensor=2):
        block = sl.parallelize(Block(8, 12), {"up.*": "ff@tensor ...", "down.weight": "embed ff@tensor"})
        plan = block.forward.plan(torch.ones(4, 8, requires_grad=True))
    assert [c.kind for c in plan.collectives] == ["all_reduce", "all_reduce"], plan


def test_frozen_parameters_stay_so() -> None:
    model = net()
    model.table.weight.requires_grad_(False)
    with Mesh(tensor=2):
        sl.parallelize(model, SPECS)
        model(TOKENS[0]).sum().backward()
    assert model.table.weight.grad is None
    assert model.blocks[0].up.weight.grad is not None


def test_again_it_moves_them() -> None:
    with Mesh(tensor=2):
        model = sl.parallelize(nn.Linear(4, 6), {"weight": "out@tensor in"})
        sl.parallelize(model, {"weight": "out in@tensor"})
        assert sl.typeof(model.weight) == "f32[6, 4@tensor]"


def test_a_copy_is_a_module_of_its_own() -> None:
    with Mesh(tensor=2):
        model = sl.parallelize(nn.Linear(4, 6), {"weight": "out@tensor in"})
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.weight.zero_()
        x = torch.ones(2, 4)
        torch.testing.assert_close(whole(other(x)), whole(other.bias).expand(2, 6))
        assert not torch.equal(whole(model(x)), whole(other(x)))


def test_mistakes_are_told_all_at_once() -> None:
    model = net()
    before = dict(model.named_parameters())
    with Mesh(data=2, tensor=2):
        with pytest.raises(ShardingError) as said:
            sl.parallelize(model, {"*.upp.weight": "a b", "*.up.*": "ff@tensor ...", "blocks.0.up.bias": "ff"})
        assert "'*.upp.weight' matches no parameter; the nearest name is 'blocks.1.up.weight'" in str(said.value)
        assert "blocks.0.up.bias is 'ff@tensor ...' by '*.up.*' and 'ff' by 'blocks.0.up.bias'" in str(said.value)
        with pytest.raises(ShardingError) as said:
            sl.parallelize(model, {"*.up.weight": "ff@tensr embed", "*.norm.weight": "a b"})
        assert "parallelize: 4 of 4 specs do not fit" in str(said.value)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    with pytest.raises(ShardingError, match="parallelize\\(Net\\) is outside any mesh"):
        sl.parallelize(model, SPECS)
    sl.parallelize(model, SPECS, mesh=Mesh(tensor=2))
    with pytest.raises(ShardingError, match="finds parameters on another mesh"):
        sl.parallelize(model, SPECS, mesh=Mesh(tensor=4))


def test_an_optimizer_that_was_made_before_is_refused() -> None:
    model = nn.Linear(4, 6)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with Mesh(tensor=2):
        sl.parallelize(model, {"weight": "out@tensor in"})
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ShardingError) as said:
        early.step()
    assert "this SGD was made before parallelize" in str(said.value)
    assert "Linear.weight has been replaced" in str(said.value)
    assert "Linear.bias has been replaced" in str(said.value)


def test_gradients_are_not_lost() -> None:
    model = nn.Linear(4, 6)
    model(torch.ones(2, 4)).sum().backward()
    with Mesh(tensor=2), pytest.raises(ShardingError) as said:
        sl.parallelize(model, {"weight": "out@tensor in"})
    assert "parallelize(Linear) would lose gradients:\n  * weight of [6, 4] has one\n  * bias of [6] has one" in str(
        said.value
    )
    assert not isinstance(model.weight, ShardedTensor)
