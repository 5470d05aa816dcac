"""A `.grad` that a jitted function finds, and does not look at: its program is for any. Of others it counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import shardlib as sl

Step = Callable[[Any, Any, Tensor], Any]


class Net(nn.Module):
    """One of its parameters is in no result, another is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 3)
        self.unused, frozen = nn.Parameter(torch.ones(3)), torch.ones(3)
        self.frozen = nn.Parameter(frozen, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.used(x).tanh().square().mean()
        return loss


def drops(net: Any, opt: Any, x: Tensor) -> Tensor:
    opt.zero_grad()
    loss: Tensor = net(x)
    loss.backward()
    opt.step()
    return loss


def drops_of_the_module(net: Any, opt: Any, x: Tensor) -> None:
    net.zero_grad()
    net(x).backward()


def sets_none(net: Any, opt: Any, x: Tensor) -> None:
    for p in net.parameters():
        p.grad = None
    net(x).backward()


def deletes(net: Any, opt: Any, x: Tensor) -> None:
    for p in net.parameters():
        del p.grad
    net(x).backward()


def drops_alone(net: Any, opt: Any, x: Tensor) -> Any:
    opt.zero_grad()
    return net(x).detach()


def leaves_them(net: Any, opt: Any, x: Tensor) -> Any:
    return net(x).detach()


def adds(net: Any, opt: Any, x: Tensor) -> None:
    net(x).backward()


def adds_to_some(net: Any, opt: Any, x: Tensor) -> None:
    net.used.weight.grad = None
    net(x).backward()


def drops_at_the_end(net: Any, opt: Any, x: Tensor) -> Any:
    loss = net(x)
    loss.backward()
    found = net.used.bias.grad.clone()
    opt.zero_grad()
    return found


def zeroes(net: Any, opt: Any, x: Tensor) -> None:
    opt.zero_grad(set_to_none=False)
    net(x).backward()


def steps_first(net: Any, opt: Any, x: Tensor) -> None:
    opt.step()
    opt.zero_grad()
    net(x).backward()


def asks(net: Any, opt: Any, x: Tensor) -> int:
    found = sum(p.grad is not None for p in net.parameters())
    net.zero_grad()
    net(x).backward()
    return found


def asks_by_name(net: Any, opt: Any, x: Tensor) -> Any:
    found = getattr(net.used.weight, "grad", None)
    total = torch.zeros(()) if found is None else found.sum()
    net.zero_grad()
    net(x).backward()
    return total


def adds_again(net: Any, opt: Any, x: Tensor) -> None:
    """What is dropped first, and found after that, is its own."""
    net.zero_grad()
    net(x).backward()
    net(2 * x).backward()


def drops_of_equal_pieces(net: Any, opt: Any, x: Tensor) -> None:
    """From the third call on, its trace is a copy of one that was made apart."""
    net.zero_grad()
    sum(net(n * x) for n in range(4)).backward()


def asks_in_equal_pieces(net: Any, opt: Any, x: Tensor) -> Any:
    """A hook is part of a piece, and its stand-in of a parameter is what it asks."""
    asked = net.register_forward_pre_hook(lambda net, args: args[0] * (1 if net.used.weight.grad is None else 2))
    total = sum(net(n * x) for n in range(4)).detach()
    asked.remove()
    net.zero_grad()
    net(x).backward()
    return total


# How often it is compiled again in 3 calls: where nothing has a `.grad` at first, and where all parameters have one.
STEPS: dict[Step, tuple[int, int]] = {
    drops: (0, 0),
    drops_of_the_module: (0, 0),
    sets_none: (0, 0),
    deletes: (0, 0),
    drops_alone: (0, 0),
    leaves_them: (0, 0),
    adds_again: (0, 0),
    drops_of_equal_pieces: (0, 0),
    adds: (1, 0),
    adds_to_some: (1, 0),
    drops_at_the_end: (0, 1),
    zeroes: (1, 0),
    steps_first: (1, 1),
    asks: (1, 1),
    asks_by_name: (1, 1),
    asks_in_equal_pieces: (1, 1),
}


def run(step: Step, *, stale: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = Net().double()
    for p in net.parameters() if stale else ():
        p.grad = torch.full_like(p, 0.5)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    found = [step(net, opt, torch.linspace(-1, i, 32, dtype=torch.float64).view(8, 4)) for i in range(3)]
    return found, [*net.parameters()], [p.grad for p in net.parameters()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if not isinstance(a, Tensor):
        return bool(a == b)
    b = b.full_tensor() if isinstance(b, sl.ShardedTensor) else b
    return isinstance(b, Tensor) and torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("stale", [False, True], ids=["none", "stale"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_is_not_looked_at_is_no_reason_to_compile_again(step: Step, stale: bool) -> None:
    jitted = sl.jit(step, in_specs=(None, None, "b@data _"))
    with sl.Mesh(data=2):
        assert same(run(step, stale=stale), run(jitted, stale=stale))
    assert len(jitted.retraces) == STEPS[step][stale], jitted.retraces


def test_a_default_device_looks_at_nothing() -> None:
    """It is a mode of torch's, which is told of all that is asked."""
    jitted = sl.jit(drops, in_specs=(None, None, "b@data _"))
    with sl.Mesh(data=2), torch.device("cpu"):
        assert same(run(drops, stale=False), run(jitted, stale=False))
    assert not jitted.retraces


def test_a_mode_that_looks_is_seen() -> None:
    class Looks(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == torch.Tensor.grad.__get__:
                seen[0] = args[0].grad is not None
            return func(*args, **(kwargs or {}))

    seen = [False]
    jitted = sl.jit(drops, in_specs=(None, None, "b@data _"))
    with sl.Mesh(data=2), Looks():
        run(jitted, stale=False)
    assert len(jitted.retraces) == 1
    assert any(seen)


def test_of_one_function_some_calls_look() -> None:
    """The program of a call that drops them is none for one that adds to them, and the other way round."""

    def step(net: Any, opt: Any, x: Tensor) -> None:
        nonlocal turn
        if turn % 3 == 0:
            opt.zero_grad()
        net(x).backward()

    def all_turns(step: Step) -> tuple[Any, ...]:
        nonlocal turn
        torch.manual_seed(0)
        net, found = Net().double(), []
        opt = torch.optim.SGD(net.parameters(), 0.1)
        for turn in range(7):
            step(net, opt, torch.full((8, 4), turn / 10, dtype=torch.float64))
            found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        return tuple(found)

    turn = 0
    with sl.Mesh(data=2):
        assert same(all_turns(step), all_turns(sl.jit(step, in_specs=(None, None, "b@data _"))))


class Pieces(nn.Module):
    """Equal ones: from the third on, a trace is a copy of one that was made apart."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.net(n * x) for n in range(4)]).sum()


@pytest.mark.parametrize("make", [Net, Pieces])
@pytest.mark.parametrize("door", ["jit", "parallelize"])
def test_a_loop_outside_has_one_program(door: str, make: type[nn.Module]) -> None:
    nets = [make().double()]
    nets.append(copy.deepcopy(nets[0]))
    with sl.Mesh(data=2):
        program = sl.parallelize(nets[1]) if door == "parallelize" else nets[1]
        forward: Any = program.forward if door == "parallelize" else sl.jit(program, in_specs=("b@data _",))
        for i in range(3):
            x = torch.linspace(-1, i, 32, dtype=torch.float64).view(8, 4)
            for net in (nets[0], forward):
                net(x).backward()
        assert same([p.grad for p in nets[0].parameters()], [p.grad for p in program.parameters()])
        assert not forward.retraces


def test_an_error_leaves_them() -> None:
    def step(net: Any, opt: Any, x: Tensor) -> None:
        net.zero_grad()
        net(x).backward()
        raise ValueError("no")

    net = Net()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    before = [p.grad for p in net.parameters()]
    with sl.Mesh(data=2), pytest.raises(ValueError, match="no"):
        sl.jit(step)(net, None, torch.ones(8, 4))
    assert all(p.grad is grad for p, grad in zip(net.parameters(), before, strict=True))


def test_who_fails_for_want_of_one_is_shown_it() -> None:
    def by_hand(net: Any, opt: Any, x: Tensor) -> Any:
        grad = net.used.weight.grad
        if grad is None:
            raise ValueError("backward first")
        with torch.no_grad():
            net.used.weight -= grad
        return net(x).detach()

    with sl.Mesh(data=2):
        assert same(run(by_hand, stale=True), run(sl.jit(by_hand), stale=True))
        with pytest.raises(ValueError, match="backward first"):
            run(sl.jit(by_hand), stale=False)
