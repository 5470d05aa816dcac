"""Code is part of a call's key: functions, methods and classes, and what all of them read, wherever they are found."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh
from tests.border.oracle import same

X = torch.arange(4.0) + 1


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2) as mesh:
        yield mesh


SOURCE = """
import functools, torch
from torch import nn

SCALE = 2.0
TABLE = {"scale": 2.0}

def helper(x):
    return x * SCALE

def outer(x):
    return helper(x) + 1

def by_default(x, s=2.0):
    return x * s

def by_name(x, *, s=2.0):
    return x * s

def doubled(fn):
    @functools.wraps(fn)
    def inner(*args):
        return fn(*args) * TABLE["scale"]
    return inner

@doubled
def decorated(x):
    return x + SCALE

class Base:
    factor = 2.0
    sizes = [2.0]

    def scaled(self, x):
        return helper(x) * self.factor * self.sizes[0]

class Thing(Base):
    def __init__(self):
        self.k = 1.0

    def __call__(self, x):
        return self.scaled(x) * self.k * self.twice

    def scaled(self, x):
        return super().scaled(x) + 1

    @property
    def twice(self):
        return SCALE * 2

    @staticmethod
    def still(x):
        return x * SCALE

class Net(nn.Module):
    def forward(self, x):
        return x * SCALE

def late(x):
    return helper(x) * later
"""


def fresh() -> Any:
    """A module of the user's, each time another one."""
    space = types.ModuleType("users")
    exec(compile(SOURCE, "/home/users.py", "exec"), space.__dict__)
    space.later = 1.0  # type: ignore[attr-defined]
    return space


def changes(u: Any) -> dict[str, Callable[[], Any]]:
    """What somebody does between two calls."""

    def code() -> None:
        u.helper.__code__ = (lambda x: x * 5).__code__

    return {
        "a global": lambda: setattr(u, "SCALE", 3.0),
        "a function": lambda: setattr(u, "helper", lambda x: x * 4),
        "its code": code,
        "a dict": lambda: u.TABLE.update(scale=3.0),
        "defaults": lambda: setattr(u.by_default, "__defaults__", (3.0,)),
        "named defaults": lambda: u.by_name.__kwdefaults__.update(s=3.0),
        "a method": lambda: setattr(u.Base, "scaled", lambda self, x: x * 7),
        "a new method": lambda: setattr(u.Thing, "scaled", lambda self, x: x * 8),
        "a property": lambda: setattr(u.Thing, "twice", property(lambda self: 9.0)),
        "a class's attribute": lambda: setattr(u.Base, "factor", 3.0),
        "a class's list": lambda: u.Base.sizes.append(u.Base.sizes.pop() * 2),
        "a forward": lambda: setattr(u.Net, "forward", lambda self, x: x * 6),
        "what comes later": lambda: setattr(u, "later", 2.0),
    }


def calls(u: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions and arguments that lead to the user's code in every way."""
    thing, net, jitted = u.Thing(), u.Net(), sl.jit(u.outer)
    holders = {"list": [u.outer], "partial": functools.partial(u.by_default)}
    return {
        "by name": (lambda x: u.outer(x), (X,)),
        "itself": (u.outer, (X,)),
        "defaults": (lambda x: u.by_default(x) + u.by_name(x), (X,)),
        "decorated": (u.decorated, (X,)),
        "an argument": (lambda fn, x: fn(x), (u.outer, X)),
        "a list": (lambda x: holders["list"][0](x), (X,)),
        "a partial": (lambda x: holders["partial"](x), (X,)),
        "an object": (lambda x: thing(x), (X,)),
        "an object given": (lambda t, x: t(x), (thing, X)),
        "itself an object": (thing, (X,)),
        "a method": (lambda x: thing.scaled(x), (X,)),
        "a method given": (lambda fn, x: fn(x), (thing.scaled, X)),
        "a static method": (lambda x: u.Thing.still(x), (X,)),
        "a module": (lambda x: net(x), (X,)),
        "a module given": (lambda m, x: m(x), (net, X)),
        "itself a module": (net, (X,)),
        "a module inside": (nn.Sequential(nn.Identity(), net), (X,)),
        "later": (u.late, (X,)),
        "jitted inside": (lambda x: jitted(x) * 2, (X,)),
    }


@pytest.mark.parametrize("how", calls(fresh()))
def test_code_that_changes_is_seen(how: str) -> None:
    seen = 0
    for what in changes(fresh()):
        u = fresh()
        fn, args = calls(u)[how]
        step, before = sl.jit(fn), fn(*args)
        same(step(*args), before)
        same(step(*args), before)
        assert not step.retraces
        changes(u)[what]()
        with sl.no_mesh():
            after = fn(*args)
        same(step(*args), after)
        seen += not torch.equal(before, after)
    assert seen, "some change matters"


def test_a_function_that_is_defined_again_is_named() -> None:
    u = fresh()
    step = sl.jit(u.outer)
    step(X)
    u.helper = lambda x: x * 3
    same(step(X), X * 3 + 1)
    assert step.retraces == ["helper is another function now"]


def test_objects_of_two_classes_share_a_function() -> None:
    u = fresh()
    step = sl.jit(lambda thing, x: thing.scaled(x))
    base, thing = u.Base(), u.Thing()
    for _ in range(3):
        same(step(base, X), base.scaled(X))
        same(step(thing, X), thing.scaled(X))
    assert len(step.retraces) == 1
    u.SCALE = 5.0
    same(step(base, X), base.scaled(X))
    same(step(thing, X), thing.scaled(X))


def test_functions_made_for_each_call() -> None:
    step = sl.jit(lambda fn, x: fn(x))
    for i in range(4):
        same(step(lambda x, i=i: x * i, X), X * i)


def test_hooks_of_all_modules_are_seen() -> None:
    linear = nn.Linear(4, 4)
    step = sl.jit(linear)
    same(step(X), linear(X))
    hook: Any = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        same(step(X), linear(X))
    finally:
        hook.remove()
    same(step(X), linear(X))


# What nothing in the code says.


@pytest.mark.parametrize("long", [list, tuple, lambda items: dict(enumerate(items))])
def test_long_containers_of_numbers(long: Any) -> None:
    items: Any = list(range(5000))
    held = [long(items)]
    step = sl.jit(lambda x: x * held[0][4999])
    same(step(X), X * 4999)
    items[4999] = 7
    held[0] = long(items)
    same(step(X), X * 7)


def test_static_containers_count_by_what_they_hold() -> None:
    step = sl.jit(lambda x, config: x * config["scale"][0], static_argnums=1)
    config = {"scale": [2.0]}
    same(step(X, config), X * 2)
    config["scale"][0] = 3.0
    same(step(X, config), X * 3)


@pytest.mark.parametrize(
    ("fn", "view"),
    [
        (lambda x: torch.as_strided(x, (2,), (1,), 0) * 1, lambda: torch.arange(10.0)[3:7]),
        (lambda x: x.as_strided((2,), (1,), storage_offset=1) * 1, lambda: torch.arange(10.0)[3:7]),
        (lambda x: x * x.storage_offset(), lambda: torch.arange(10.0)[3:7]),
        (lambda x: x * 2 if x.is_conj() else x, lambda: torch.ones(4, dtype=torch.complex64).conj()),
    ],
)
def test_where_an_argument_lies_is_told_of_its_own_memory_alone(fn: Any, view: Any) -> None:
    step, own = sl.jit(fn), view().clone()
    for x in (view(), own, view(), own):
        if x is own:
            same(step(x), fn(x))
            continue
        with pytest.raises(
            sl.ShardingError, match=r"asks where its arguments lie in memory, at .*test_code\.py"
        ) as error:
            step(x)
        assert "Remedy: pass x.clone()" in str(error.value)


def test_slices_of_one_tensor_run_one_program() -> None:
    step, data = sl.jit(lambda x: x.as_strided((2, 2), (2, 1)) * 2), torch.arange(12.0)
    for i in range(3):
        same(step(data[4 * i : 4 * i + 4]), data[4 * i : 4 * i + 4].view(2, 2) * 2)
    assert not step.retraces


def test_writes_of_plain_values_keep_no_plain_memory() -> None:
    plain = torch.ones(4)
    for spec in ("a", "a@data"):
        x: Tensor = sl.shard(torch.zeros(4), spec)
        x.copy_(plain)
        plain.fill_(7)
        same(x, torch.ones(4))
        plain.fill_(1)
