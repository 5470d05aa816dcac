"""Modes and hooks of the caller's: each acts once, where it means something, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import shardlib as sl
from shardlib import Mesh
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.guards.torch_modes import ambient
from tests.helpers.oracle import same

X = torch.arange(16.0).view(4, 4).sin()


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2) as mesh:
        yield mesh


class Scaled(TorchFunctionMode):
    """Changes what `sin` and attention give."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.sin, F.scaled_dot_product_attention):
            return out * self.by
        return out


def attended(x: Tensor) -> Tensor:
    q = x.view(1, 1, 4, 4)
    return torch.sin(F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("fn", [torch.sin, lambda x: torch.sin(x), attended], ids=["itself", "a function", "attention"])
def test_function_modes_act_once(fn: Any) -> None:
    step = sl.jit(fn)
    for by in (None, 2.0, 3.0, None, 2.0):
        with nullcontext() if by is None else Scaled(by):
            same(step(X), fn(X))
    assert len(step.retraces) == 2, "a mode counts by what it holds"


def test_a_function_mode_does_not_name_the_tensors_of_a_global_hook() -> None:
    class Hook:
        def __init__(self) -> None:
            self.scale = torch.ones(2)

        def __call__(self, *args: Any) -> None: ...

    removed = nn.modules.module.register_module_forward_hook(Hook())  # type: ignore[arg-type]
    try:
        alone, under_a_mode = StateWalk(), StateWalk()
        ambient(alone)
        with Scaled(2.0):
            ambient(under_a_mode)
    finally:
        removed.remove()
    assert alone.names == under_a_mode.names


def test_modes_around_modes_act_in_their_order() -> None:
    class Plus(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out + 1 if func is torch.sin else out

    step = sl.jit(lambda x: torch.sin(x))
    for modes in ((Scaled(2.0), Plus()), (Plus(), Scaled(2.0))):
        with modes[0], modes[1]:
            same(step(X), torch.sin(X))


def test_what_a_mode_holds_may_change() -> None:
    step, mode = sl.jit(lambda x: torch.sin(x)), Scaled(2.0)
    for by in (2.0, 5.0):
        mode.by = by
        with mode:
            same(step(X), torch.sin(X))


class Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.sin.default else out


class Seen(TorchDispatchMode):
    only_observes = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sin.default:
            self.shapes.append(tuple(out.shape))
        return out


def test_dispatch_modes_of_users_are_refused_around_and_act_inside() -> None:
    step = sl.jit(lambda x: torch.sin(x))
    for _ in range(2):
        with Doubled(), pytest.raises(sl.ShardingError, match="under a dispatch mode of your own") as error:
            step(X)
        assert "test_torch_modes.Doubled" in str(error.value)
        assert "Remedy: enter the mode inside the function" in str(error.value)
        same(step(X), torch.sin(X))

    def inside(x: Tensor) -> Tensor:
        with Doubled():
            return torch.sin(x)

    same(sl.jit(inside)(X), torch.sin(X) * 2)
    for _ in range(2):
        with Seen() as seen:
            found = sl.jit(lambda x: torch.sin(x), in_specs="a@data b")(X)
        same(found, torch.sin(X))
        assert seen.shapes == [(2, 4)] * 2, "pieces, and nothing of the trace"
    placed = sl.shard(X, "a@data b")
    with Doubled():
        same(placed.redistribute("a b@data"), X)


def test_torchs_counters_see_what_runs_alone() -> None:
    step = sl.jit(lambda x: x @ x, in_specs="a b")
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            step(X)
        assert counter.get_total_flops() == 2 * 4**3, "devices that hold the same compute it once"
    assert not step.retraces


def test_hooks_on_what_autograd_saves_see_what_a_call_saves() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (w * x * w).sum()

    def grad(fn: Any) -> Any:
        w = torch.full((4, 4), 3.0, requires_grad=True)
        packed: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(type(t)) or t * 2, lambda t: t * 1):
            out = fn(w, X)
        out.backward()
        return w.grad, packed

    expected, _ = grad(loss)
    step = sl.jit(loss)
    for _ in range(2):
        found, packed = grad(step)
        same(found, expected)
        assert set(packed) == {Tensor}, "pieces, and nothing of the trace"
    with torch.autograd.graph.save_on_cpu():
        assert not step.retraces
        same(grad(step)[0], expected)
    w = X.clone().requires_grad_()
    step(w, X).backward()
    same(w.grad, 2 * X * X)


def exempt(w: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return X.float() @ w.float()


def mixed(w: Tensor) -> Tensor:
    y = X @ (w * 1)
    with torch.autocast("cpu", dtype=torch.float16):
        z = y @ (w * 1)
    with torch.autocast("cpu", enabled=False):
        return z.float() @ w


@pytest.mark.parametrize("fn", [exempt, mixed])
@pytest.mark.parametrize("spec", [None, "a@data b"])
def test_autocast_acts_while_tracing_alone(fn: Any, spec: str | None) -> None:
    def both(fn: Any) -> Any:
        w = X.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = fn(w)
        (out * out).sum().backward()
        return out.detach(), w.grad

    step, expected = sl.jit(fn, in_specs=spec, out_specs="a b@data"), both(fn)
    for _ in range(2):
        same(both(step), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moved = sl.shard(X.half(), "a@data b").redistribute("a b@data")
        step(X.clone().requires_grad_()).sum().backward()  # the way back, too
    same(moved, X.half())


@pytest.mark.parametrize("around", [True, False])
def test_gradients_are_taken_in_inference_mode(around: bool) -> None:
    both = sl.value_and_grad(lambda x: (x**3).sum())

    def inside(x: Tensor) -> Any:
        with torch.inference_mode(mode=True):
            return both(x)

    fn = both if around else inside
    with torch.inference_mode(mode=around):
        same(sl.jit(fn)(X), fn(X))


@pytest.fixture
def double() -> Iterator[Any]:
    """Sets the default dtype as its last caller wants it; afterwards it is what it was."""
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(before)


def test_a_default_dtype_set_inside_stays(double: Any) -> None:
    def numbers(x: Tensor, n: int) -> Any:
        torch.set_default_dtype(torch.float64)
        return torch.ones(4), torch.arange(n) / 3, torch.tensor(1.5), x + 1

    step = sl.jit(numbers)
    for _ in range(3):
        found = step(X, 4)
        assert torch.get_default_dtype() is torch.float64
        same(found, numbers(X, 4))
        torch.set_default_dtype(torch.float32)
    double()
    for _ in range(2):
        same(step(X, 4), numbers(X, 4))


def test_a_switch_that_is_thrown_is_thrown_in_every_call(double: Any) -> None:
    @sl.jit
    def toggled(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32)
        return x + 1

    for dtype in (torch.float64, torch.float32) * 2:
        toggled(X)
        assert torch.get_default_dtype() is dtype


@pytest.mark.parametrize("make", [lambda x: torch.ones(4), lambda x: torch.arange(4) / 3, lambda x: x.long().sin()])
def test_two_default_dtypes_are_refused(make: Any, double: Any) -> None:
    def restored(x: Tensor) -> Any:
        double()
        try:
            return make(x), x * 2, torch.ones(2, dtype=torch.float64)
        finally:
            torch.set_default_dtype(torch.float32)

    def late(x: Tensor) -> Any:
        found = make(x)
        double()
        return found

    for fn, said in ((restored, "torch.float64 at"), (late, "torch.float32 at")):
        with pytest.raises(sl.ShardingError, match="computes with one default dtype, and leaves another") as error:
            sl.jit(fn)(X)
        assert torch.get_default_dtype() is torch.float32
        assert said in str(error.value)
        assert "Remedy: set it around the call" in str(error.value)
