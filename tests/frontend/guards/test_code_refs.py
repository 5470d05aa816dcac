"""Code is part of a call's key: functions, methods and classes, and what all of them read, wherever they are found."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh
from tests.helpers.oracle import same

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

class Config:
    k = 2.0
    nested = type("Nested", (), {"k": 2.0})

    @classmethod
    def applied(cls, x):
        return x * cls.k

    def __call__(self, x):
        return x * self.k

class Sub(Config):
    pass

class Holder:
    config = Config()
    kind = Config

class Items(list):
    k = 2.0

class Missing(dict):
    def __missing__(self, key):
        return 2.0

def with_attribute(x):
    return x * getattr(with_attribute, "k", 1.0)

def with_class(x, config=Config):
    return x * config.k

def shadowed(x):
    return sum([x, x])

def imported(x):
    import users_settings as settings
    from users_settings.inner import k
    return x * settings.k * k
"""


def fresh() -> Any:
    """A module of the user's, each time another one."""
    space = types.ModuleType("users")
    exec(compile(SOURCE, "/home/users.py", "exec"), space.__dict__)
    space.later = 1.0  # type: ignore[attr-defined]
    for name in ("users_settings", "users_settings.inner"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].k = 2.0  # type: ignore[attr-defined]
    sys.modules["users_settings"].inner = sys.modules["users_settings.inner"]  # type: ignore[attr-defined]
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
        "a class's number": lambda: setattr(u.Config, "k", 5.0),
        "a class inside": lambda: setattr(u.Config.nested, "k", 5.0),
        "an override": lambda: setattr(u.Sub, "__call__", lambda self, x: x * 11),
        "an object of a class": lambda: setattr(u.Holder, "config", u.Sub()) or setattr(u.Sub, "k", 7.0),
        "a container's class": lambda: setattr(u.Items, "k", 5.0),
        "what is missing": lambda: setattr(u.Missing, "__missing__", lambda self, key: 5.0),
        "a function's attribute": lambda: setattr(u.with_attribute, "k", 5.0),
        "a builtin's name": lambda: setattr(u, "sum", lambda items: items[0] * 10),
        "a module's number": lambda: setattr(sys.modules["users_settings"], "k", 5.0),
        "an inner module's": lambda: setattr(sys.modules["users_settings.inner"], "k", 7.0),
        "named defaults, all": lambda: setattr(u.by_name, "__kwdefaults__", {"s": 5.0}),
        "a bound dict": lambda: u.TABLE.update(scale=9.0),
    }


def calls(u: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions and arguments that lead to the user's code in every way."""
    thing, net, jitted = u.Thing(), u.Net(), sl.jit(u.outer)
    users_settings = sys.modules["users_settings"]
    classes, missing, get, frozen = {"it": u.Config}, u.Missing(), u.TABLE.get, types.MappingProxyType(u.TABLE)
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
        "a net given": (lambda m, x: m(x), (net, X)),
        "itself a module": (net, (X,)),
        "a module inside": (nn.Sequential(nn.Identity(), net), (X,)),
        "later": (u.late, (X,)),
        "a class method": (lambda x: u.Config.applied(x), (X,)),
        "itself a class method": (u.Sub.applied, (X,)),
        "made inside": (lambda x: u.Sub()(x), (X,)),
        "a class given": (lambda config, x: x * config.k, (u.Config, X)),
        "a class in a dict": (lambda x: x * classes["it"].nested.k, (X,)),
        "a class by default": (u.with_class, (X,)),
        "a class in a class": (lambda x: x * u.Holder.kind.k * u.Holder.config.k, (X,)),
        "a list's class": (lambda items, x: x * items.k, (u.Items([1.0]), X)),
        "a dict's class": (lambda x: x * missing["it"], (X,)),
        "its own attribute": (u.with_attribute, (X,)),
        "a builtin": (u.shadowed, (X,)),
        "imported inside": (u.imported, (X,)),
        "a module in a module": (lambda x: x * users_settings.inner.k, (X,)),
        "a module given": (lambda module, x: x * module.k, (users_settings, X)),
        "a bound builtin": (lambda x: x * get("scale"), (X,)),
        "a read-only dict": (lambda x: x * frozen["scale"], (X,)),
        "jitted inside": (lambda x: jitted(x) * 2, (X,)),
    }


def matters(how: str, what: str) -> bool:
    u = fresh()
    fn, args = calls(u)[how]
    before = fn(*args)
    changes(u)[what]()
    with sl.no_mesh():
        return not torch.equal(before, fn(*args))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", calls(fresh()))
def test_code_that_changes_is_seen(how: str) -> None:
    seen = 0
    for i, what in enumerate(changes(fresh())):
        if i % 5 and not matters(how, what):
            continue  # of changes that are of no matter, some
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


def test_functions_that_change_places_are_compiled_once() -> None:
    u = fresh()
    step, two = sl.jit(u.outer), [u.helper, lambda x: x * 5]
    for i in range(6):
        u.helper = two[i % 2]
        same(step(X), u.outer(X))
    assert len(step.retraces) == 1


def test_a_class_that_names_its_type_takes_numbers() -> None:
    class Named:
        def __repr__(self) -> str:
            return type(self).__name__

    named = Named()
    step = sl.jit(lambda x, rate: x * rate if named else x)
    for rate in (0.1, 0.2, 0.3):
        same(step(X, rate), X * rate)
    assert not step.retraces
    pair = sl.jit(lambda x, a, b: x * a + b)
    for numbers in ((2, 3), (2, 2), (4, 4)):
        same(pair(X, *numbers), X * numbers[0] + numbers[1])
    assert not pair.retraces


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


def test_static_values_by_what_they_hold() -> None:
    class Plain:
        k = 1.0

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        n: Any

    plain, array = Plain(), np.ones(3)
    step = sl.jit(lambda x, held: x * held.k, static_argnums=1)
    first = sl.jit(lambda x, held: x * float(held[0]), static_argnums=1)
    for value in (1.0, 2.0):
        plain.k = array[0] = value
        same(step(X, plain), X * value)
        same(first(X, array), X * value)
    kinds = sl.jit(lambda x, held: x.long() * held.n, static_argnums=1)
    for n in (1, 1.0, True, 2):
        same(kinds(X, Frozen(n)), X.long() * n)


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
            sl.ShardingError, match=r"asks where its arguments lie in memory, at .*test_code_refs\.py"
        ) as error:
            step(x)
        assert "Remedy: pass x.clone()" in str(error.value)


def held() -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Functions of `x`, and what changes a number that they read."""

    class Meta(type):
        scale = 2.0
        settings: ClassVar = {"k": 2.0}

        @property
        def computed(cls) -> float:
            return cls.settings["k"]

    class Made(metaclass=Meta):
        pass

    class Descriptor:
        def __init__(self) -> None:
            self.k = 2.0

        def __get__(self, obj: Any, kind: Any = None) -> float:
            return self.k

    descriptor = Descriptor()
    Made.described = descriptor  # type: ignore[attr-defined]
    made, numbers, raw = Made(), array.array("d", [2.0]), bytearray(b"2")
    view = memoryview(raw)

    class Key:
        k = 2.0

    keys = {(key := Key()): 1, "other": 2}
    held_by_set = {key}
    return {
        "a metaclass": (lambda x: x * Made.scale, lambda: setattr(Meta, "scale", 3.0)),
        "a property of a metaclass": (lambda x: x * Made.computed, lambda: Meta.settings.update(k=3.0)),
        "a descriptor": (lambda x: x * made.described, lambda: setattr(descriptor, "k", 3.0)),
        "a descriptor of a class": (lambda x: x * Made.described, lambda: setattr(descriptor, "k", 3.0)),
        "a key": (lambda x: x * next(iter(keys)).k, lambda: setattr(key, "k", 3.0)),
        "a set": (lambda x: x * next(iter(held_by_set)).k, lambda: setattr(key, "k", 3.0)),
        "an array": (lambda x: x * numbers[0], lambda: numbers.__setitem__(0, 3.0)),
        "bytes": (lambda x: x * raw[0], lambda: raw.__setitem__(0, 3)),
        "a view of bytes": (lambda x: x * view[0], lambda: raw.__setitem__(0, 3)),
    }


@pytest.mark.parametrize("how", held())
def test_numbers_that_something_holds(how: str) -> None:
    fn, change = held()[how]
    step = sl.jit(fn)
    same(step(X), fn(X))
    same(step(X), fn(X))
    assert not step.retraces
    change()
    same(step(X), fn(X))
    assert step.retraces


W = torch.ones(4, requires_grad=True)
ASKED: dict[str, tuple[Any, str]] = {
    "address": (lambda x: x.data_ptr(), "the address (data_ptr) of x"),
    "of a value": (lambda x: (x * 2).data_ptr(), "the address (data_ptr) of a value of the trace"),
    "of what is closed over": (lambda x: W.data_ptr(), "the address (data_ptr) of W"),
    "writes": (lambda x: x._version, "the number of writes (_version) of x"),
    "history": (lambda x: x.grad_fn is None, "the history (grad_fn) of x"),
    "storage": (lambda x: x.untyped_storage().nbytes(), "the storage of x"),
    "typed storage": (lambda x: x.storage().size(), "the storage of x"),
    "view": (lambda x: x._is_view(), "what it is a view of (_is_view) of x"),
    "caught": (lambda x: _caught(lambda: x.data_ptr()), "the address (data_ptr) of x"),
}


def _caught(ask: Any) -> None:
    with contextlib.suppress(RuntimeError, sl.ShardingError):
        ask()


@pytest.mark.parametrize("name", ASKED)
def test_who_an_argument_is_is_not_told(name: str) -> None:
    ask, what = ASKED[name]
    with pytest.raises(sl.ShardingError) as error:
        sl.jit(lambda x: (x * 2, ask(x))[0])(W * 2)
    assert f"the traced function asks for {what}:\n  * " in str(error.value)
    assert "test_code_refs.py" in str(error.value)
    assert "Remedy: ask before the call" in str(error.value)


def test_whether_an_argument_is_a_leaf_is_told_of_the_callers_own() -> None:
    def asks(x: Tensor) -> Any:
        y = x * 1
        return y.detach() * (2 * x.is_leaf + 3 * x.retains_grad + 5 * y.is_leaf + 7 * (y.grad_fn is None))

    kept = W * 2
    kept.retain_grad()
    step = sl.jit(asks)
    for x in (
        W,
        W * 2,
        kept,
        torch.ones(4),
        sl.shard(torch.ones(4), "a@data"),
        sl.shard(W.detach(), "a").requires_grad_(),
    ):
        same(step(x), asks(x))


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
