"""Nothing of a trace gets out, and nothing of the caller's is lost: values that are kept, containers, gradients."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, ShardingError
from tests.helpers.oracle import same

X = torch.arange(4.0) + 1


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2) as mesh:
        yield mesh


# Who keeps a value gets back what he had.


def keepers() -> dict[str, tuple[Callable[[Tensor], Any], Callable[[], Any]]]:
    """What keeps a value, and what is there before and after."""
    some: set[Any] = set()
    queue: deque[Any] = deque([1.0])
    net = nn.Linear(4, 4)

    def in_a_module(x: Tensor) -> None:
        net.bias = nn.Parameter(x)

    return {
        "a set": (lambda x: some.add(x), lambda: set(some)),
        "a deque": (lambda x: queue.append(x), lambda: list(queue)),
        "a module's parameter": (in_a_module, lambda: id(net.bias)),
    }


@pytest.mark.parametrize("where", keepers())
def test_what_keeps_a_value_is_refused_and_gets_back_what_it_had(where: str) -> None:
    keep, look = keepers()[where]
    before = look()

    def fn(x: Tensor) -> Tensor:
        keep(x * 2)
        return x

    with pytest.raises(ShardingError, match="keeps tensors that it computes"):
        sl.jit(fn)(X)
    assert look() == before


# Results.


class Out(dict[str, Any]):
    """A dict that pytree does not know."""


class Kept:
    """An object that no pytree knows, with slots, and with itself inside."""

    __slots__ = ("me", "more", "y")

    def __init__(self, y: Tensor) -> None:
        self.me, self.y, self.more = self, y, {"twice": [y, y + 1]}


@pytest.mark.parametrize(
    ("make", "look"),
    [
        (lambda y: Out(y=types.SimpleNamespace(y=y)), lambda o: [o["y"].y]),
        (lambda y: {y}, list),
        (lambda y: functools.partial(torch.add, y), lambda o: [*o.args, o(1)]),
        (lambda y: types.SimpleNamespace(inner=types.SimpleNamespace(y=y)), lambda o: [o.inner.y]),
        (lambda y: types.SimpleNamespace(inner=[{"y": (y,)}]), lambda o: [o.inner[0]["y"][0]]),
        (lambda y: [Kept(y), y], lambda o: [o[0].me.y, *o[0].more["twice"], o[1]]),
    ],
)
def test_objects_that_a_function_returns_are_made_by_each_call(make: Any, look: Any) -> None:
    step = sl.jit(lambda x: make(x * 2))
    with sl.Mesh(data=2):
        first, second = step(sl.shard(X, "a@data")), step(sl.shard(X + 1, "a@data"))
    assert type(first) is type(second) is type(make(X))
    assert first is not second
    for found, x in ((first, X), (second, X + 1)):
        for mine, plain in zip(look(found), look(make(x * 2)), strict=True):
            assert torch.equal(mine.full_tensor(), plain)
    assert not step.retraces


def test_an_object_that_is_returned_twice_is_one_and_what_was_there_is_itself() -> None:
    config, net = types.SimpleNamespace(n=3), torch.nn.Linear(2, 2)

    @sl.jit
    def step(x: Tensor, config: Any) -> Any:
        out = types.SimpleNamespace(y=x * config.n, config=config, net=net)
        out.same = out.y
        return out, config

    with sl.Mesh(data=2):
        for _ in range(2):
            out, back = step(X, config)
            assert back is config is out.config
            assert out.net is net
            assert out.same is out.y


class Reduced:
    """Made again by code that computes with its tensor."""

    def __init__(self, y: Tensor) -> None:
        self.y = y * 1

    def __reduce__(self) -> Any:
        return Reduced, (self.y,)


class Refuses:
    """As classes say that are not to be pickled."""

    def __init__(self, y: Tensor) -> None:
        self.y = y

    def __reduce__(self) -> Any:
        raise NotImplementedError


def test_objects_with_pickling_of_their_own() -> None:
    step = sl.jit(lambda x: Reduced(x * 2))
    with sl.Mesh(data=2):
        for x in (X, X + 1):
            assert torch.equal(step(x).y.full_tensor(), x * 2)
        with pytest.raises(ShardingError, match="result is a Refuses, with tensors in y"):
            sl.jit(lambda x: Refuses(x * 2))(X)


def test_a_generator_inside_an_object_is_itself() -> None:
    drawn = torch.Generator()
    step = sl.jit(lambda x: types.SimpleNamespace(y=x * 2, drawn=drawn))
    with sl.Mesh(data=2):
        assert step(X).drawn is drawn


def test_gradients_go_through_objects() -> None:
    x = X.clone().requires_grad_()
    with sl.Mesh(data=2):
        out = sl.jit(lambda x: types.SimpleNamespace(y=x.square()))(x)
        out.y.sum().backward()
    assert torch.equal(x.grad, 2 * X)


@pytest.mark.parametrize("make", [lambda y: lambda x: x + y, lambda y: local(y)])
def test_objects_that_carry_values_out_are_refused(make: Any) -> None:
    with pytest.raises(ShardingError, match="returns objects that jit cannot look into"):
        sl.jit(lambda x: make(x * 2))(X)


def local(y: Tensor) -> Any:
    class Local:
        def __init__(self) -> None:
            self.y = y

    return Local()


def test_numbers_in_objects_are_those_of_the_call() -> None:
    step = sl.jit(lambda x, n: (x * n, types.SimpleNamespace(n=n)))
    for n in (2.0, 3.0):
        assert step(X, n)[1].n == n


# Arguments.


@pytest.mark.parametrize(
    ("change", "args"),
    [
        (lambda d, x: d.update(m=d["m"] + x), lambda: ({"m": X.clone()},)),
        (lambda items, x: items.append(x * 2), lambda: ([],)),
        (lambda d, x: d.pop("a"), lambda: ({"a": X.clone()},)),
        (lambda items, x: items.__setitem__(0, x), lambda: ([X.clone()],)),
    ],
)
def test_containers_among_the_arguments_are_not_changed(change: Any, args: Any) -> None:
    def fn(x: Tensor, held: Any) -> Tensor:
        change(held, x)
        return x * 2

    with pytest.raises(ShardingError, match="fn changes a container among its arguments") as error:
        sl.jit(fn)(X, *args())
    assert "Remedy: return the new value, or write to the tensor in place" in str(error.value)
    same(sl.jit(lambda x, d: d["m"].add_(x) * 1)(X, {"m": X.clone()}), X * 2)


class Mine(torch.Tensor):
    """A class of a user's."""

    def twice(self) -> Tensor:
        return self * 2


def test_tensors_of_other_classes_are_refused() -> None:
    mine = X.as_subclass(Mine)  # type: ignore[arg-type]
    for call in (lambda: sl.jit(lambda x: x.twice())(mine), lambda: sl.jit(lambda x: x + mine)(X)):
        with pytest.raises(ShardingError, match=r"\w+ is a .*test_leaks\.Mine"):
            call()


def test_parameters_are_parameters() -> None:
    step = sl.jit(lambda ps: sum((p**2).sum() for p in ps if isinstance(p, nn.Parameter)))
    for ps in ([nn.Parameter(X.clone()), X], [X, nn.Parameter(X * 2)]):
        same(step(ps), sum((p**2).sum() for p in ps if isinstance(p, nn.Parameter)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit in torch's own make_dual
def test_dual_tensors_are_refused() -> None:
    step = sl.jit(lambda x: x * x)
    with fwd.dual_level():
        with pytest.raises(ShardingError, match="dual tensors of forward-mode AD"):
            step(fwd.make_dual(X, X))  # type: ignore[no-untyped-call]
        same(step(X), X * X)


# Tensors that nobody finds.


@pytest.mark.long
def test_hidden_parameters_are_refused_or_found() -> None:
    first = nn.Parameter(torch.ones(4))
    some, many = {nn.Parameter(torch.ones(4))}, [nn.Parameter(torch.ones(4)) for _ in range(1001)]
    named, mixed = {str(i): p for i, p in enumerate(many)}, [0, *many]

    def loss(params: Any, x: Tensor) -> Tensor:
        return sum(((p * first * x).sum() for p in params), torch.zeros(()))

    sl.jit(lambda x: loss(some, x))(X).backward()
    same([first.grad, next(iter(some)).grad], [X, X])
    with pytest.raises(ShardingError, match="requires a gradient, from where jit does not look"):
        sl.jit(lambda x: loss(mixed[1:4], x))(X)
    with torch.no_grad():
        same(sl.jit(lambda x: loss(mixed[1:4], x))(X), 3 * X.sum())
    sl.jit(lambda x: loss([*many[:2], named["2"]], x))(X).backward()
    same([p.grad for p in many[:4]], [X, X, X, None])


# `.grad` and what is saved.


def test_gradients_are_seen_in_every_mode() -> None:
    p = nn.Parameter(torch.zeros(4))
    sgd = torch.optim.SGD([p], lr=1.0)

    @torch.no_grad()
    @sl.jit
    def by_hand() -> None:
        assert p.grad is not None
        p.sub_(p.grad)

    for step in (by_hand, torch.no_grad()(sl.jit(sgd.step))):
        p.data = torch.zeros(4)
        for expected, g in ((-1.0, 1.0), (-11.0, 10.0)):
            p.grad = torch.full((4,), g)
            step()
            same(p, torch.full((4,), expected))
    with torch.no_grad():
        clear, ask = sl.jit(sgd.zero_grad), sl.jit(lambda p: p.sum() if p.grad is None else p.grad.sum() * 2)
        for g in (None, torch.ones(4), None, torch.full((4,), 3.0)):
            p.grad = g
            same(ask(p), p.sum() if g is None else g.sum() * 2)
            clear()
            assert p.grad is None


@pytest.mark.parametrize("place", [lambda x: x, lambda x: sl.shard(x, "a@data")], ids=["plain", "placed"])
def test_gradients_that_are_made_without_gradient_mode(place: Any) -> None:
    w, held = place(torch.ones(4)).requires_grad_(), place(torch.ones(4))

    def backward(x: Tensor) -> None:
        with torch.enable_grad():
            (x * w).sum().backward()

    def put(x: Tensor) -> None:
        held.grad = x * 2

    def history(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return (x * w).sum()

    with torch.no_grad():
        sl.jit(backward)(X)
        sl.jit(put)(X)
        y = sl.jit(history)(X)
    same([w.grad, held.grad], [X, X * 2])
    w.grad = None
    y.backward()
    same(w.grad, X)


def test_gradients_of_results_that_keep_theirs() -> None:
    w = torch.ones(4, requires_grad=True)
    ask = sl.jit(lambda x: x * 2 if x.grad is None else x * 3)
    for keeps in (False, True):
        h = w * 2
        if keeps:
            h.retain_grad()
            h.sum().backward()
        same(ask(h), h * (3 if keeps else 2))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "copied",
    [lambda x: x.clone(), lambda x: x.to(x.dtype, copy=True), lambda x: torch.empty(4).copy_(x), lambda x: x * 1],
)
@pytest.mark.parametrize("spec", [None, "a", "a@data"])
def test_what_is_saved_before_a_write_is_as_it_was(copied: Any, spec: str | None) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = (copied(x) * w * w).sum()
        x.add_(1)
        return y

    step = sl.jit(fn, in_specs=None if spec is None else (spec, spec))
    found, plain = X.clone(), X.clone()
    w, v = torch.full((4,), 3.0, requires_grad=True), torch.full((4,), 3.0, requires_grad=True)
    for _ in range(3):
        step(found, w).backward()
        fn(plain, v).backward()
        same([found, w.grad], [plain, v.grad])


def test_anomaly_mode_is_the_callers() -> None:
    w = torch.ones(4, requires_grad=True)
    step = sl.jit(lambda: (w * w).sum())
    with torch.autograd.set_detect_anomaly(True):
        step().backward()
    step().backward()
    same(w.grad, torch.full((4,), 4.0))


# Generators, copies.


def test_generators_that_a_function_makes_or_seeds_are_refused() -> None:
    g = torch.Generator().manual_seed(1)
    drawn = sl.jit(lambda x: x + torch.rand(4, generator=g))
    a, b = drawn(X).full_tensor(), drawn(X).full_tensor()
    assert not torch.equal(a, b)
    g.manual_seed(1)
    same([drawn(X), drawn(X)], [a, b])

    def seeds(x: Tensor) -> Tensor:
        g.manual_seed(3)
        return x + torch.rand(4, generator=g)

    def seeds_later(x: Tensor) -> Tensor:
        y = x + torch.rand(4, generator=g)
        g.manual_seed(3)
        return y

    state = g.get_state()
    for fn in (seeds, seeds_later):
        for _ in range(2):
            with pytest.raises(ShardingError, match="sets the seed of a generator"):
                sl.jit(fn)(X)
    assert torch.equal(g.get_state(), state)
    with pytest.raises(ShardingError, match="draws from a generator that it makes itself"):
        sl.jit(lambda x: x + torch.rand(4, generator=torch.Generator().manual_seed(3)))(X)


def test_a_generator_is_as_it_was_while_a_function_is_traced() -> None:
    g, seen = torch.Generator().manual_seed(3), []
    before = g.get_state()
    traced, looked = threading.Event(), threading.Event()

    def look() -> None:
        assert traced.wait(60)
        seen.append(torch.equal(g.get_state(), before))
        looked.set()

    def draws(x: Tensor) -> Tensor:
        traced.set()
        assert looked.wait(60)
        return x + torch.rand(4, generator=g)

    other = threading.Thread(target=look)
    other.start()
    first = sl.jit(draws)(X)
    other.join()
    assert seen == [True]
    assert not torch.equal(g.get_state(), before), "the call has drawn its key"
    g.manual_seed(3)
    same(sl.jit(draws)(X), first)


ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "set": (lambda x: (setattr(x, "tag", 1), x * 2)[1], "x.tag"),
    "set to another": (lambda x: (setattr(x, "old", 2), x * 2)[1], "x.old"),
    "deleted": (lambda x: (delattr(x, "old"), x * 2)[1], "x.old"),
    "of a result": (lambda x: [_tagged(x * 2)], "result[0].tag"),
}


def _tagged(x: Tensor) -> Tensor:
    x.tag = 1
    return x


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("how", ATTRIBUTES)
def test_attributes_that_would_be_lost_are_refused(how: str, sharded: bool) -> None:
    fn, what = ATTRIBUTES[how]
    x = sl.shard(X, "a@data") if sharded else X.clone()
    x.old, x._hidden = 1, [1]
    with pytest.raises(ShardingError) as error:
        sl.jit(fn)(x)
    assert f"changes attributes of tensors:\n  * {what}\n" in str(error.value)
    assert x.old == 1
    same(sl.jit(lambda x: (x * x.old, x)[0])(x), X)


def _saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "copy": lambda tensors: list(map(copy.copy, tensors)),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": _saved,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_tensors_keep_their_attributes(how: str) -> None:
    def attributes(place: Any) -> Any:
        x, p = place(X.clone()), nn.Parameter(place(X.clone()))
        x.note, p.group = {"k": [1, 2]}, "decay"
        a, b = COPIES[how]([x, p])
        group = getattr(b, "group", None)  # none in a deep copy
        return a.note, a.note is x.note, group, isinstance(b, nn.Parameter), b.requires_grad

    assert attributes(lambda x: sl.shard(x, "a@data")) == attributes(lambda x: x)


def test_deep_copies_of_views_share_memory() -> None:
    def parts(x: Any) -> Any:
        net = {"x": x, "views": [x.view(2, 2), x[2:]], "alias": x.detach()}
        net["views"][0].mul_(2)
        mine = copy.deepcopy(net)
        mine["views"][1].add_(1)
        mine["x"].mul_(3)
        mine["views"][0][0].fill_(7)
        return net, mine

    same(parts(sl.shard(torch.arange(4.0), "a@data")), parts(torch.arange(4.0)))


def _tripled(x: Tensor) -> Tensor:
    return x * 3


class Net(nn.Module):
    """A module with a jitted part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.block = sl.jit(self._block)

    def _block(self, x: Tensor) -> Tensor:
        return self.lin(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


def test_jitted_functions_are_copied_and_pickled() -> None:
    step = sl.jit(_tripled, in_specs="a@data")
    step(X)
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        same(other(X), X * 3)
        assert str(other.plan(X).layout_of("x")) == "4@data"
    net = Net()
    net(X)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.lin.weight.zero_()
        same(other(X), other.lin.bias)
        same(net(X), net.lin(X))


def test_a_move_keeps_one_devices_strides() -> None:
    w = torch.arange(24.0).view(6, 4)
    for before in ("a@data b", "a b@data", "a b"):
        for after in ("a@data b", "a b@data", "a b"):
            moved = sl.shard(w, before).t().redistribute(after)
            assert moved.stride() == (6, 1)
            same(moved.view(24), w.t().reshape(24))


def test_kernels_that_refuse_keep_nobody_alive() -> None:
    import gc
    import weakref

    def refused() -> Any:
        mine = nn.Linear(4, 4)
        with pytest.raises(ShardingError):
            sl.jit(lambda x: x @ mine.weight.double())(torch.ones(2, 4))
        return weakref.ref(mine)

    gone = refused()
    gc.collect()
    assert gone() is None


def test_a_refusal_that_is_caught_is_one() -> None:
    def fn(x: Tensor) -> Tensor:
        try:
            scale = float(x.max())
        except Exception:  # noqa: BLE001  as users write it
            scale = 1.0
        return x / scale

    with pytest.raises(ShardingError, match="needs the value of"):
        sl.jit(fn)(X)

    def caught(x: Tensor) -> Tensor:
        try:
            return x.view(3, 3)
        except RuntimeError:
            return x * 2

    same(sl.jit(caught)(X), X * 2)


# Other threads.

POOL = ThreadPoolExecutor(2)
WHOLE = X.clone()


def _in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0] if found else None


def _jitted() -> Any:
    with Mesh(data=2):
        return sl.jit(lambda: torch.ones(2) * 2)()


def _in_a_new_pool(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


WORK: dict[str, Callable[[Tensor], Any]] = {
    "an argument": lambda x: x * 2,
    "a tensor outside": lambda x: WHOLE * 2,
    "a gradient": lambda x: x.detach().requires_grad_().sum().backward(),
    "a jitted function": lambda x: _jitted(),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("hand", [_in_a_thread, _in_a_new_pool, lambda work: POOL.submit(work).result()])
@pytest.mark.parametrize("work", WORK)
def test_tensors_of_a_trace_in_other_threads_are_refused(work: str, hand: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        hand(lambda: WORK[work](x))
        return x

    with pytest.raises(ShardingError, match="has another thread work on tensors"):
        sl.jit(fn)(X)
    same(POOL.submit(lambda: WHOLE * 2).result(), X * 2)


def test_threads_do_other_things() -> None:
    def fn(x: Tensor) -> Tensor:
        POOL.submit(str, 1).result()
        return x * _in_a_thread(lambda: 2)

    same(sl.jit(fn)(X), X * 2)
