"""Gradients of gradients, from outside a jitted function or a parallelized module: WGAN-GP, MAML."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import shardlib as sl
from shardlib import Mesh
from shardlib.core.errors import ShardingError, WrittenError

MESH = Mesh(data=2, tensor=2)
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, sl.ShardedTensor) else x).detach()


def critic(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), *more, nn.Tanh(), nn.Linear(12, 1)).double()


def penalty(net: Callable[..., Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = net(torch.cat([x, x**2], 1))  # which nobody else holds
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert type(slope) is type(x)
    return (slope.norm(dim=1) - 1).square().mean() + out.mean()


def trained(net: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], *, alone: bool = False) -> list[Tensor]:
    opt = torch.optim.SGD(net.parameters(), 0.1)
    torch.manual_seed(1)
    with sl.global_random() if alone else MESH:
        for _ in range(3):
            opt.zero_grad()
            loss(net, X).backward()
            opt.step()
    return [whole(x) for x in net.state_dict().values()]


def same(net: nn.Module, specs: dict[str, str], loss: Callable[[nn.Module, Tensor], Tensor] = penalty) -> None:
    alone = trained(copy.deepcopy(net), loss, alone=True)
    with MESH:
        sl.parallelize(net, specs)
    for a, b in zip(trained(net, loss), alone, strict=True):
        torch.testing.assert_close(a, b)


COLUMNS = {"0.*": "ff@tensor ..."}


def test_a_gradient_penalty_trains_a_parallelized_module() -> None:
    same(critic(), COLUMNS)


@pytest.mark.long
def test_buffers_are_written_once_and_draws_are_those_of_the_call() -> None:
    same(critic(nn.BatchNorm1d(12), nn.Dropout(0.5)), COLUMNS)


def test_a_buffer_that_results_depend_on_is_as_it_was_in_the_call() -> None:
    same(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6)), nn.Tanh()).double(), {})


def test_under_autocast_the_call_runs_again_under_it() -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        x = x.float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = net(torch.cat([x, x**2], 1))
        (slope,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
        return slope.square().sum()

    net = critic().float()
    alone = copy.deepcopy(net)
    with MESH:
        sl.parallelize(net, {})
        for x in (net, alone):
            loss(x, X).backward()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=0.02, atol=1e-3)


@pytest.mark.long
def test_any_order() -> None:
    def orders(fn: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        y, found = fn(x), []
        for _ in range(4):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            found.append(whole(y))
        return found

    def fn(x: Tensor) -> Tensor:
        return (x**4).sum() + x.sin().sum()

    with MESH:
        placed = sl.shard(X, "batch@data _").requires_grad_()
        for mine in (orders(sl.jit(fn), placed), orders(sl.jit(fn), X.clone().requires_grad_())):
            for a, b in zip(mine, orders(fn, X.clone().requires_grad_()), strict=True):
                torch.testing.assert_close(a, b)


def test_through_two_calls_of_one_module() -> None:
    net = nn.Linear(8, 8).double()
    same(net, {"weight": "out@tensor in", "bias": "out@tensor"}, lambda net, x: penalty(lambda h: net(net(h).sin()), x))


def _adapted(net: nn.Module, given: dict[str, Tensor], x: Tensor) -> Tensor:
    """MAML: steps whose results the next call is given."""
    for _ in range(2):
        loss = functional_call(net, given, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, [*given.values()], create_graph=True)
        given = {k: p - 0.1 * g for (k, p), g in zip(given.items(), slopes, strict=True)}
    return functional_call(net, given, (x,)).sin().sum()


def _flat(net: nn.Module, given: dict[str, Tensor], x: Tensor) -> Tensor:
    """The size of a gradient, of two calls."""
    total = torch.zeros((), dtype=x.dtype)
    for i in (1, 2):
        loss = functional_call(net, given, (i * x,)).square().mean()
        slopes = torch.autograd.grad(loss, [*given.values()], create_graph=True)
        total = total + sum(_gathered(g).square().sum() for g in slopes)
    return total


def _gathered(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x


GIVEN: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "its own": lambda net: dict(net.named_parameters()),
    "copies": lambda net: {k: p.detach().clone().requires_grad_() for k, p in net.named_parameters()},
    "computed": lambda net: {k: 0.9 * p for k, p in net.named_parameters()},
    "only some": lambda net: {"0.weight": 0.9 * net[0].weight},
}


@pytest.mark.long
@pytest.mark.sampled(16, first=2)
@pytest.mark.parametrize("loss", [_adapted, _flat])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_functional_calls_run_again_with_what_they_were_given(given: str, loss: Any, tied: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)).double()
    if tied:
        net[3].weight = net[0].weight
    alone, x = copy.deepcopy(net), torch.cat([X, X**2], 1)
    with MESH:
        sl.parallelize(net, COLUMNS)
    found = []
    for each in (net, alone):
        held = GIVEN[given](each)
        with MESH if each is net else nullcontext():
            slopes = torch.autograd.grad(loss(each, held, x), [*held.values()], allow_unused=True)
        found.append([*map(whole, (x for x in slopes if x is not None)), *map(whole, each.state_dict().values())])
        assert not [x for x in slopes if x is None]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_hooks_run_once() -> None:
    seen = []
    w = X[0].clone().requires_grad_()
    w.register_hook(lambda g: (seen.append(1), 2 * g)[1])
    with MESH:
        y = sl.jit(lambda x, w: ((x * w) ** 3).sum())(X, w)
        (g,) = torch.autograd.grad(y, w, create_graph=True)
    torch.testing.assert_close(whole(g), 2 * (3 * X**3 * w**2).sum(0).detach())
    assert len(seen) == 1


class Listed(nn.Module):
    """Reads its tensors from a list, and writes to the buffer there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(X[:4].cos())
        self.register_buffer("scale", torch.ones(4, dtype=X.dtype))
        self.listed = [self.weight, self.scale]

    def forward(self, x: Tensor, *, writes: bool) -> Tensor:
        weight, scale = self.listed
        if writes:
            scale.mul_(0.5)
        return (x @ weight * scale).tanh()


def test_tensors_that_a_list_holds_are_read_again_and_refused_if_written() -> None:
    net = Listed()

    def curvature(fn: Callable[[Tensor], Tensor]) -> Tensor:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(_gathered(fn(x)).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), net.weight)[0]

    with MESH:
        mine = curvature(sl.jit(lambda x: net(x, writes=False)))
        torch.testing.assert_close(mine, curvature(lambda x: net(x, writes=False)))
        with pytest.raises(ShardingError, match="only arguments and modules hold tensors that it writes"):
            curvature(sl.jit(lambda x: net(x, writes=True)))


def test_what_has_changed_since_the_call_is_refused() -> None:
    with MESH:
        net = sl.parallelize(critic(nn.Dropout(0.5)), COLUMNS)
        x = torch.ones(6, 8, dtype=torch.float64).requires_grad_()
        for change, error in (
            (lambda: net.eval(), "but it would be another call now"),
            (lambda: net[0].bias.detach().zero_(), "modified by an inplace operation"),
        ):
            out = net.train()(x).sum()
            change()
            with pytest.raises((ShardingError, WrittenError), match=error) as caught:
                torch.autograd.grad(out, x, create_graph=True)
            assert "differentiated again" in str(caught.value)


def test_what_would_happen_twice_is_refused() -> None:
    count = {"calls": 0}

    def fn(x: Tensor) -> Tensor:
        count["calls"] += 1
        return (x**3).sum()

    with MESH:
        x = X.clone().requires_grad_()
        y = sl.jit(fn)(x)
        with pytest.raises(ShardingError, match="changes more than tensors that it is given") as caught:
            torch.autograd.grad(y, x, create_graph=True)
    assert "take the inner gradient inside" in str(caught.value)


def test_losses_of_the_whole_result_have_second_derivatives() -> None:
    """What is gathered gives its cotangent back with the history that it has: of a call, and of eager ops."""
    torch.manual_seed(0)
    w = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    v = torch.randn(8, 4, dtype=torch.float64)
    x = torch.cat([X, X**2], 1)

    def curvature(f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        (g,) = torch.autograd.grad(f(x, w).square().sum(), w, create_graph=True)
        return whole(torch.autograd.grad((g * v).sum(), w)[0])

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    theirs = curvature(layer)
    with MESH:
        step = sl.jit(layer, in_specs=("b@data k", "k o@tensor"))
        torch.testing.assert_close(curvature(lambda x, w: step(x, w).full_tensor()), theirs, rtol=1e-10, atol=1e-10)
        placed = sl.shard(x, "b@data k")
        torch.testing.assert_close(
            curvature(lambda _, w: layer(placed, w).full_tensor()), theirs, rtol=1e-10, atol=1e-10
        )


def test_a_graph_that_is_freed_is_told_as_torch_tells_it() -> None:
    w = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    with MESH:
        total = sl.jit(lambda x, w: torch.tanh(x @ w))(torch.cat([X, X**2], 1), w).full_tensor().sum()
        total.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through"):
            torch.autograd.grad(total, w, create_graph=True)
