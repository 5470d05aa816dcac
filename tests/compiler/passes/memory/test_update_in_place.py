"""State that a call overwrites is written where it is: whoever shares its memory sees what one device would show."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame

import shardlib as sl
from shardlib import Mesh, ShardedTensor
from shardlib.compiler.codegen import virtual

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.second(torch.tanh(self.norm(self.first(x))))


def loss_of(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).square().mean()


def train(m: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = loss_of(m, x)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    while True:
        yield torch.randn(64, 8, dtype=torch.float64, generator=generator)


Story = Callable[[Net, Jit], list[Any]]  # what is seen of it
STORIES: list[Story] = []


def story(fn: Story) -> Story:
    STORIES.append(fn)
    return fn


def adamw(m: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), lr=1e-2, **options)


def steps(run: Callable[..., Any], *given: Any, n: int = 3) -> list[Any]:
    found = batches()
    return [run(*given, next(found)) for _ in range(n)]


@story
def aliases(m: Net, jit: Jit) -> list[Any]:
    opt, step = adamw(m), jit(train)
    held = [p.detach() for p in m.parameters()]
    data = m.first.weight.data
    out = steps(step, m, opt)
    return [*out, *held, data, *(p.detach() for p in m.parameters())]


@story
def copies(m: Net, jit: Jit) -> list[Any]:
    opt, step = adamw(m), jit(train)
    found = batches()
    out: list[Any] = []
    for _ in range(3):
        held = [p.detach().clone() for p in m.parameters()]
        out += [step(m, opt, next(found)), *held, copy.deepcopy(m.state_dict())["first.weight"]]
    return out


@story
def views(m: Net, jit: Jit) -> list[Any]:
    opt, step = adamw(m), jit(train)
    row, turned, part = m.first.weight.detach()[1], m.first.weight.detach().t(), m.second.bias.detach()[1:3]
    flat = m.second.weight.detach().view(-1)
    out = steps(step, m, opt, n=1)
    out += [row.clone(), turned.clone(), part.clone(), flat.clone()]
    return [*out, *steps(step, m, opt), row, turned, part, flat]


@story
def state_dicts(m: Net, jit: Jit) -> list[Any]:
    opt, step = adamw(m), jit(train)
    shown, own = m.state_dict(), copy.deepcopy(m.state_dict())
    out = steps(step, m, opt)
    states = opt.state_dict()["state"]
    kept = copy.deepcopy(states)
    out += steps(step, m, opt)
    return [*out, *shown.values(), *own.values(), *states[0].values(), *kept[0].values()]


@story
def goes_back(m: Net, jit: Jit) -> list[Any]:
    opt, step = adamw(m), jit(train)
    out = steps(step, m, opt)
    kept = copy.deepcopy((m.state_dict(), opt.state_dict()))
    out += steps(step, m, opt)
    m.load_state_dict(kept[0])
    opt.load_state_dict(kept[1])
    return [*out, *steps(step, m, opt), *m.state_dict().values(), *kept[0].values()]


@story
def average(m: Net, jit: Jit) -> list[Any]:
    opt, slow = adamw(m), copy.deepcopy(m)

    def step(m: Net, slow: Net, opt: Any, x: Tensor) -> Tensor:
        loss = train(m, opt, x)
        with torch.no_grad():
            for a, b in zip(slow.parameters(), m.parameters(), strict=True):
                a.lerp_(b, 0.1)
        return loss

    return [*steps(jit(step), m, slow, opt), *slow.parameters(), *m.parameters()]


@story
def average_of_the_old(m: Net, jit: Jit) -> list[Any]:
    opt, slow = adamw(m), copy.deepcopy(m)

    def step(m: Net, slow: Net, opt: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            for a, b in zip(slow.parameters(), m.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
        return train(m, opt, x)

    return [*steps(jit(step), m, slow, opt), *slow.parameters(), *m.parameters()]


@story
def old_values_later(m: Net, jit: Jit) -> list[Any]:
    opt = adamw(m)

    def step(m: Net, opt: Any, x: Tensor) -> Any:
        old = [p.detach().clone() for p in m.parameters()]
        loss = train(m, opt, x)
        moved = [(p.detach() - q).norm() for p, q in zip(m.parameters(), old, strict=True)]
        return loss, old[0], torch.stack(moved), [p.detach() * 2 for p in m.parameters()]

    return [*steps(jit(step), m, opt), *m.parameters()]


@story
def returns_itself(m: Net, jit: Jit) -> list[Any]:
    opt = adamw(m)

    def step(m: Net, opt: Any, x: Tensor) -> Any:
        train(m, opt, x)
        return m.first.weight.detach() + 0, m.first.weight.detach().t().clone(), opt.state[m.second.bias]["exp_avg"] * 1

    run = jit(step)
    first = steps(run, m, opt, n=1)
    return [*first, *steps(run, m, opt), *first, *m.parameters()]


@story
def returns_views(m: Net, jit: Jit) -> list[Any]:
    opt = adamw(m)

    def step(m: Net, opt: Any, x: Tensor) -> Any:
        old = m.first.bias.detach().clone()
        train(m, opt, x)
        return old.view(2, 4), m.second.weight.detach().sum(), m.first.weight.detach().clone()[2:]

    return [*steps(jit(step), m, opt), *m.parameters()]


@story
def twice_in_a_call(m: Net, jit: Jit) -> list[Any]:
    opt = adamw(m)

    def step(m: Net, opt: Any, x: Tensor) -> Any:
        return train(m, opt, x), train(m, opt, x * 2)

    return [*steps(jit(step), m, opt), *m.parameters(), opt.state[m.first.weight]["step"]]


@story
def loss_behind_the_step(m: Net, jit: Jit) -> list[Any]:
    opt = adamw(m)

    def step(m: Net, opt: Any, x: Tensor) -> Any:
        before = train(m, opt, x)
        with torch.no_grad():
            return before, loss_of(m, x)

    return [*steps(jit(step), m, opt), *m.parameters()]


@story
def gathers_over_calls(m: Net, jit: Jit) -> list[Any]:
    opt = adamw(m)

    def step(m: Net, opt: Any, i: int, x: Tensor) -> Tensor:
        loss = loss_of(m, x)
        loss.backward()
        if i % 2:
            opt.step()
            opt.zero_grad()
        return loss

    run, found, out = jit(step), batches(), []
    for i in range(5):
        out.append(run(m, opt, i, next(found)))
        grad = m.first.weight.grad
        out.append(None if grad is None else grad.clone())
    return [*out, *m.parameters()]


@story
def gathers_in_a_call(m: Net, jit: Jit) -> list[Any]:
    opt = adamw(m)

    def step(m: Net, opt: Any, x: Tensor) -> Tensor:
        for part in x.chunk(4):
            loss_of(m, part).backward()
        nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        opt.step()
        opt.zero_grad(set_to_none=False)
        return m.first.weight.detach().norm()

    return [*steps(jit(step), m, opt), *m.parameters(), *(p.grad for p in m.parameters())]


@story
def gradients_that_are_held(m: Net, jit: Jit) -> list[Any]:
    opt = adamw(m)

    def add(m: Net, x: Tensor) -> None:
        loss_of(m, x).backward()

    run, step, found = jit(add), jit(train), batches()
    run(m, next(found))
    held = m.first.weight.grad
    assert held is not None
    out = [held.clone()]
    run(m, next(found))
    out.append(held.clone())
    step(m, opt, next(found))
    out.append(held.clone())
    step(m, opt, next(found))
    return [*out, held, *m.parameters()]


@story
def tied(m: Net, jit: Jit) -> list[Any]:
    m.third = nn.Linear(8, 8, bias=False).double()
    m.third.weight = m.first.weight
    opt = adamw(m)

    def step(m: Net, opt: Any, x: Tensor) -> Tensor:
        loss = m(m.third(x)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return [*steps(jit(step), m, opt), *m.parameters(), m.third.weight]


@story
def data_is_set(m: Net, jit: Jit) -> list[Any]:
    opt = adamw(m)

    def step(m: Net, opt: Any, x: Tensor) -> Tensor:
        loss = train(m, opt, x)
        m.first.bias.data = m.first.bias.data * 0.5
        m.second.weight.data.mul_(0.9)
        return loss

    held = m.first.bias.detach(), m.second.weight.detach()
    return [*steps(jit(step), m, opt), held[1], *m.parameters()]


@story
def two_functions(m: Net, jit: Jit) -> list[Any]:
    opt, one, other = adamw(m), jit(train), jit(lambda m, opt, x: train(m, opt, x * 0.5))
    evaluate = jit(lambda m, x: loss_of(m, x).detach())
    found, out = batches(), []
    for _ in range(2):
        out += [one(m, opt, next(found)), evaluate(m, next(found)), other(m, opt, next(found))]
    return [*out, *m.parameters()]


@story
def inside_and_outside(m: Net, jit: Jit) -> list[Any]:
    opt, step, found, out = adamw(m), jit(train), batches(), []
    for _ in range(2):
        out += [step(m, opt, next(found)), train(m, opt, next(found))]
        with torch.no_grad():
            m.first.weight.mul_(1.1)
            m.second.weight[1].zero_()
    return [*out, *m.parameters(), opt.state[m.first.weight]["exp_avg"]]


@story
def hooks(m: Net, jit: Jit) -> list[Any]:
    m.first.weight.register_hook(lambda g: g * 2)
    m.second.register_forward_hook(lambda _, args, out: out + args[0].sum())
    opt = adamw(m)
    return [*steps(jit(train), m, opt), *m.parameters()]


@story
def twice_backward(m: Net, jit: Jit) -> list[Any]:
    opt = adamw(m)

    def step(m: Net, opt: Any, x: Tensor) -> Tensor:
        loss = loss_of(m, x)
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return [*steps(jit(step), m, opt), *m.parameters()]


def optimized(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Story:
    def one(m: Net, jit: Jit) -> list[Any]:
        opt = make(m)
        states = (x for p in m.parameters() for x in opt.state[p].values() if isinstance(x, Tensor))
        return [*steps(jit(train), m, opt), *m.parameters(), *states]

    return one


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "foreach": lambda m: adamw(m, foreach=True),
    "fused": lambda m: adamw(m, fused=True),
    "plain": lambda m: adamw(m, foreach=False),
    "amsgrad": lambda m: adamw(m, amsgrad=True),
    "maximize": lambda m: adamw(m, maximize=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, momentum=0.5, centered=True),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=1e-2),
    "groups": lambda m: torch.optim.AdamW(
        [{"params": m.first.parameters(), "lr": 1e-3}, {"params": m.second.parameters()}],
        lr=1e-2,  # type: ignore[union-attr]
    ),
}
for name, make in MAKERS.items():
    STORIES.append(optimized(make))
    STORIES[-1].__name__ = name


@story
def exchanged(m: Net, jit: Jit) -> list[Any]:
    def step(a: Tensor, b: Tensor) -> Tensor:
        old = a.clone()
        a.copy_(b * 2)
        b.copy_(old)
        return (a - b).sum()

    a, b = m.first.weight.detach(), m.mean
    run = jit(step)
    c = a.clone()
    return [run(a, c), run(c, a), a, c, b, m.first.weight]


@story
def reads_what_it_wrote(m: Net, jit: Jit) -> list[Any]:
    def step(a: Tensor, b: Tensor) -> Any:
        y = a * 3
        a.add_(b)
        z = a.clone()
        b.add_(a)
        a.mul_(2)
        return y, z, a + b

    a = m.first.weight.detach()
    b = a.clone()
    run = jit(step)
    first = run(a, b)
    return [first, run(a, b), first, a, b]


@story
def mirrored(m: Net, jit: Jit) -> list[Any]:
    def step(a: Tensor, b: Tensor) -> Any:
        a.add_(a.t().clone())
        b.copy_(b.t().clone() * 2)
        b.copy_(b.clone().t())
        return a.sum()

    a = m.first.weight.detach()
    b = a.clone() * 3
    run = jit(step)
    return [run(a, b), run(a, b), a, b]


@story
def emptied(m: Net, jit: Jit) -> list[Any]:
    def step(a: Tensor, b: Tensor) -> Any:
        y = a + 1
        a.zero_()
        b.add_(1).zero_()
        b.sub_(y)
        return y

    a = m.first.weight.detach()
    b = a.clone()
    run = jit(step)
    first = run(a, b)
    return [first, a.clone(), run(a, b), first, a, b]


@story
def one_value_for_two(m: Net, jit: Jit) -> list[Any]:
    def step(a: Tensor, b: Tensor) -> Any:
        c = a + b
        a.copy_(c)
        b.copy_(c)
        return c

    a = m.first.weight.detach()
    b = a.clone()
    run = jit(step)
    first = run(a, b)
    return [first, run(a, b), first, a.add_(1), b]


@story
def parts(m: Net, jit: Jit) -> list[Any]:
    def step(a: Tensor, x: Tensor) -> Any:
        a[2:4].mul_(2)
        a[:, 1] = x[0]
        y = a[0].clone()
        a[0].add_(y)
        return y

    a, run = m.first.weight.detach(), jit(step)
    return [*steps(run, a), a, m.first.weight]


@story
def result_is_the_argument(m: Net, jit: Jit) -> list[Any]:
    def step(a: Tensor, x: Tensor) -> Any:
        return a.add_(x[:8])

    a, run = m.first.weight.detach(), jit(step)
    return [run(a, torch.ones(8, 8, dtype=torch.float64)).clone(), *steps(run, a)[-1:], a, m.first.weight]


@story
def error_in_the_middle(m: Net, jit: Jit) -> list[Any]:
    opt, table = adamw(m), torch.arange(32, dtype=torch.float64).view(4, 8)

    def step(m: Net, opt: Any, rows: Tensor, x: Tensor) -> Tensor:
        return train(m, opt, x + F.embedding(rows, table).sum())

    run, found, out = jit(step), batches(), []
    for i in range(4):
        rows = torch.tensor([1, 2, 9 if i == 2 else 3])
        x = next(found)
        if i == 2:
            with pytest.raises(IndexError):
                run(m, opt, rows, x)
            opt.zero_grad()
            m.count -= m.count  # what a call inside jit has not counted
            continue
        out.append(run(m, opt, rows, x))
        m.count -= m.count
    return [*out, *m.parameters(), opt.state[m.first.weight]["step"]]


@story
def saved_for_backward(m: Net, jit: Jit) -> list[Any]:
    opt, step, x = adamw(m), jit(train), next(batches())
    step(m, opt, x)
    loss = (m.second.weight * m.second.weight.detach() * 2).sum()
    step(m, opt, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return [*m.parameters()]


@story
def frozen(m: Net, jit: Jit) -> list[Any]:
    m.first.requires_grad_(False)
    opt, step = adamw(m), jit(train)
    out = steps(step, m, opt)
    m.first.requires_grad_(True)
    m.second.weight.requires_grad_(False)
    return [*out, *steps(step, m, opt), *m.parameters()]


@story
def scaled(m: Net, jit: Jit) -> list[Any]:
    opt, scaler = adamw(m), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step(m: Net, opt: Any, scaler: Any, x: Tensor) -> Tensor:
        loss = loss_of(m, x)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss.detach()

    run, found, out = jit(step), batches(), []
    for i in range(5):
        x = next(found)
        out.append(run(m, opt, scaler, x * (torch.nan if i == 2 else 1)).nan_to_num())
        out += [p.detach().clone() for p in m.parameters()]
    return out


def plain(m: Net) -> Net:
    return m


def placed(strategy: str) -> Callable[[Net], Net]:
    return lambda m: sl.parallelize(m, strategy=strategy)


PLACES = {"plain": plain, **{s: placed(s) for s in ("ddp", "fsdp", "zero1")}}


def values(x: Any) -> list[Tensor]:
    if isinstance(x, ShardedTensor):
        return [x.detach().full_tensor()]
    if isinstance(x, Tensor):
        return [x.detach()]
    return [y for one in x for y in values(one)] if isinstance(x, list | tuple) else []


@pytest.mark.sampled(53)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("told", STORIES, ids=lambda s: s.__name__)
def test_as_on_one_device(told: Story, place: str) -> None:
    torch.manual_seed(1)
    one = Net().double()
    other = copy.deepcopy(one)
    expected = values(told(one, lambda fn: fn))
    with Mesh(data=4):
        found = values(told(PLACES[place](other), sl.jit))
    assert len(found) == len(expected)
    for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-11)


def stepped(strategy: str) -> tuple[Net, torch.optim.Optimizer, Callable[..., Any], Iterator[Tensor]]:
    """A module on the current mesh, its optimizer, and a step that has run once."""
    torch.manual_seed(1)
    m, found = PLACES[strategy](Net().double()), batches()
    opt, step = adamw(m), sl.jit(train)
    step(m, opt, next(found))
    return m, opt, step, found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_memory_stays(strategy: str) -> None:
    with Mesh(data=4):
        m, opt, step, found = stepped(strategy)
        state = [*m.parameters(), *(opt.state[p]["exp_avg"] for p in m.parameters())]
        before = [[x.data_ptr() for x in y._locals] for y in state]
        step(m, opt, next(found))
        assert [[x.data_ptr() for x in y._locals] for y in state] == before
        plan = step.plan(m, opt, next(found))
    program = plan.compiled.program
    written = {plan.compiled.traced.input_names[i] for i in program.replaced}
    assert {"m.first.weight", "opt.state[m.second.weight]['exp_avg_sq']", "m.count"} <= written
    assert all(x.over for x in program.steps if "adam" in str(getattr(x, "target", "")))


def test_the_memory_stays_whatever_runs_frames() -> None:
    """`torch.compile` puts its own in the interpreter's place, which refers to what a call is given once more."""
    with Mesh(data=4):
        m, opt, step, found = stepped("fsdp")
        before = [x.data_ptr() for p in m.parameters() for x in p._locals]
        mine = set_eval_frame(False)
        try:
            step(m, opt, next(found))
        finally:
            set_eval_frame(mine)
        assert [x.data_ptr() for p in m.parameters() for x in p._locals] == before


def test_a_permutation_of_state_is_of_what_it_was() -> None:
    def by_hand(a: Tensor) -> Tensor:
        y = passed(a) * 3
        a.add_(100)
        return y

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v)
        k.mul_(0.5)
        return y

    with Mesh(seq=4):
        passed = sl.shard_map(
            lambda x: sl.ppermute(x, "seq", [(i, (i + 1) % 4) for i in range(4)]), in_specs="x@seq", out_specs="x@seq"
        )
        a = sl.shard(torch.arange(4.0), "x@seq")
        assert sl.jit(by_hand)(a).full_tensor().tolist() == [9, 0, 3, 6]
        assert a.full_tensor().tolist() == [100, 101, 102, 103]
        given = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64).unbind()
        want = ring(*(x.clone() for x in given))
        out = sl.jit(ring)(*(sl.shard(x.clone(), "b h t@seq e") for x in given))
    torch.testing.assert_close(out.full_tensor(), want)


def test_a_storage_that_somebody_holds_stays_as_it_is() -> None:
    with Mesh(data=2):
        w, step = sl.shard(torch.zeros(8), "x@data"), sl.jit(lambda w: w.add_(1))
        step(w)
        held = w.to_local().untyped_storage()
        was = held.tolist()
        step(w)
        assert held.tolist() == was
        del held
        step(w)
        before = w.to_local().data_ptr()
        step(w)
        assert w.to_local().data_ptr() == before


def test_plain_memory_stays() -> None:
    with Mesh(data=2):
        m, opt, step, found = stepped("plain")
        before = [p.data_ptr() for p in m.parameters()]
        step(m, opt, next(found))
    assert [p.data_ptr() for p in m.parameters()] == before


def test_pieces_that_somebody_holds_stay_as_they_are() -> None:
    with Mesh(data=4):
        m, opt, step, found = stepped("fsdp")
        held = [m.first.weight.to_local(), m.second.weight.shards[2].data[:1]]
        array = m.first.bias.to_local().detach().numpy()
        saved = m.norm.weight.to_local().detach()
        factor = torch.ones_like(saved, requires_grad=True)
        loss = (saved * factor).sum()  # autograd holds the piece, and no name does
        was = [x.clone() for x in (*held, torch.from_numpy(array), saved)]
        del saved
        step(m, opt, next(found))
        assert all(map(torch.equal, (*held, torch.from_numpy(array)), was))
        loss.backward()
        assert factor.grad is not None
        assert torch.equal(factor.grad, was[-1])


@pytest.mark.parametrize(
    ("write", "good", "bad"),
    [
        (lambda t, i: t.index_add_(0, i, torch.ones(2, 4)), [0, 1], [2, 9]),
        (lambda t, i: t.index_copy_(0, i, torch.ones(2, 4)), [0, 1], [2, 9]),
        (lambda t, i: t.index_put_((i,), torch.ones(2, 4), accumulate=True), [0, 1], [2, 9]),
        (lambda t, i: t.scatter_add_(0, i[:, None], torch.ones(2, 4)), [0, 1], [2, 9]),
        (lambda t, i: t.copy_(t.long().remainder(i[0] - 2)), [0, 1], [2, 1]),
    ],
)
def test_a_write_that_fails_leaves_state_whole(
    write: Callable[[Tensor, Tensor], Tensor], good: list[int], bad: list[int]
) -> None:
    def step(n: Tensor, t: Tensor, i: Tensor) -> None:
        n.add_(1)
        write(t, i)

    with Mesh(data=2):
        run, n, t = sl.jit(step), torch.zeros(()), torch.ones(8, 4)
        run(n, t, torch.tensor(good))
        was = t.clone()
        with pytest.raises((IndexError, RuntimeError, ZeroDivisionError)):
            run(n, t, torch.tensor(bad))
    assert n.item() == 1
    assert torch.equal(t, was)


def test_a_message_that_is_lost_leaves_state_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the gather of what a step of zero1 has made, which comes behind the step."""
    left = [0]

    def lossy(*args: Any, **params: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("lost")
        return gather(*args, **params)

    gather = virtual._SHARED["all_gather"]
    monkeypatch.setitem(virtual._SHARED, "all_gather", lossy)
    with Mesh(data=4):
        m, opt, step, found = stepped("zero1")
        state = [*m.state_dict().values(), *(x for p in m.parameters() for x in opt.state[p].values())]
        left[0] = 100
        step(m, opt, next(found))
        sent = 100 - left[0]
        assert sent > 0
        for k in range(1, sent + 1):
            before = values([x.clone() for x in state])
            left[0] = k
            with pytest.raises(RuntimeError, match="lost"):
                step(m, opt, next(found))
            assert all(map(torch.equal, values(state), before))


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
def test_what_fails_leaves_state_whole(place: str) -> None:
    """Also behind the first of two steps: on one device that one would have been taken."""
    table = torch.ones(4, 8, dtype=torch.float64)

    def twice(m: Net, opt: Any, rows: Tensor, x: Tensor) -> None:
        train(m, opt, x)
        train(m, opt, x + F.embedding(rows, table))

    with Mesh(data=4):
        m, opt, _, found = stepped(place)
        run, good = sl.jit(twice), torch.zeros(64, dtype=torch.long)
        run(m, opt, good, next(found))
        state = [*m.state_dict().values(), *(x for p in m.parameters() for x in opt.state[p].values())]
        before = values([x.clone() for x in state])
        with pytest.raises(IndexError):
            run(m, opt, good + 7, next(found))
        assert all(map(torch.equal, values(state), before))
        run(m, opt, good, next(found))
        assert not torch.equal(values(state)[0], before[0])


def test_reading_threads_see_numbers() -> None:
    """What a thread reads while another one steps is old or new, or some of each, as on one device; never an error."""
    with Mesh(data=4) as mesh:
        m, opt, step, found = stepped("fsdp")
        errors: list[BaseException] = []

        def read() -> None:
            try:
                with mesh:
                    for _ in range(30):
                        assert m.first.weight.full_tensor().isfinite().all()
            except BaseException as error:  # noqa: BLE001 - it is told by the thread that waits
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(5):
            step(m, opt, next(found))
        thread.join()
    assert not errors


@pytest.mark.long
def test_many_parts_of_a_gradient_are_not_kept_for_the_end() -> None:
    def gather(m: Net, x: Tensor) -> None:
        for part in x.chunk(8):
            loss_of(m, part).backward()

    with Mesh(data=2):
        m, _, _, found = stepped("plain")
        run = sl.jit(gather)
        run(m, next(found))
        plan = run.plan(m, next(found))
        names = [plan.compiled.traced.input_names[i] for i in plan.compiled.program.replaced]
    assert "m.first.weight.grad" not in names


def _scaling(fails: bool = False) -> tuple[Net, Any, Any, Any]:
    """A step with a scaler that has no scale yet, and what it is called with."""
    torch.manual_seed(1)
    m = Net().double()
    opt, scaler = adamw(m), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step(m: Net, opt: Any, x: Tensor) -> Tensor:
        scaler.scale(loss_of(m, x)).backward()
        scaler.unscale_(opt)
        if fails:
            raise KeyError("fails")
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return scaler._scale.clone()

    return m, opt, scaler, step


@pytest.mark.long
def test_the_step_in_which_a_scale_is_made_is_no_program_of_its_own() -> None:
    m, opt, scaler, step = _scaling()
    found, jitted = batches(), sl.jit(step)
    with Mesh(data=4):
        assert jitted.plan(m, opt, next(found)).compiled
        assert scaler._scale is scaler._growth_tracker is None  # nothing has run
        assert [float(jitted(m, opt, next(found))) for _ in range(4)] == [4.0, 8.0, 8.0, 16.0]
    assert not jitted.retraces
    assert scaler.state_dict()["scale"] == 16.0
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()


def test_a_scale_is_not_made_where_the_step_fails_or_does_not_ask() -> None:
    m, opt, scaler, step = _scaling(fails=True)
    with Mesh(data=4), pytest.raises(KeyError):
        sl.jit(step)(m, opt, next(batches()))
    assert scaler._scale is scaler._growth_tracker is None
    with Mesh(data=4):
        assert float(sl.jit(lambda x: x.sum() * scaler.get_scale())(torch.ones(4))) == 16.0
    assert scaler._scale is None
    assert not [name for name in vars(scaler) if name.startswith("_lazy")]
