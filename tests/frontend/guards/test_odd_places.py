"""What a function reads in odd places: classes of `exec`, names of modules as texts, objects that answer everything."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, ShardingError
from tests.helpers.oracle import same

X = torch.arange(24.0).view(6, 4).sin()
Case = tuple[Callable[[Tensor], Any], Callable[[], Any]]  # a function, and what changes what it reads


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2) as mesh:
        yield mesh


settings = types.ModuleType("odd_settings")
SOURCE = """
k, hidden = 2.0, {"z": 2.0}
def __getattr__(name):
    if name in hidden:
        return hidden[name]
    raise AttributeError(name)
"""
exec(SOURCE, vars(settings))
K = "k"


def imported(x: Tensor) -> Tensor:
    import odd_settings as here

    return x * getattr(here, K)


def renamed(x: Tensor) -> Tensor:
    m = settings
    return x * m.k


class Items(dict[str, Any]):
    __getattr__ = dict.__getitem__  # type: ignore[assignment]


class Open:
    """Has nothing but what its dict says, and fails in its own way."""

    def __init__(self, **given: Any) -> None:
        self.__dict__["given"] = given

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["given"][name]


class Closed:
    __slots__ = ("__k",)

    def __init__(self) -> None:
        self.__k = 2.0

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.__k


def executed() -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec("class Config:\n  k = 2.0\n  def scaled(self, x): return x * self.k\nconfig = Config()", space)
    return space


def cases() -> dict[str, Case]:
    vars(settings).update(k=2.0, hidden={"z": 2.0})
    sys.modules["odd_settings"] = settings
    executing, items, opened, closed, numbers = executed(), Items(k=2.0), Open(k=2.0), Closed(), [1.0, 1.0]
    config, length, cell = executing["config"], numbers.__len__, types.CellType(2.0)
    holder = types.SimpleNamespace(cell=cell)

    class Double:
        def scaled(self, x: Tensor) -> Tensor:
            return x * 2

    class Triple:
        def scaled(self, x: Tensor) -> Tensor:
            return x * 3

    class Heir(Double):
        pass

    heir = Heir()

    def change() -> None:
        vars(settings).update(k=3.0)
        settings.hidden["z"] = 3.0

    return {
        "exec": (lambda x: x * config.k, lambda: setattr(config, "k", 3.0)),
        "a class of exec": (lambda x: config.scaled(x), lambda: setattr(executing["Config"], "k", 3.0)),
        "a method of exec": (
            lambda x: config.scaled(x),
            lambda: setattr(executing["Config"], "scaled", lambda self, x: x * 3),
        ),
        "getattr": (lambda x: x * getattr(settings, K), change),
        "vars": (lambda x: x * vars(settings)["k"], change),
        "the dict": (lambda x: x * settings.__dict__[K], change),
        "sys.modules": (lambda x: x * sys.modules["odd_settings"].k, change),
        "import_module": (lambda x: x * importlib.import_module("odd_settings").k, change),
        "imported": (imported, change),
        "renamed": (renamed, change),
        "a module's own": (lambda x: x * settings.z, change),
        "a bound wrapper": (lambda x: x * length(), lambda: numbers.append(1.0)),
        "a cell": (lambda x: x * holder.cell.cell_contents, lambda: setattr(cell, "cell_contents", 3.0)),
        "bases": (lambda x: heir.scaled(x), lambda: setattr(Heir, "__bases__", (Triple,))),
        "items": (lambda x: x * items.k, lambda: items.update(k=3.0)),
        "an open object": (lambda x: x * opened.k, lambda: opened.given.update(k=3.0)),
        "a private slot": (lambda x: closed.scaled(x), lambda: setattr(closed, "_Closed__k", 3.0)),
    }


@pytest.mark.parametrize("how", cases())
def test_odd_places_are_read_anew(how: str) -> None:
    fn, change = cases()[how]
    step = sl.jit(fn)
    same(step(X), X * 2)
    same(step(X), X * 2)
    assert not step.retraces
    change()
    same(step(X), X * 3)


@pytest.mark.parametrize("make", [Items, Open])
def test_objects_that_answer_everything_are_arguments(make: Any) -> None:
    step = sl.jit(lambda x, config: x * config.k)
    for k in (2.0, 3.0, 3.0):
        same(step(X, make(k=k)), X * k)
    same(step(X, make(k=torch.ones(4))), X)


@pytest.mark.parametrize(
    "make", [lambda: np.random.RandomState(0), lambda: np.random.default_rng(0), lambda: random.Random(0)]
)
def test_draws_from_generators_that_are_held_are_refused(make: Any) -> None:
    generator, scale = make(), 2.0
    draw = generator.uniform
    with pytest.raises(ShardingError, match=f"draws random numbers from a {type(generator).__name__}"):
        sl.jit(lambda x: x * generator.uniform(0, 1))(X)
    with pytest.raises(ShardingError, match="draws random numbers"):
        sl.jit(lambda x: x * draw(0, 1))(X)
    same(sl.jit(lambda x: x * (scale if generator else 1.0))(X), X * 2)


def numbers() -> Iterator[float]:
    k = 0.0
    while True:
        k = (yield k) or k + 1


def begun(it: Any, steps: int) -> Any:
    for _ in range(steps):
        next(it)
    return it


class Count:
    def __init__(self) -> None:
        self.k = 0.0

    def __next__(self) -> float:
        self.k += 1
        return self.k


ITERATORS: dict[str, Callable[[], Any]] = {
    "a list's": lambda: iter([1.0, 2.0, 3.0]),
    "a list's in a list": lambda: [iter([1.0, 2.0])][0],
    "a dict's": lambda: iter({1.0: 1, 2.0: 2}),
    "a range's": lambda: iter(range(3)),
    "count": lambda: itertools.count(1),
    "cycle": lambda: itertools.cycle([1.0, 2.0, 3.0]),
    "cycle, again": lambda: begun(itertools.cycle([1.0, 2.0, 3.0]), 4),
    "zip": lambda: map(sum, zip([1.0, 2.0], [3.0, 4.0], strict=True)),
    "enumerate": lambda: map(max, enumerate([5.0, 6.0])),
    "chain": lambda: itertools.chain([1.0], [2.0]),
    "product": lambda: map(sum, itertools.product([1.0, 2.0], [3.0, 4.0])),
    "a generator": numbers,
    "a generator in a loop": lambda: begun(numbers(), 3),
    "an expression": lambda: (float(k) for k in range(3)),
    "a class's": Count,
    "a loader's": lambda: map(float, iter(torch.utils.data.DataLoader([1.0, 2.0, 3.0]))),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ITERATORS)
def test_iterators_are_not_gone_on_with(how: str) -> None:
    it: Any = None
    holder: dict[str, Any] = {}
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (lambda x: x * next(it), ()),
        (lambda x, it: x * next(it), (it,)),
        (lambda x: x * next(holder["it"]), ()),
    ]
    for fn, args in calls:
        it = ITERATORS[how]()
        holder["it"] = it
        with pytest.raises(ShardingError, match="takes items from an iterator") as error:
            sl.jit(fn)(X, *(it for _ in args))
        assert "Remedy: take them outside" in str(error.value)
        held = sl.jit(lambda x: x * len(holder))
        same(held(X), X)
        next(it)
        same(held(X), X)


def test_iterators_of_its_own_are_gone_on_with() -> None:
    table = [1.0, 2.0, 3.0]
    step = sl.jit(lambda x: x * next(iter(table)) + sum(a * b for a, b in zip(table, itertools.count(), strict=False)))
    same([step(X), step(X)], [X + 8, X + 8])
