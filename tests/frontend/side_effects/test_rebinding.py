"""What a jitted function binds anew where it was found, it has bound after every call: modules, objects, variables."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, ShardedTensor, ShardingError, shard
from tests.helpers.oracle import same

X = torch.arange(16.0).view(4, 4).sin()
Case = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, tensor=2) as mesh:
        yield mesh


class Slots:
    __slots__ = ("held",)


def held(value: Any, step: Callable[[Any, Tensor], Any]) -> Callable[[], Case]:
    """A function that gives an object's attribute `step(what it had, x)`."""

    def make() -> Case:
        owner = types.SimpleNamespace(held=value)

        def fn(x: Tensor) -> Tensor:
            owner.held = step(owner.held, x)
            return x + 1

        return fn, lambda: owner.held

    return make


def a_global() -> Case:
    space: dict[str, Any] = {"held": torch.zeros(4)}
    exec("def fn(x):\n    global held\n    held = held * 0.5 + x.mean(0)\n    return x + held\n", space)
    return space["fn"], lambda: space["held"]


def a_cell() -> Case:
    held = torch.zeros(4)

    def fn(x: Tensor) -> Tensor:
        nonlocal held
        held = held * 0.5 + x.mean(0)
        return x + held

    return fn, lambda: held


def a_class() -> Case:
    class Holder:
        held = torch.zeros(4)

    def fn(x: Tensor) -> Tensor:
        Holder.held = Holder.held * 0.5 + x.mean(0)
        return x + Holder.held

    return fn, lambda: Holder.held


def a_slot() -> Case:
    owner = Slots()
    owner.held = torch.zeros(4)

    def fn(x: Tensor) -> Tensor:
        owner.held = owner.held * 0.5 + x.mean(0)
        return x + owner.held

    return fn, lambda: owner.held


def a_new_name() -> Case:
    owner = types.SimpleNamespace()

    def fn(x: Tensor) -> Tensor:
        owner.held = getattr(owner, "held", 0) + x.mean(0)
        return x + owner.held

    return fn, lambda: owner.held


def two_buffers() -> Case:
    owner = types.SimpleNamespace(a=torch.zeros(4), b=torch.ones(4))

    def fn(x: Tensor) -> Tensor:
        owner.a, owner.b = owner.b, owner.a
        return x + owner.a

    return fn, lambda: (owner.a, owner.b)


def a_buffer(register: bool) -> Case:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            now = self.running * 0.9 + x.mean(0) * 0.1
            self.register_buffer("running", now) if register else setattr(self, "running", now)
            return x - self.running

    net = Running()
    return net, lambda: dict(net.named_buffers())


def in_place_and_anew() -> Case:
    owner = types.SimpleNamespace(held=torch.zeros(4))

    def fn(x: Tensor) -> Tensor:
        owner.held.add_(1)
        owner.held = owner.held * 2
        owner.held.add_(x.mean(0))
        return x + owner.held

    return fn, lambda: owner.held


CASES: dict[str, Callable[[], Case]] = {
    "a global": a_global,
    "a cell": a_cell,
    "a class": a_class,
    "a slot": a_slot,
    "a new name": a_new_name,
    "two buffers, swapped": two_buffers,
    "a buffer": functools.partial(a_buffer, False),
    "a buffer, registered again": functools.partial(a_buffer, True),
    "in place, and anew": in_place_and_anew,
    "nothing there before": held(None, lambda _, x: x * 2),
    "another shape": held(torch.zeros(1, 4), lambda old, x: torch.cat([old, x])),
    "a view": held(torch.zeros(4), lambda _, x: x[0]),
    "the argument": held(torch.zeros(4, 4), lambda _, x: x),
    "a tuple": held(None, lambda old, x: (x if old is None else old[0] + x, "h", x.sum())),
    "a dict": held({"n": 1, "h": torch.zeros(4)}, lambda old, x: {"n": 1, "h": old["h"] + x.mean(0)}),
}


@pytest.mark.parametrize("placed", [False, True], ids=["plain", "placed"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_bound_anew_is_there_after_the_call(case: str, placed: bool) -> None:
    plain, left = CASES[case]()
    fn, mine = CASES[case]()
    step = sl.jit(fn)
    for i in range(4):
        x = X + i
        given = shard(x, "a@data b@tensor") if placed else x
        step.plan(given)
        same(step(given), plain(x))
        same(mine(), left())
    assert len(step.retraces) <= (4 if case == "another shape" else 2)


def test_plain_tensors_stay_plain_and_placed_ones_where_they_are() -> None:
    owner = types.SimpleNamespace(plain=torch.zeros(4), placed=shard(torch.zeros(4), "a@tensor"), none=None)

    def fn(x: Tensor) -> Tensor:
        owner.plain, owner.placed = owner.plain + x.sum(0), owner.placed + x.sum(0)
        owner.none = x * 2
        return owner.none

    step = sl.jit(fn, out_specs="a b@data")
    out = step(shard(X, "a@data b"))
    assert type(owner.plain) is Tensor
    assert str(owner.placed.sharding) == "4@tensor"
    assert owner.none is out


def test_what_is_kept_has_its_history() -> None:
    def make() -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(4, 4)
                self.aux: Tensor = torch.zeros(())

            def forward(self, x: Tensor) -> Tensor:
                h = self.lin(x)
                self.aux = h.square().mean()
                return h.sin()

        torch.manual_seed(0)
        return Net()

    plain, mine = make(), make()
    step = sl.jit(mine)
    for _ in range(3):
        for net, fn in ((plain, plain), (mine, step)):
            (fn(X).sum() + net.aux).backward()
        same([p.grad for p in mine.parameters()], [p.grad for p in plain.parameters()])
    assert isinstance(mine.aux, ShardedTensor)


def test_numbers_of_the_call_are_kept_as_numbers() -> None:
    owner = types.SimpleNamespace(held=None)

    def fn(x: Tensor, n: float) -> Tensor:
        owner.held = (x * n, n)
        return x

    step = sl.jit(fn)
    for n in (1.0, 2.0, 3.0):
        step(X, n)
        same(owner.held, (X * n, n))


def test_a_jitted_method_keeps_no_object() -> None:
    class Trainer:
        mean = torch.zeros(4)

        @sl.jit
        def step(self, x: Tensor) -> Tensor:
            self.mean = self.mean * 0.5 + x.mean(0)
            return x

    trainer = Trainer()
    trainer.step(X), trainer.step(X)
    same(trainer.mean, X.mean(0) * 1.5)
    gone = weakref.ref(trainer)
    del trainer
    assert gone() is None


def test_an_error_on_the_way_leaves_what_was_there() -> None:
    before = torch.zeros(4)
    owner = types.SimpleNamespace(held=before)

    def fn(x: Tensor) -> Tensor:
        owner.held = owner.held + x.mean(0)
        raise ValueError("on the way")

    with pytest.raises(ValueError, match="on the way"):
        sl.jit(fn)(X)
    assert owner.held is before


def test_a_new_parameter_is_refused() -> None:
    net = nn.Linear(4, 4)
    before = net.weight

    def fn(x: Tensor) -> Tensor:
        net.weight = nn.Parameter(net.weight * 2)
        return net(x)

    with pytest.raises(ShardingError, match=r"net.weight has become a value of the trace"):
        sl.jit(fn)(X)
    assert net.weight is before
