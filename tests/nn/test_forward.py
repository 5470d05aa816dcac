"""Which forward of a parallelized module runs: the one that plain torch would run."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import shardlib as sl
from shardlib import Mesh

X = torch.arange(24.0, dtype=torch.float64).view(6, 4) / 7


class Double(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def net() -> Any:
    """A module of a class of its own, which a test may change."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.scale = nn.Linear(4, 4, dtype=torch.float64), 1.0

        def helper(self, y: Tensor) -> Tensor:
            return y

        def forward(self, x: Tensor) -> Tensor:
            return self.helper(self.l(x) * self.scale)

    torch.manual_seed(0)
    return Net()


def seven(self: Any, x: Tensor) -> Tensor:
    return 7 * self.l(x)


def class_patched(m: Any) -> Any:
    type(m).forward = seven
    return m


def patched_and_back(m: Any) -> Any:
    with mock.patch.object(type(m), "forward", seven):
        m(X)
    return m


def patched_twice(m: Any) -> Any:
    for forward in (seven, lambda self, x: 9 * self.l(x), seven):
        type(m).forward = forward
        m(X)
    return m


def other_class(m: Any) -> Any:
    m.__class__ = type("Other", (type(m),), {"forward": seven})
    return m


def other_helper(m: Any) -> Any:
    m.__class__ = type("Other", (type(m),), {"helper": lambda self, y: 5 * y})
    return m


def calls_its_base(m: Any) -> Any:
    base = type(m)
    m.__class__ = type("Sub", (base,), {"forward": lambda self, x: base.forward(self, x) + 1})
    return m


def static(m: Any) -> Any:
    type(m).forward = staticmethod(lambda x: 3 * m.l(x))
    return m


def partial(m: Any) -> Any:
    type(m).forward = functools.partialmethod(lambda self, k, x: k * self.l(x), 3)
    return m


def of_the_instance(m: Any) -> Any:
    m.forward = types.MethodType(seven, m)
    return m


def wrapped(m: Any) -> Any:
    own = m.forward

    @functools.wraps(own)
    def forward(*args: Any) -> Any:
        return 3 * own(*args)

    m.forward = forward
    return m


def wrapped_and_back(m: Any) -> Any:
    own = m.forward
    wrapped(m)
    m.forward = own
    return m


def shallow(m: Any) -> Any:
    other = copy.copy(m)
    other.scale = 3.0
    return other


def shallow_of_a_patch(m: Any) -> Any:
    return class_patched(shallow(m))


def deep(m: Any) -> Any:
    other = copy.deepcopy(m)
    other.scale = 3.0
    return other


def hooked(m: Any) -> Any:
    m.register_forward_hook(lambda m, args, y: 2 * y)
    return m


def parametrized(m: Any) -> Any:
    parametrize.register_parametrization(m.l, "weight", Double())
    return m


HOW = [
    *(class_patched, patched_and_back, patched_twice, other_class, other_helper, calls_its_base, static, partial),
    *(of_the_instance, wrapped, wrapped_and_back, shallow, shallow_of_a_patch, deep, hooked, parametrized),
]


@pytest.mark.parametrize("door", ["cold", "warm", "jit", "jit, warm", "precision"])
@pytest.mark.parametrize("change", HOW)
def test_the_forward_of_plain_torch_runs(change: Callable[[Any], Any], door: str) -> None:
    with torch.no_grad():
        expected = change(net())(X)
        with Mesh(data=2):
            low = torch.float64 if door == "precision" else None
            model = sl.parallelize(net(), strategy="fsdp", precision=low)
            step = sl.jit(lambda m, x: m(x))
            if door in ("warm", "precision"):
                model(X)
            if door == "jit, warm":
                step(model, X)
            model = change(model)
            y = step(model, X) if "jit" in door else model(X)
        torch.testing.assert_close(y.full_tensor(), expected)


def test_a_forward_that_comes_back_finds_its_program() -> None:
    with Mesh(data=2):
        model = sl.parallelize(net(), strategy="fsdp")
        model(X)
        program = model.forward.program
        with mock.patch.object(type(model), "forward", seven):
            model(X)
            assert model.forward.program is not program
        assert model.forward.program is program


def test_a_shallow_copy_has_its_own_forward_with_the_same_options() -> None:
    with Mesh(data=2):
        model = sl.parallelize(net(), strategy="fsdp", precision=torch.float32)
        other = copy.copy(model)
    assert other.forward is not model.forward
    assert other.forward.module is other
    assert model.forward.module is model
    assert other.forward.policy is model.forward.policy


def test_what_a_user_put_on_the_instance_before_stays_the_forward() -> None:
    plain, model = net(), net()
    for m in (plain, model):
        m.forward = types.MethodType(seven, m)
    with Mesh(data=2):
        sl.parallelize(model, strategy="fsdp")
        type(model).forward = lambda self, x: x
        torch.testing.assert_close(model(X).full_tensor(), plain(X))
        other = copy.deepcopy(model)
        torch.testing.assert_close(other(X).full_tensor(), plain(X))
        assert other.forward.fn.__self__ is other


def test_a_pickled_module_runs_its_own_forward() -> None:
    with Mesh(data=2):
        model = sl.parallelize(nn.Linear(4, 4), strategy="fsdp")
        other = pickle.loads(pickle.dumps(model))
        assert other.forward.module is other
        torch.testing.assert_close(other(X.float()).full_tensor(), model(X.float()).full_tensor())


def test_a_retrace_with_one_object_more_of_a_kind_says_so() -> None:
    with Mesh(data=2):
        model = net()
        step = sl.jit(lambda m, x: m(x))
        step(model, X)
        step(other_class(model), X)
        assert len(step.retraces) == 1
