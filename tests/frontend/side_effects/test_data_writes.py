"""Memory that changes hands: `x.data = y`, gradients that are given to others, and views of what a call was given."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, ShardingError
from tests.helpers.oracle import same

Step = Callable[[Tensor], Any]
Make = Callable[[nn.Linear, nn.Linear], Step]
MESH = Mesh(data=2, tensor=2)


def _evaluated(m: nn.Linear, e: nn.Linear) -> Step:
    def step(x: Tensor) -> Tensor:
        m.weight.data, e.weight.data = e.weight.data, m.weight.data
        y = m(x).detach()
        m.weight.data, e.weight.data = e.weight.data, m.weight.data
        return y

    return step


def _swapped(m: nn.Linear, e: nn.Linear) -> Step:
    def step(x: Tensor) -> Tensor:
        m.weight.data, e.weight.data = e.weight.data, m.weight.data
        return m(x).detach()

    return step


def _binary(m: nn.Linear, e: nn.Linear) -> Step:
    def step(x: Tensor) -> Tensor:
        whole = m.weight.data
        m.weight.data = whole.sign()
        m(x).square().mean().backward()
        m.weight.data = whole
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
        return m(x).detach()

    return step


def _differences(m: nn.Linear, e: nn.Linear) -> Step:
    def step(x: Tensor) -> Tensor:
        whole, found = m.weight.data, []
        for h in (0.1, -0.1):
            m.weight.data = whole + h
            found.append(m(x).square().sum().detach())
        m.weight.data = whole
        return found[0] - found[1]

    return step


def _descended(m: nn.Linear, e: nn.Linear) -> Step:
    before = m.weight.data

    def step(x: Tensor) -> Any:
        m.zero_grad()
        m(x).square().mean().backward()
        for p in m.parameters():
            p.data = p.data - 0.1 * p.grad
        return before.sum(), m.weight.sum().detach()

    return step


def _looked_ahead(m: nn.Linear, e: nn.Linear) -> Step:
    slow = [p.data for p in m.parameters()]

    def step(x: Tensor) -> Tensor:
        m.zero_grad()
        m(x).square().mean().backward()
        for p, s in zip(m.parameters(), slow, strict=True):
            p.data = s - 0.1 * p.grad
        return torch.stack([s.sum() for s in slow])

    return step


def _of_its_own(m: nn.Linear, e: nn.Linear) -> Step:
    def step(x: Tensor) -> Any:
        y = x * 2
        old, row = y.data, y[1:3]
        y.data = torch.ones_like(y)
        row.add_(5)
        y[0].mul_(3)
        return y, old + 1, row

    return step


def _of_what_was_written(m: nn.Linear, e: nn.Linear) -> Step:
    def step(x: Tensor) -> Any:
        y = x * 2
        z = y.add_(1)
        row = z[1]
        y.data = torch.ones_like(y)
        y.mul_(2)
        row.add_(5)
        z[2].mul_(3)
        return y, z, row

    return step


def _of_a_view(m: nn.Linear, e: nn.Linear) -> Step:
    def step(x: Tensor) -> Any:
        y = x * 2
        row = y[1:3]
        row.data = torch.zeros_like(row)
        row.add_(1)
        other = y[0:2]
        other.data = y[2:4]
        other.mul_(2)
        return y, row, other

    return step


def _cleared(m: nn.Linear, e: nn.Linear) -> Step:
    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            m.weight.mul_(2)
        m.weight.data = m.weight.data * 0 + 1
        return m(x).detach()

    return step


STEPS: dict[str, Make] = {
    "weights are swapped for an evaluation": _evaluated,
    "weights stay swapped": _swapped,
    "a binary copy": _binary,
    "finite differences": _differences,
    "descent": _descended,
    "lookahead": _looked_ahead,
    "a value of its own": _of_its_own,
    "a value that was written": _of_what_was_written,
    "a view of its own": _of_a_view,
    "a write before": _cleared,
}


def _models(placed: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    made = nn.Linear(8, 4), nn.Linear(8, 4)
    for m in made if placed else ():
        m.weight = nn.Parameter(sl.shard(m.weight.detach(), "out@data in@tensor"))
    return made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placed", [False, True], ids=["plain", "placed"])
@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_data_that_is_set(make: Make, placed: bool) -> None:
    with MESH:
        ours, theirs = _models(placed), _models(False)
        held = [p.data for m in ours for p in m.parameters()], [p.data for m in theirs for p in m.parameters()]
        step, plain = sl.jit(make(*ours)), make(*theirs)
        for seed in range(3):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
            same(step(x), plain(x))
            for m, n in zip(ours, theirs, strict=True):
                same(dict(m.named_parameters()), dict(n.named_parameters()))
            same(*held)


def test_data_that_is_tied_shares_memory() -> None:
    with MESH:
        m, e = _models(False)
        sl.jit(lambda: setattr(e.weight, "data", m.weight.data))()
        assert e.weight.data_ptr() == m.weight.data_ptr()


def _given(a: Any, b: Any) -> None:
    a.grad = b.grad


def _exchanged(a: Any, b: Any) -> None:
    a.grad, b.grad = b.grad, a.grad


@pytest.mark.parametrize("placed", [False, True], ids=["plain", "placed"])
@pytest.mark.parametrize("fn", [_given, _exchanged])
def test_gradients_that_change_hands_stay_themselves(fn: Callable[[Any, Any], None], placed: bool) -> None:
    with MESH:

        def make() -> Any:
            x = torch.ones(4)
            return nn.Parameter(sl.shard(x, "a@data") if placed else x)

        a, b = make(), make()
        a.grad, b.grad = make().detach(), make().detach() * 2
        want = types.SimpleNamespace(grad=a.grad), types.SimpleNamespace(grad=b.grad)
        step = sl.jit(lambda: fn(a, b))
        for _ in range(3):
            step()
            fn(*want)
            assert a.grad is want[0].grad
            assert b.grad is want[1].grad


def seen_of(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, sl.ShardedTensor) else x).detach().clone()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "rows": lambda w: w.detach()[1:2],
    "transposed": lambda w: w.detach().T,
    "flat": lambda w: w.detach().flatten(),
    "other dims": lambda w: w.detach().view(2, -1),
    "a column": lambda w: w.detach()[:, 1],
    "steps": lambda w: w.detach()[::2, 1:],
    "a copy": lambda w: w.detach().clone(),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("placed", [False, True], ids=["plain", "placed"])
@pytest.mark.parametrize("writes", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_that_is_kept_shows_what_it_is_of(view: Callable[[Tensor], Tensor], writes: bool, placed: bool) -> None:
    def run(jitted: bool) -> list[Any]:
        m, owner, seen = _models(placed and jitted)[0], types.SimpleNamespace(kept=None), []

        def keep(x: Tensor) -> Tensor:
            owner.kept = view(m.weight)
            if writes:
                with torch.no_grad():
                    m.weight.mul_(2)
            return m(x).sum()

        step = sl.jit(keep) if jitted else keep
        for _ in range(3):
            step(torch.ones(2, 8))
            seen.append(seen_of(owner.kept))
            with torch.no_grad():
                m.weight.add_(1)
                seen.append(seen_of(owner.kept))
                owner.kept.mul_(3)
            seen += [seen_of(owner.kept), seen_of(m.weight)]
        return seen

    with MESH:
        same(run(True), run(False))


def test_a_module_that_is_converted_inside_is_refused() -> None:
    m = nn.Linear(8, 4)

    def fn(x: Tensor) -> Tensor:
        return m.half()(x)

    with MESH, pytest.raises(ShardingError, match=r"converts a module[^$]*Linear.weight is \[4, 8\] of torch.float32"):
        sl.jit(fn)(torch.ones(1, 8))
    with MESH:
        same(sl.jit(lambda x: m.float().to("cpu")(x))(torch.ones(1, 8)), m(torch.ones(1, 8)))
