"""Values of a trace in places that nobody goes through: numbers are then constants, tensors are refused."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import shardlib as sl
from shardlib import Mesh, ShardingError
from tests.helpers.oracle import same

VARIABLE: ContextVar[Any] = ContextVar("variable", default=None)


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2) as mesh:
        yield mesh


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "key": lambda n: {n: 1},
    "key of keys": lambda n: {(n, 1): 2},
    "size": lambda n: torch.Size([n]),
}
OBJECTS: dict[str, Callable[[Any], Any]] = {
    "set": lambda n: {n},
    "frozen set": lambda n: frozenset([n]),
    "counter": lambda n: Counter([n]),
    "slice": lambda n: slice(n),
    "error": lambda n: ValueError(n),
    "array": lambda n: np.array([n, 1]),
    "product of an array": lambda n: np.arange(3) * n,
    "objects": lambda n: np.array([n, None]),
}


@pytest.mark.parametrize("keep", OBJECTS.values(), ids=OBJECTS)
def test_objects_of_numbers_that_are_kept_are_refused(keep: Callable[[Any], Any]) -> None:
    owner = types.SimpleNamespace(value=None)

    def fn(x: Tensor, n: Any) -> Tensor:
        owner.value = keep(n)
        return x * n

    with pytest.raises(ShardingError, match=r"\* owner.value, read in fn at .*: (?:another|a) .* is bound\n"):
        sl.jit(fn)(torch.ones(4), 3)
    assert owner.value is None


@pytest.mark.parametrize("keep", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_are_kept_are_numbers(keep: Callable[[Any], Any]) -> None:
    owner = types.SimpleNamespace(value=None)

    def fn(x: Tensor, n: Any) -> Tensor:
        owner.value = keep(n)
        return x * n

    step = sl.jit(fn)
    for n in (3, 4):
        same(step(torch.ones(4), n), torch.full((4,), float(n)))
        assert repr(owner.value) == repr(keep(n))
        assert "Given" not in repr(list(map(type, owner.value if isinstance(owner.value, dict | set) else ())))


def test_a_counter_that_is_a_key_stays_a_number() -> None:
    seen: dict[Any, Any] = {}
    count = types.SimpleNamespace(n=0)

    def fn(x: Tensor) -> Tensor:
        count.n += 1
        seen[count.n] = x.sum()
        VARIABLE.set(count.n)
        return x * 2

    step = sl.jit(fn)
    for n in range(1, 4):
        step(torch.ones(4) * n)
        assert type(max(seen)) is type(VARIABLE.get()) is int
        assert max(seen) == VARIABLE.get() == n
    same(seen, {n: torch.tensor(4.0 * n) for n in range(1, 4)})


def test_a_power_with_a_modulus() -> None:
    same(sl.jit(lambda x, n: x * pow(n, 2, 5))(torch.ones(2), 3), torch.full((2,), 4.0))


TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "key": lambda y: {y: 1},
    "method": lambda y: y.add,
    "slice": lambda y: slice(y),
    "iterator": lambda y: iter([y]),
    "generator": lambda y: (z for z in [y]),
    "error": lambda y: ValueError(y),
    "values": lambda y: {1: y}.values(),
    "key of keys": lambda y: {(1, y): 2},
    "variable": lambda y: VARIABLE.set(y),
}


@pytest.mark.parametrize("keep", TENSORS.values(), ids=TENSORS)
def test_tensors_that_are_kept_are_refused(keep: Callable[[Tensor], Any]) -> None:
    owner = types.SimpleNamespace(value=None)

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        owner.value = keep(y)
        return y + 1

    with pytest.raises(
        ShardingError, match=r"fn keeps tensors .*\n  \* an? \w+ .*holds a value of the trace, f32\[4\]"
    ):
        sl.jit(fn)(torch.ones(4))
    assert owner.value is None


EXPORTS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": np.from_dlpack,
    "torch": torch.from_dlpack,
    "capsule": lambda x: x.__dlpack__(),
    "to_dlpack": torch.utils.dlpack.to_dlpack,
}


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_memory_of_a_trace_is_not_handed_out(export: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ShardingError, match="hands out the memory of a tensor by DLPack"):
        sl.jit(lambda x: export(x) is None)(torch.ones(4))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(x), 0.5)


def test_nothing_of_a_trace_is_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks what outlived it need not collect garbage, which takes as long as planning a small program."""
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda *_: collected.append(1))
    layers = nn.Sequential(_Layer(), _Layer(), _Layer())
    sl.jit(lambda x: layers(x) * torch.tensor(2.0)).plan(torch.ones(4, 4))
    assert not collected


@pytest.mark.long
def test_the_first_trace_of_a_process_collects_and_loads_little() -> None:
    code = """if True:
        import gc, sys, torch, shardlib as sl
        gc.collect = lambda *_: print("collects")
        with sl.Mesh(data=2):
            sl.jit(torch.mul).plan(torch.ones(4), 2.0)
        print(*{"torch.export._trace", "networkx"} & {*sys.modules})
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("\n", 0), done.stderr


@pytest.mark.long
def test_the_cache_of_parametrizations_is_called_so() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 4)).double()
    model, x = copy.deepcopy(plain), torch.randn(4, 6, dtype=torch.float64)

    def both(model: nn.Module, x: Tensor) -> Tensor:
        with parametrize.cached():
            return model(x) + model(-x).square()

    with sl.Mesh(data=2):
        sl.parallelize(model, strategy="fsdp")
        with pytest.raises(ShardingError, match=r"inside torch\.nn\.utils\.parametrize\.cached") as error:
            both(model, x)
        assert "  * weight of a module, f64[6, 6]" in str(error.value)
        assert "Remedy: enter parametrize.cached() inside the jitted function" in str(error.value)
        torch.testing.assert_close(sl.jit(both)(model, x).full_tensor(), both(plain, x))
