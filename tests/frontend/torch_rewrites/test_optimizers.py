"""An ordinary training step as one program: optimizers make their state inside; what their settings become is seen."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.frontend.guards import state_walk as state

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum, dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam, upwards": lambda p: torch.optim.Adam(
        p, lr=0.01, weight_decay=0.1, maximize=True, betas=(0.5, 0.9), eps=1e-3
    ),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    **{f"{k}, foreach": lambda p, k=k: getattr(torch.optim, k)(p, foreach=True) for k in ("NAdam", "RAdam", "RMSprop")},
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "NAdam, upwards": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1, maximize=True),
    "NAdam, decoupled": lambda p: torch.optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, lambd=0.1, t0=2, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.01),
    "Adagrad, foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adafactor, foreach": lambda p: torch.optim.Adafactor(p, lr=0.1, d=1.5, weight_decay=0.1, foreach=True),
    "Muon": lambda p: torch.optim.Muon([w for w in p if w.dim() == 2], lr=0.01),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.norm(self.up(x))))
        return y


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    opt.zero_grad()
    return loss


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x


def trained(make: Any, run: Callable[..., Tensor], placed: Callable[[Net], None], lr: Callable[[int], float]) -> Any:
    torch.manual_seed(0)
    model = Net().double()
    placed(model)
    opt = make(list(model.parameters()))
    losses = []
    for i in range(4):
        opt.param_groups[0]["lr"] = lr(i)
        losses.append(whole(run(model, opt, torch.randn(8, 4, dtype=torch.float64))).detach())
    moments = [whole(x) for p in model.parameters() for x in opt.state[p].values() if isinstance(x, Tensor)]
    return model, opt, [*losses, *(whole(x).detach() for x in model.state_dict().values()), *moments]


def shard_all(model: Net) -> None:
    for linear, spec in ((model.up, "out@tensor in"), (model.down, "out in@tensor")):
        linear.weight = nn.Parameter(sl.shard(linear.weight.detach(), spec))


@pytest.mark.long
@pytest.mark.sampled(23)
@pytest.mark.parametrize("placed", [lambda model: None, shard_all], ids=["plain", "sharded"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_whole_step_is_one_program(name: str, placed: Callable[[Net], None]) -> None:
    make = OPTIMIZERS[name]
    rates = lambda i: 0.02 / (1 + i)
    *_, expected = trained(make, step, lambda model: None, rates)
    with sl.Mesh(data=2, tensor=2):
        jitted = sl.jit(step, in_specs=(None, None, "b@data e"))
        model, opt, found = trained(make, jitted, placed, rates)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    # Moments are there before the first step, and rates are inputs. Those that begin with the gradient make theirs
    # inside; what Muon does not step keeps its gradient.
    first = {"SGD, momentum, dampened": 1, "Muon": 1}
    assert len(jitted.retraces) == first.get(name, 0), jitted.retraces
    for p in model.parameters():
        for x in opt.state[p].values():
            if isinstance(x, Tensor) and x.shape == p.shape:
                assert type(x) is type(p.data)
                assert sl.typeof(x) == sl.typeof(p.detach()), "what is kept of a parameter lives as that does"


class Half(nn.Module):
    """One of its layers is in no result, another is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = (nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.used(x))
        return y


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adafactor])
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
def test_the_first_step_is_no_program_of_its_own(scheduled: bool, make: Any) -> None:
    x = torch.ones(8, 4)
    with sl.Mesh(data=2):
        model = sl.parallelize(Half(), strategy="zero1")
        opt = make(model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5) if scheduled else None
        before = vars(opt) | {"defaults": dict(opt.defaults)}
        jitted = sl.jit(step)
        jitted.plan(model, opt, x)
        assert vars(opt) == before, "a plan leaves nothing behind"
        assert not opt.state
        for _ in range(3):
            jitted(model, opt, x)
            if schedule is not None:
                schedule.step()
    assert jitted.retraces == []
    assert [p is model.used.weight or p is model.used.bias for p in opt.state] == [True, True]
    kept = [x for x in opt.state[model.used.weight].values() if x.shape == (4, 4)]
    assert kept or make is torch.optim.Adafactor
    assert all(sl.typeof(x) == "f32[4@data, 4]" for x in kept)


@pytest.mark.parametrize("closed", [False, True], ids=["arguments", "closed over"])
def test_the_mesh_is_that_of_the_parameters(closed: bool) -> None:
    x = torch.ones(8, 4)
    model = sl.parallelize(Half(), strategy="fsdp", mesh=sl.Mesh(data=2))
    opt = torch.optim.Adam(model.parameters())
    jitted = sl.jit(lambda x: step(model, opt, x)) if closed else sl.jit(functools.partial(step, model, opt))
    first, second = jitted(x), jitted(x)
    assert float(second) != float(first)
    assert "on data=2 (2 devices, virtual)" in jitted.plan(x).full
    other = sl.parallelize(Half(), mesh=sl.Mesh(data=4))
    with pytest.raises(sl.ShardingError) as caught:
        sl.jit(lambda x: model(x) + other(x))(x)
    assert "it finds tensors on Mesh(data=2)\n  * it finds tensors on Mesh(data=4)" in str(caught.value)


@pytest.mark.parametrize("lr", [{}, {"lr": 0.05}], ids=["same rate", "own rate"])
def test_parameters_that_join_an_optimizer_later_are_trained(lr: dict[str, float]) -> None:
    """Nobody's code names `param_groups`, but torch's reads it: a list of a library's object is no log."""

    def train(through: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        net, run = Half().double(), through(step)
        net.frozen.requires_grad_()
        opt = torch.optim.SGD(net.used.parameters(), lr=0.1)
        for i in range(3):
            if i == 1:
                opt.add_param_group({"params": list(net.frozen.parameters()), **lr})
            run(net, opt, torch.ones(8, 4).double())
        return list(net.parameters())

    with sl.Mesh(data=2):
        got = train(sl.jit)
    for ours, theirs in zip(got, train(lambda fn: fn), strict=True):
        torch.testing.assert_close(whole(ours), theirs, rtol=1e-12, atol=0)


def test_who_does_not_step_makes_no_moments() -> None:
    x = torch.ones(8, 4)
    with sl.Mesh(data=2):
        model = sl.parallelize(Half())
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        rate = sl.jit(lambda model, opt, x: model(x).sum() * opt.param_groups[0]["lr"])
        float(rate(model, opt, x))
        assert not opt.state

        def fails(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
            step(model, opt, x)
            raise KeyError("no such thing")

        with pytest.raises(KeyError, match="no such thing"):
            sl.jit(fails)(model, opt, x)
        assert not opt.state
        assert all(p.grad is None for p in model.parameters())


def test_moments_that_were_loaded_move_to_where_the_strategy_says() -> None:
    x = torch.ones(8, 4)
    plain, model = Half(), Half()
    model.load_state_dict(plain.state_dict())
    first = torch.optim.Adam(plain.parameters())
    step(plain, first, x)
    with sl.Mesh(data=2):
        sl.parallelize(model, strategy="zero1")
        opt = torch.optim.Adam(model.parameters())
        opt.load_state_dict(copy.deepcopy(first.state_dict()))
        jitted = sl.jit(step)
        jitted(model, opt, x)
        jitted(model, opt, x)
    step(plain, first, x)
    step(plain, first, x)
    assert jitted.retraces == []
    assert sl.typeof(opt.state[model.used.weight]["exp_avg"]) == "f32[4@data, 4]"
    kept = opt.state[model.used.weight]["exp_avg"].full_tensor()
    torch.testing.assert_close(kept, first.state[plain.used.weight]["exp_avg"])


def test_many_parameters_are_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LONG", 14)  # settings of Adam are fewer

    def weights(run: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
        opt = torch.optim.Adam(model.parameters())
        for _ in range(3):
            run(model, opt, torch.ones(2, 2))
        return [x.detach() for x in (*model.parameters(), *(s["exp_avg_sq"] for s in opt.state.values()))]

    with sl.Mesh(data=2):
        found = weights(sl.jit(step))
    for a, b in zip(found, weights(step), strict=True):
        torch.testing.assert_close(a, b)


def test_a_parameter_that_is_gone_is_none_of_the_program() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    opt = torch.optim.Adam(weights)

    @sl.jit
    def once(x: Tensor) -> None:
        (weights[0] * x).sum().backward()
        opt.step()

    with sl.Mesh(data=2):
        once(torch.ones(3))
        kept = copy.deepcopy(opt.state[weights[0]])
        assert weights[1] not in opt.state
        opt.state.clear()
        weights[0].grad = None
        with torch.no_grad():
            weights[0].fill_(1.0)
        once(torch.ones(3))
    for a, b in zip(opt.state[weights[0]].values(), kept.values(), strict=True):
        torch.testing.assert_close(a, b)


class Held:
    """Something with attributes."""

    n: Any = 0.0
    best: Any = 9.0
    loss: Any = 1.0


class Checked:
    """Whose setter looks at what it is given."""

    __slots__ = ("n",)

    def __setattr__(self, name: str, value: Any) -> None:
        assert isinstance(value, float)
        object.__setattr__(self, name, value)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Held) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.held.n * grad, None


def _read_on_the_way_back(held: Held, x: Tensor) -> Tensor:
    y: Tensor = Reversed.apply(x, held)
    return y.sum()


def _computed_again(held: Held, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda x: torch.sin(x * held.n), x, use_reentrant=False)
    return y.sum()


def _counted_and_computed_again(held: Held, x: Tensor) -> Tensor:
    held.n += 0.5
    return _computed_again(held, x)


@pytest.mark.parametrize("kind", [Held, Checked])
@pytest.mark.parametrize("fn", [_read_on_the_way_back, _computed_again, _counted_and_computed_again])
def test_numbers_that_the_caller_changes_are_inputs_forward_and_backward(fn: Any, kind: Any) -> None:
    def gradients(through: Callable[[Any], Any]) -> list[float]:
        held, w, found = kind(), nn.Parameter(torch.ones(2)), []
        run = through(lambda x: fn(held, x * w))
        for i in range(5):
            held.n, w.grad = 0.3 * (i + 1), None
            run(torch.ones(2)).backward()
            assert w.grad is not None
            found += [whole(w.grad)[0].item(), held.n]
        return found

    with sl.Mesh(data=2):
        jitted: list[Any] = []
        found = gradients(lambda f: jitted.append(sl.jit(f)) or jitted[0])
    assert found == pytest.approx(gradients(lambda f: f))
    assert len(jitted[0].retraces) <= 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("name", ["SGD, momentum, dampened", "Adam"])
def test_state_is_that_of_the_parameter_that_is_there_now(name: str, cleared: bool) -> None:
    def train(run: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        opt = OPTIMIZERS[name](list(model.parameters()))
        for i in range(4):
            if i == 2:
                model.weight = nn.Parameter(model.weight.detach().clone())
                opt.param_groups[0]["params"][0] = model.weight
                if cleared:
                    opt.state.clear()
            run(model, opt, torch.ones(2, 4, dtype=torch.float64))
        return [model.weight.detach(), torch.tensor([len(opt.state), model.weight in opt.state])]

    with sl.Mesh(data=2):
        found = train(sl.jit(step))
    for a, b in zip(found, train(step), strict=True):
        torch.testing.assert_close(a, b)


def test_what_no_program_repeats_is_not_taken_back() -> None:
    def least(through: Callable[[Any], Any]) -> list[float]:
        held, found = Held(), []

        def note(x: Tensor) -> Tensor:
            held.best = min(held.best, held.loss)
            return x

        run = through(note)
        for loss in (8.0, 7.0, np.float64(6.5), np.float64(5.0)):
            held.loss = loss
            run(torch.ones(2))
            found.append(held.best)
        return found

    with sl.Mesh(data=2):
        assert least(sl.jit) == least(lambda f: f) == [8.0, 7.0, 6.5, 5.0]


def test_numbers_beside_what_no_program_repeats_are_their_own() -> None:
    def counted(through: Callable[[Any], Any]) -> list[Any]:
        held, found = Held(), []
        held.last = 1.0

        def note(x: Tensor) -> Tensor:
            held.best, held.n = min(held.best, held.loss), held.n + 1.0
            held.last = held.last * 2
            return x * held.n

        run = through(note)
        for loss in (8.0, 7.0, np.float64(6.5), np.float64(5.0)):
            held.loss = loss
            found.append((whole(run(torch.ones(1))).item(), held.best, held.n, held.last))
        return found

    with sl.Mesh(data=2):
        assert counted(sl.jit) == counted(lambda f: f)


def test_objects_in_turns_have_numbers_of_their_own() -> None:
    pair, run = (Held(), Held()), sl.jit(lambda held, x: x * held.n)
    with sl.Mesh(data=2):
        for i in range(12):
            pair[i % 2].n += 0.5 + i % 2
            torch.testing.assert_close(whole(run(pair[i % 2], torch.ones(2))), torch.full((2,), pair[i % 2].n))
    assert len(run.retraces) <= 3


def _loss(params: list[nn.Parameter]) -> Tensor:
    return torch.stack([(p * p * (1 + i)).sum() for i, p in enumerate(params)]).sum()


def _two_steps(params: list[nn.Parameter], opt: torch.optim.Optimizer) -> None:
    for _ in range(2):
        opt.zero_grad()
        _loss(params).backward()  # type: ignore[no-untyped-call]
        opt.step()


def _gradients_add_up(params: list[nn.Parameter], opt: torch.optim.Optimizer) -> None:
    _loss(params).backward()  # type: ignore[no-untyped-call]
    opt.step()


def _decayed_before(params: list[nn.Parameter], opt: torch.optim.Optimizer) -> None:
    opt.zero_grad(set_to_none=False)
    _loss(params).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for p in params:
            p.mul_(0.9)
    opt.step()


@pytest.mark.sampled(17)
@pytest.mark.parametrize(
    ("body", "placed"),
    [(_two_steps, False), (_gradients_add_up, True), (_decayed_before, False)],
    ids=["two steps", "gradients add up", "decayed before"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_of_one_shape_are_each_their_own(name: str, body: Any, placed: bool) -> None:
    """What is done to one is copied for the others: with their gradients, whatever was written to them before."""

    def run(jitted: bool) -> list[Tensor]:
        params = [nn.Parameter(torch.full((4, 2), 1.0 + i, dtype=torch.float64)) for i in range(4)]
        with sl.Mesh(data=2):
            if jitted and placed:
                params = [nn.Parameter(sl.shard(p.detach(), "a@data _")) for p in params]
            opt = OPTIMIZERS[name](params)
            step = sl.jit(body) if jitted else body
            for _ in range(3):
                step(params, opt)
        return [whole(p).detach() for p in params]

    for a, b in zip(run(jitted=True), run(jitted=False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class Asking(nn.Linear):
    """Its code asks for a type, so that numbers among its settings are constants."""

    slope: float = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * (self.slope if type(self.slope) is float else 0.0)
        return y


def test_rates_are_inputs_where_code_asks_for_types() -> None:
    with sl.Mesh(data=2):
        model = sl.parallelize(Asking(4, 4))
        opt = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        jitted = sl.jit(step)
        for _ in range(3):
            jitted(model, opt, torch.ones(8, 4))
            schedule.step()
        assert jitted.retraces == []
        model.slope = 3.0
        jitted(model, opt, torch.ones(8, 4))
        assert jitted.retraces == ["model.slope is new"]


def test_who_asks_for_the_type_of_a_rate_gets_it() -> None:
    def asks(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = step(model, opt, x)
        return loss * (1 if type(opt.param_groups[0]["lr"]) is float else 0)

    with sl.Mesh(data=2):
        model = sl.parallelize(nn.Linear(4, 4))
        opt = torch.optim.AdamW(model.parameters())
        assert float(sl.jit(asks)(model, opt, torch.ones(8, 4))) > 0


def _set(**settings: Any) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda opt: opt.param_groups[0].update(settings)


def _warm(opt: torch.optim.Optimizer) -> None:
    opt.param_groups[0]["lr"] = 0.1 if opt.state else 0.001


def _begin_otherwise(opt: torch.optim.Optimizer) -> None:
    for p in opt.param_groups[0]["params"]:
        if not opt.state[p]:
            opt.state[p].update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.ones_like(p))


LOOKING: dict[str, tuple[Callable[[list[Tensor]], torch.optim.Optimizer], Callable[[Any], Any]]] = {
    "a rate set inside, ASGD": (lambda p: torch.optim.ASGD(p, lr=0.1), _set(lr=0.01)),
    "a rate set inside, Rprop": (lambda p: torch.optim.Rprop(p, lr=0.1), _set(lr=0.01)),
    "a rate filled inside, ASGD": (
        lambda p: torch.optim.ASGD(p, lr=torch.tensor(0.1)),
        lambda opt: opt.param_groups[0]["lr"].fill_(0.01).clone(),
    ),
    "a rate set inside, Adam": (lambda p: torch.optim.Adam(p, lr=0.1), _set(lr=0.01)),
    "dampening set inside": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), _set(dampening=0.5)),
    "amsgrad set inside": (lambda p: torch.optim.Adam(p, lr=0.1), _set(amsgrad=True)),
    "amsgrad unset inside": (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), _set(amsgrad=False)),
    "centered set inside": (lambda p: torch.optim.RMSprop(p, lr=0.1), _set(centered=True)),
    "it asks whether there is a state": (lambda p: torch.optim.Adam(p, lr=0.1), _warm),
    "it counts states": (lambda p: torch.optim.Adam(p, lr=0.1), lambda opt: len(opt.state)),
    "it begins otherwise": (lambda p: torch.optim.Adam(p, lr=0.1), _begin_otherwise),
    "it reads moments": (
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda opt: [s["exp_avg"].sum() for s in opt.state.values()],
    ),
    "it writes a state_dict": (lambda p: torch.optim.Adam(p, lr=0.1), lambda opt: len(opt.state_dict()["state"])),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("steps", [True, False], ids=["and steps", "and does not step"])
@pytest.mark.parametrize("name", LOOKING)
def test_who_looks_before_the_first_step_sees_what_torch_has(name: str, steps: bool) -> None:
    make, look = LOOKING[name]
    found: list[Any] = []
    for jitted in (False, True):
        p = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        opt = make([p])

        def run(p: Tensor = p, opt: torch.optim.Optimizer = opt) -> Any:
            seen = look(opt)
            if steps:
                p.square().sum().backward()
                opt.step()
                opt.zero_grad()
            return seen

        with sl.Mesh(data=2) if jitted else sl.no_mesh():
            once = sl.jit(run) if jitted else run
            seen = [once() for _ in range(3)]
        state = {k: whole(x).tolist() if isinstance(x, Tensor) else x for k, x in opt.state.get(p, {}).items()}
        plain = pytree.tree_map(lambda x: whole(x).detach().tolist() if isinstance(x, Tensor) else x, seen)
        found.append((plain, p.tolist(), state, len(opt.state)))
    (expected, tree), (got, same) = map(pytree.tree_flatten, found)
    assert same == tree
    assert got == [x if x is None else pytest.approx(x, rel=1e-7) for x in expected]


class Strided(nn.Module):
    """Weights, and their gradients, that do not lie row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x).mean((2, 3))
        return (self.turned @ y.t()).t()


KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "amsgrad": {"amsgrad": True},
    "a rate that is a tensor": {"lr": torch.tensor(0.01, dtype=torch.float64)},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_adam_is_one_op_a_parameter_or_what_torch_does(settings: dict[str, Any], dtype: torch.dtype) -> None:
    def run(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> None:
        model(x).abs().square().mean().backward()
        opt.step()
        opt.zero_grad()

    def weights(step: Any, place: Any) -> Any:
        torch.manual_seed(0)
        model = Strided().to(dtype)
        place(model)
        opt = torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "foreach": False} | settings)
        for i in range(3):
            step(model, opt, torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(i)).to(dtype))
        return model, opt, [whole(p).detach() for p in model.parameters()]

    _, _, expected = weights(run, lambda model: None)
    specs = {"conv.weight": "o@a i h w", "turned": "o i@a"}
    with sl.Mesh(a=2):
        jitted = sl.jit(run)
        model, opt, found = weights(jitted, lambda model: sl.parallelize(model, specs))
        plan = jitted.plan(model, opt, torch.zeros(4, 2, 5, 5, dtype=dtype)).full
    close = {torch.float64: 1e-12, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close)
    assert plan.count("= adam(") == (3 if not settings and dtype in (torch.float64, torch.float32) else 0)


def test_operands_of_adam_may_lie_in_memory_as_they_like() -> None:
    state = [torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    rest = torch.tensor(1.0), 0.1, 0.9, 0.99, 1e-8, 0.1, True
    expected = torch.ops.shardlib.adam(*state, *rest)
    for i in range(4):
        turned = [x.t().contiguous().t() if i == j else x for j, x in enumerate(state)]
        for a, b in zip(torch.ops.shardlib.adam(*turned, *rest), expected, strict=True):
            assert torch.equal(a, b)
    assert all(torch.equal(x, x.t().contiguous().t()) for x in state)


def _updated(w: Tensor, x: Tensor) -> Tensor:
    """The loss behind a step of Adam from `w`."""
    p, m, v, count = w.clone(), torch.zeros_like(w), torch.full_like(w, 1e-3), torch.zeros((), dtype=torch.float64)
    (g,) = torch.autograd.grad((x @ p).tanh().square().sum(), p, create_graph=True)
    adam(
        [p], [g], [m], [v], [], [count], foreach=False, differentiable=True, amsgrad=False, beta1=0.9, beta2=0.99,
        lr=0.1, weight_decay=0.1, eps=1e-8, maximize=False,
    )  # fmt: skip
    return (x @ p).tanh().square().sum()


def test_a_gradient_goes_through_a_step_of_adam() -> None:
    generator = torch.Generator().manual_seed(1)
    w, x = (torch.randn(n, dtype=torch.float64, generator=generator) for n in ((6, 4), (8, 6)))
    expected = torch.autograd.grad(_updated(w.requires_grad_(), x), w)[0]
    with sl.Mesh(data=2):
        inside = sl.jit(lambda w, x: torch.autograd.grad(_updated(w, x), w)[0], in_specs=("a@data b", "n a"))
        torch.testing.assert_close(inside(w, x).full_tensor(), expected, rtol=1e-12, atol=1e-12)
        sl.jit(_updated, in_specs=("a@data b", "n a"))(w, x).backward()
    torch.testing.assert_close(w.grad, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(NotImplementedError, match=r"of shape \[6, 4\], has no gradient: differentiate torch's own"):
        torch.ops.shardlib.adam(w, w, w, w, w.sum(), 0.1, 0.9, 0.9, 1e-8, 0.1, True)[0].sum().backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of its own update
def test_steps_of_adam_in_a_batch() -> None:
    def one(w: Tensor, g: Tensor) -> Tensor:
        p, m, v, count = w.clone(), g * 0, g * g * 0.1, torch.zeros(())
        adam(
            [p], [g], [m], [v], [], [count], foreach=False, amsgrad=False, beta1=0.9, beta2=0.99, lr=0.1,
            weight_decay=0.1, eps=1e-8, maximize=False,
        )  # fmt: skip
        return p

    w, g = (torch.rand(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    with torch.no_grad(), sl.Mesh(data=2):
        found = sl.jit(torch.vmap(one), in_specs=("n a@data b", "n a b"))(w, g).full_tensor()
        torch.testing.assert_close(found, torch.stack([one(*x) for x in zip(w, g, strict=True)]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_counter_may_have_a_dim(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    found = []
    with sl.Mesh(data=2):
        for run in (step, sl.jit(step)):
            torch.manual_seed(0)
            model = Net().double()
            opt = torch.optim.AdamW(model.parameters(), lr=0.1)
            for p in model.parameters():
                opt.state[p] = {
                    "step": torch.full(shape, 3.0),
                    "exp_avg": p.detach() * 0,
                    "exp_avg_sq": p.detach() ** 2,
                }
            run(model, opt, torch.ones(4, 4, dtype=torch.float64))
            found.append([*model.parameters(), *(opt.state[p]["step"] for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.sampled(11)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "hsdp"])
@pytest.mark.parametrize("name", ["AdamW, foreach", "SGD, momentum, dampened", "Adafactor"])
def test_moments_of_one_device_are_loaded_where_they_belong(name: str, strategy: str, jit: bool) -> None:
    """A state dict of a plain optimizer: what it keeps of a parameter, element by element, is cut as that is."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = Net().double()
    opt = OPTIMIZERS[name](list(plain.parameters()))
    step(plain, opt, x)
    kept = copy.deepcopy((plain.state_dict(), opt.state_dict()))
    how: Any = sl.strategies.hsdp(replica="replica", shard="data") if strategy == "hsdp" else strategy
    with sl.Mesh(replica=2, data=2) if strategy == "hsdp" else sl.Mesh(data=2):
        model = sl.parallelize(Net().double(), strategy=how)
        placed = OPTIMIZERS[name](list(model.parameters()))
        model.load_state_dict(kept[0])
        placed.load_state_dict(kept[1])
        for p in model.parameters():
            home = sl.shard(torch.zeros(p.shape, dtype=p.dtype), p.moments_at) if strategy == "zero1" else p.detach()
            like = [s for s in placed.state[p].values() if isinstance(s, Tensor) and s.shape == p.shape]
            assert [sl.typeof(s) for s in like] == [sl.typeof(home)] * len(like)
        for _ in range(2):
            step(plain, opt, x)
            (sl.jit(step) if jit else step)(model, placed, x)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(a.detach()), b.detach(), rtol=1e-9, atol=1e-11)
        again = placed.state_dict()["state"]
        for i, entries in opt.state_dict()["state"].items():
            for k, s in entries.items():
                torch.testing.assert_close(whole(again[i][k]), s, rtol=1e-9, atol=1e-11)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("kind", ["mean", "moving", "moving, foreach"])
def test_an_average_of_a_module_is_part_of_the_step(kind: str, use_buffers: bool) -> None:
    swa = torch.optim.swa_utils
    ways = {
        "moving": {"avg_fn": swa.get_ema_avg_fn(0.9)},
        "moving, foreach": {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.9)},
    }

    def step(net: nn.Module, average: swa.AveragedModel, opt: torch.optim.Optimizer, x: Tensor) -> None:
        net(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
        average.update_parameters(net)

    def run(step: Callable[..., None]) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double()
        average = swa.AveragedModel(net, use_buffers=use_buffers, **ways.get(kind, {}))
        opt = torch.optim.SGD(net.parameters(), 0.1)
        for i in range(4):
            step(net, average, opt, torch.linspace(-1, i, 24, dtype=torch.float64).view(6, 4))
        return average

    jitted = sl.jit(step)
    with sl.Mesh(data=2):
        mine = run(jitted)
    assert not jitted.retraces
    for a, b in zip(mine.state_dict().values(), run(step).state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["Adam", "AdamW, foreach", "RMSprop, centered", "Adafactor"])
def test_a_state_that_is_loaded_is_no_reason_to_compile_again(name: str) -> None:
    """Torch leaves a group's settings in another order then, and gives an optimizer a default that it may lack."""

    def run(step: Callable[..., Tensor], place: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(0)
        model = place(Net().double())
        opt = OPTIMIZERS[name]([*model.parameters()])
        kept = None
        for i in range(6):
            step(model, opt, torch.linspace(-1, i, 32, dtype=torch.float64).sin().view(8, 4))
            if i == 1:
                kept = copy.deepcopy(opt.state_dict())
            if i in (2, 4):
                opt.load_state_dict(kept)
        return [p.full_tensor() if isinstance(p, sl.ShardedTensor) else p for p in model.parameters()]

    jitted = sl.jit(step)
    with sl.Mesh(data=2):
        found = run(jitted, functools.partial(sl.parallelize, strategy="zero1"))
    assert jitted.retraces == []
    for have, want in zip(found, run(step, lambda model: model), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-11)
