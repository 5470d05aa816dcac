"""Whole Jacobians and Hessians from outside: several cotangents or tangents at once, and `torch.func` around calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import shardlib as sl
from shardlib import Mesh
from shardlib.core.errors import ShardingError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode calls it

MESH = Mesh(data=2, tensor=2)
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


@pytest.fixture(autouse=True)
def _mesh() -> Any:
    with MESH:
        yield


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x


def layer(x: Tensor) -> Tensor:
    return (x.sin() @ x.t()).tanh().sum(1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def placed() -> Tensor:
    return sl.shard(X, "a@data b@tensor")


def parallel() -> nn.Module:
    return sl.parallelize(net(), {"0.weight": "o@tensor _", "2.weight": "_ i@tensor"})


THROUGH: dict[str, Callable[[], tuple[Callable[..., Any], Tensor, Callable[..., Any]]]] = {
    "ops": lambda: (layer, placed(), layer),
    "what is gathered": lambda: (lambda x: whole(layer(x)), placed(), layer),
    "what is moved": lambda: (
        lambda x: layer(x.redistribute("_ b@data")) if _is_placed(x) else layer(x),
        placed(),
        layer,
    ),
    "what is placed": lambda: (lambda x: layer(sl.shard(1 * x, "a@data _")), X.clone(), layer),
    "a call": lambda: (sl.jit(layer), placed(), layer),
    "a call of a plain tensor": lambda: (lambda x: sl.jit(layer)(x).full_tensor(), X.clone(), layer),
    "a module": lambda: (parallel(), placed(), net()),
    "a module, gathered": lambda: (partial(_gathered, parallel()), X.clone(), net()),
}


def _gathered(model: nn.Module, x: Tensor) -> Tensor:
    return whole(model(x))


def _is_placed(x: Any) -> bool:
    return isinstance(x, sl.ShardedTensor)


def batched(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = fn(x)
    each = torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)
    out = torch.autograd.grad(y, x, sl.shard(each, "...") if _is_placed(y) else each, is_grads_batched=True)
    return out[0]


def examples(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = fn(x)
    each = torch.linspace(-1, 1, 6 * y.numel(), dtype=y.dtype).reshape(3, 2, *y.shape)
    back = vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0], out_dims=1)
    return vmap(back, in_dims=1)(each)


def examples_of_the_second(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(whole(fn(x).square().sum()), x, create_graph=True)
    g = whole(g).reshape(-1)
    return vmap(lambda v: torch.autograd.grad(g, x, v, retain_graph=True)[0])(torch.eye(len(g), dtype=g.dtype))


BACKWARD: dict[str, Callable[..., Any]] = {
    "is_grads_batched": batched,
    "vmap, within each other": examples,
    "vmap of second derivatives": examples_of_the_second,
    "jacobian": lambda fn, x: jacobian(fn, x, vectorize=True),
    "hessian": lambda fn, x: hessian(lambda x: fn(x).square().sum(), x, vectorize=True),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("name", BACKWARD)
def test_several_cotangents_at_once(name: str, through: str) -> None:
    mine, x, theirs = THROUGH[through]()
    torch.testing.assert_close(whole(BACKWARD[name](mine, x)), BACKWARD[name](theirs, X))


def test_batches_of_batches() -> None:
    def second(fn: Callable[[Tensor], Tensor]) -> Tensor:
        def first(x: Tensor) -> Tensor:
            y = fn(x)
            (g,) = torch.autograd.grad(y, x, torch.eye(4, dtype=x.dtype), is_grads_batched=True, create_graph=True)
            return whole(g)[:, 0]

        return whole(jacobian(first, X.clone().requires_grad_(), vectorize=True))

    torch.testing.assert_close(second(lambda x: sl.jit(layer)(x).full_tensor()), second(layer))


def dual(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found: Tensor = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        return found


FORWARD: dict[str, Callable[..., Any]] = {
    "dual numbers": dual,
    "jacobian": lambda fn, x: jacobian(fn, x, vectorize=True, strategy="forward-mode"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("through", [name for name in THROUGH if name.startswith(("ops", "what"))])
@pytest.mark.parametrize("name", FORWARD)
def test_tangents_follow_what_is_moved(name: str, through: str) -> None:
    mine, x, theirs = THROUGH[through]()
    torch.testing.assert_close(whole(FORWARD[name](mine, x)), FORWARD[name](theirs, X))


def test_a_plain_tangent_moves_with_what_it_is_of() -> None:
    tangent = torch.randn_like(X)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(sl.shard(X, "a@data _"), tangent)
        found = forward_ad.unpack_dual(x.redistribute("a _")).tangent
    torch.testing.assert_close(whole(found), tangent)


@pytest.mark.parametrize("through", [name for name in THROUGH if name.startswith("a ")])
def test_dual_numbers_do_not_enter_a_program(through: str) -> None:
    mine, x, _ = THROUGH[through]()
    with pytest.raises(ShardingError, match=r"is called with dual tensors(.|\n)*torch\.func\.jvp around the call"):
        dual(mine, x)


def _by_parameters(transform: Callable[..., Any]) -> Callable[[nn.Module, Tensor], Any]:
    def of(model: nn.Module, x: Tensor) -> Any:
        return transform(lambda p: functional_call(model, p, (x,)), dict(model.named_parameters()))

    return of


def _pushed(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = jvp(model, (x,), (torch.ones_like(x),))[1]
    return found


def _ensemble(model: nn.Module, x: Tensor) -> Tensor:
    stacked = {k: torch.stack([p.detach(), 2 * p.detach()]) for k, p in model.named_parameters()}
    found: Tensor = vmap(lambda p: functional_call(model, p, (x,)))(stacked)
    return found


def _per_example(model: nn.Module, x: Tensor) -> Any:
    parameters = {k: p.detach() for k, p in model.named_parameters()}

    def loss(p: Any, row: Tensor) -> Tensor:
        out: Tensor = functional_call(model, p, (row[None],))
        return out.square().sum()

    return vmap(grad(loss), in_dims=(None, 0))(parameters, x)


TRANSFORMED: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": _by_parameters(lambda fn, p: grad(lambda p: fn(p).square().sum())(p)),
    "jacrev": _by_parameters(lambda fn, p: jacrev(fn)(p)),
    "jacfwd": _by_parameters(lambda fn, p: jacfwd(fn)(p)),
    "jacrev of the batch": lambda model, x: jacrev(model)(x),
    "vmap over the batch": lambda model, x: vmap(model)(x),
    "jvp": _pushed,
    "an ensemble": _ensemble,
    "gradients of each example": _per_example,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_around_a_parallelized_module(name: str) -> None:
    model = net()
    theirs = TRANSFORMED[name](copy.deepcopy(model), X)
    mine = TRANSFORMED[name](sl.parallelize(model, {"0.weight": "o@tensor _", "2.weight": "_ i@tensor"}), X)
    found = {k: whole(v) for k, v in mine.items()} if isinstance(mine, dict) else whole(mine)
    torch.testing.assert_close(found, theirs)
