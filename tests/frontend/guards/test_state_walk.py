"""State is an input: modules, objects and closures bring tensors and facts; what is written to them comes back."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import threading
import time
import types
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, ShardedTensor, ShardingError
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.jit.call import methods
from shardlib.jit.call.program_cache import Programs
from shardlib.jit.jit import RetraceWarning
from tests.helpers.oracle import same

X = torch.arange(24.0).view(6, 4).sin()


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, tensor=2, rules={"batch": "data", "ff": "tensor"}) as mesh:
        yield mesh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(8, 2)
        self.scale = 1.0
        self.table: Tensor = torch.ones(2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.norm(self.lin(x)).relu()
        if self.drop.training and self.training:
            h = h * 2
        return self.out(h) * self.scale * self.table


def sharded(net: Net) -> Net:
    """A copy whose weights live on the mesh."""
    net = copy.deepcopy(net)
    for module, name, spec in (
        (net.lin, "weight", "ff _"),
        (net.lin, "bias", "ff"),
        (net.out, "weight", "_ ff"),
        (net.out, "bias", "_"),
    ):
        setattr(module, name, nn.Parameter(sl.shard(getattr(module, name).detach(), spec)))
    return net


def left(net: nn.Module) -> dict[str, Any]:
    """All that a module holds."""
    grads = {f"{k}.grad": p.grad for k, p in net.named_parameters() if p.grad is not None}
    return {**dict(net.named_parameters()), **dict(net.named_buffers()), **grads}


def as_argument(net: nn.Module) -> Callable[..., Any]:
    step = sl.jit(lambda net, x: net(x))
    return lambda x: step(net, x)


def closed_over(net: nn.Module) -> Callable[..., Any]:
    return sl.jit(lambda x: net(x))


def itself(net: nn.Module) -> Callable[..., Any]:
    return sl.jit(net)


def in_a_list(net: nn.Module) -> Callable[..., Any]:
    held = {"nets": [net]}
    return sl.jit(lambda x: held["nets"][0](x))


def of_an_object(net: nn.Module) -> Callable[..., Any]:
    class Trainer:
        def __init__(self) -> None:
            self.net = net

        @sl.jit
        def step(self, x: Tensor) -> Tensor:
            return self.net(x)

    return Trainer().step


def in_a_helper(net: nn.Module) -> Callable[..., Any]:
    def helper(x: Tensor) -> Tensor:
        return net(x)

    return sl.jit(lambda x: helper(x))


def bound(net: nn.Module) -> Callable[..., Any]:
    return sl.jit(net.forward)


WAYS = [as_argument, closed_over, itself, in_a_list, of_an_object, in_a_helper, bound]

CHANGES: dict[str, Callable[[Any], Any]] = {
    "eval": lambda net: net.eval(),
    "eval of a part": lambda net: net.norm.eval(),
    "eval of dropout": lambda net: net.drop.eval(),
    "scale": lambda net: setattr(net, "scale", 3.0),
    "a tensor that is no buffer": lambda net: setattr(net, "table", torch.tensor([1.0, 5.0])),
    "written to": lambda net: net.table.mul_(4),
    "replaced": lambda net: setattr(net.out, "bias", nn.Parameter(torch.tensor([5.0, 6.0]))),
    "data": lambda net: setattr(net.norm.weight, "data", torch.full((8,), 2.0)),
    "filled": lambda net: net.norm.weight.data.fill_(3.0),
    "loaded": lambda net: net.norm.load_state_dict({k: v + 1 for k, v in net.norm.state_dict().items()}),
    "frozen": lambda net: net.norm.requires_grad_(False),
    "hook": lambda net: net.lin.register_forward_hook(lambda m, args, out: out + 1),
    "another activation": lambda net: setattr(net, "out", nn.Sequential(nn.Tanh(), net.out)),
    "momentum": lambda net: setattr(net.norm, "momentum", 0.5),
    "no statistics": lambda net: setattr(net.norm, "track_running_stats", False),
    "buffer": lambda net: setattr(net.norm, "running_mean", torch.ones(8)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [copy.deepcopy, sharded])
def test_a_module_brings_its_state(way: Any, place: Any) -> None:
    """Two steps, a change, two more: the results and all that is left in the module."""
    torch.manual_seed(0)
    plain = Net()
    plain.drop.p = 0.0
    mine = place(plain)
    step = way(mine)
    for change in (None, CHANGES["eval"], CHANGES["scale"], CHANGES["replaced"]):
        if change is not None:
            change(plain), change(mine)
        for _ in range(2):
            same(step(X), plain(X))
            same(left(mine), left(plain))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    plain.drop.p = 0.0
    mine = copy.deepcopy(plain)
    step = sl.jit(lambda x: mine(x))
    same(step(X), plain(X))
    for _ in range(2):
        CHANGES[change](plain), CHANGES[change](mine)
        for _ in range(2):
            same(step(X), plain(X))
            same(left(mine), left(plain))


def test_nothing_changed_is_nothing_compiled() -> None:
    net = Net().eval()
    step = sl.jit(lambda x: net(x))
    for _ in range(4):
        step(X)
        with torch.no_grad():
            net.lin.weight.add_(1)
    assert step.retraces == []


def test_tied_weights_and_modules_called_twice() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain[1].weight = plain[0].weight
    mine = copy.deepcopy(plain)
    assert mine[1].weight is mine[0].weight
    step = sl.jit(lambda x: mine(mine(x)).square().sum())
    step(X).backward(), plain(plain(X)).square().sum().backward()
    same(mine[0].weight.grad, plain[0].weight.grad)
    mine[1].weight = nn.Parameter(torch.ones(4, 4))
    plain[1].weight = nn.Parameter(torch.ones(4, 4))
    same(step(X), plain(plain(X)).square().sum())


# --- what is written comes back ---------------------------------------------------------------------------------------


def add_one(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def into_a_slice(x: Tensor) -> Tensor:
    x[1:3] = 7
    return x.sum()


def through_a_view(x: Tensor) -> Tensor:
    x.t()[0].mul_(3)
    return x + 1


def and_returned(x: Tensor) -> Tensor:
    return x.mul_(2)


def data_of_it(x: Tensor) -> Tensor:
    x.data = x + 5
    return x * 1


def copied(x: Tensor) -> Tensor:
    x.copy_(x.flip(0))
    return x.sum(0)


WRITES = [add_one, into_a_slice, through_a_view, and_returned, data_of_it, copied]
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x.clone(),
    "transposed": lambda x: x.t().contiguous().t(),
    "replicated": lambda x: sl.shard(x, sl.P()),
    "rows": lambda x: sl.shard(x, "batch _"),
    "both": lambda x: sl.shard(x, "batch ff"),
    "a view": lambda x: sl.shard(torch.cat([x, x]), "batch _")[6:],
    "a plain view": lambda x: torch.cat([x, x])[6:],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", PLACES)
def test_writes_to_arguments(write: Any, place: str) -> None:
    step = sl.jit(write)
    for _ in range(2):
        plain, mine = X.clone(), PLACES[place](X)
        alias, theirs = mine.detach(), plain.detach()
        for _ in range(2):
            same(step(mine), write(plain))
            same(mine, plain)
            if write is not data_of_it:
                same(alias, theirs)


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_what_is_closed_over(write: Any) -> None:
    for place in PLACES.values():
        plain, mine = X.clone(), place(X)
        step = sl.jit(lambda y, mine=mine: write(mine) + y.sum())
        for _ in range(2):
            same(step(X), write(plain) + X.sum())
            same(mine, plain)


def test_of_much_that_was_written_before_an_error_some_is_named() -> None:
    many = [torch.zeros(2) for _ in range(11)]

    def step(x: Tensor) -> Tensor:
        torch._foreach_add_(many, 1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        sl.jit(step)(X)
    (note,) = error.value.__notes__
    assert note.startswith("Not written: many[0], ")
    assert note.endswith("many[7] and 3 more. A jitted function writes when it has returned.")


def test_what_was_written_before_an_error_is_named() -> None:
    norm, w, kept = nn.BatchNorm1d(4), torch.ones(4, requires_grad=True), torch.zeros(4)

    def step(x: Tensor, log: Tensor, n: int) -> Tensor:
        (norm(x).detach() * w).sum().backward()
        log.view(2, 2)[0].add_(n)
        torch._foreach_add_([kept], 1)
        raise KeyError("mine")

    log = sl.shard(torch.zeros(4), "a@data")
    with pytest.raises(KeyError, match="mine") as error:
        sl.jit(step)(torch.ones(3, 4), log, 2)
    (note,) = error.value.__notes__
    assert note.startswith("Not written: ")
    written = note.removeprefix("Not written: ").partition(". A jitted function")[0].split(", ")
    assert sorted(written) == [
        *("kept", "log", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "w.grad"),
    ]
    assert w.grad is None
    same([log, kept, norm.running_mean], [torch.zeros(4)] * 3)
    with pytest.raises(KeyError) as error:
        sl.jit(lambda x: {}[x.sin().shape])(torch.ones(3))
    assert not hasattr(error.value, "__notes__")


def test_a_cache_that_is_filled_in_place() -> None:
    def decode(cache: Tensor, x: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, x)
        return cache.cumsum(0)

    step, plain, mine = sl.jit(decode), torch.zeros(6, 4), sl.shard(torch.zeros(6, 4), "batch _")
    for i in range(6):
        at = torch.tensor([i])
        same(step(mine, X[i : i + 1], at), decode(plain, X[i : i + 1], at))
        same(mine, plain)
    assert step.retraces == []


def test_memory_that_two_arguments_show_is_refused() -> None:
    step = sl.jit(lambda x, y: x.add_(1) + y)
    base = X.clone()
    placed = sl.shard(base, "batch _")
    for x, y in ((base[1:], base[:5]), (placed[1:], placed[:5])):
        with pytest.raises(ShardingError, match="x and y share memory") as error:
            step(x, y)
        assert "Remedy: pass the tensor once" in str(error.value)
    same(base, X)
    same(sl.jit(lambda x, y: x + y)(base, base), X * 2)


def test_memory_that_numpy_arrays_show_is_refused() -> None:
    n = X.numpy().copy()
    t, rows, back = torch.from_numpy(n), n[4:], n[::-1]
    step = sl.jit(lambda x, y: (torch.as_tensor(x).add_(1), torch.as_tensor(y) * 2)[1])
    for x, y in ((t, n), (n, t), (n[:5], n[1:]), (n[1:], n[:5]), (n, n[:]), (t[:2], n[1:])):
        with pytest.raises(ShardingError, match="x and y share memory"):
            step(x, y)
    for fn in (
        lambda y: (t.add_(1), torch.from_numpy(n) * 2)[1],
        lambda x: x.add_(float(rows[0, 0])),
        lambda x: x.add_(torch.from_numpy(back.copy())),
    ):
        with pytest.raises(ShardingError, match="and a numpy array that it closes over share memory"):
            sl.jit(fn)(t)
    same(t, X)
    same(sl.jit(lambda x, y: torch.as_tensor(x) + torch.as_tensor(y))(n[:5], n[1:]), X[:5] + X[1:])
    same(step(n[:2], n[2:4]), X[2:4] * 2)
    same(t, torch.cat([X[:2] + 1, X[2:]]))


@pytest.mark.parametrize("place", [lambda x: x, lambda x: sl.shard(x, "batch ff")], ids=["plain", "placed"])
@pytest.mark.parametrize("specs", [None, "batch _"], ids=["open", "specs"])
def test_one_tensor_in_two_places_is_one(place: Any, specs: Any) -> None:
    """Also `is`, writes, and gradients that a function takes itself, by argument and by what it closes over."""

    def told(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if x is y else x * 3

    def written(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(1) + y

    def backward(x: Tensor, d: dict[str, Tensor]) -> Tensor:
        loss = (x * 2 + d["y"] * 3 + outer * 5).sum()
        loss.backward()
        return loss.detach()

    in_specs = None if place(X) is not X else specs
    for fn in (told, written):
        plain, mine, step = X.clone(), place(X.clone()), sl.jit(fn, in_specs=in_specs)
        for _ in range(2):
            same(step(mine, mine), fn(plain, plain))
            same(step(mine, mine.clone()), fn(plain, plain.clone()))
        same(mine, plain)
    outer = plain = X.clone().requires_grad_()
    expected = backward(plain, {"y": plain}), plain.grad
    outer = place(X.clone()).requires_grad_()
    same((sl.jit(backward)(outer, {"y": outer}), outer.grad), expected)


def test_one_tensor_that_is_to_live_in_two_places_is_two() -> None:
    square = X[:4]
    with Mesh(data=2):
        step = sl.jit(lambda x, y: x @ y if x is not y else x, in_specs=("a@data b", "a b@data"))
        same(step(square, square), square @ square)
        plan = sl.jit(lambda x, y: x + y).plan(X, X)
    assert str(plan.layout_of("x")) == str(plan.layout_of("y")) == "6, 4"


@pytest.mark.filterwarnings("ignore::shardlib.jit.jit.RetraceWarning")
def test_attributes_of_tensors_are_seen() -> None:
    step = sl.jit(lambda w: w * getattr(w, "scale", 1.0) + getattr(w, "bias", 0.0))
    for w in (X.clone(), sl.shard(X, "batch _"), nn.Parameter(X.clone())):
        same(step(w), X)
        for w.scale in (2.0, 3.0):
            same(step(w), X * w.scale)
        for value in (1.0, 2.0):
            w.bias = torch.full((4,), value)
            same(step(w), X * 3 + value)
    closed = sl.jit(lambda x: x * w.scale)
    for w.scale in (2.0, 5.0):
        same(closed(X), X * w.scale)


@functools.cache
def triangle(n: int) -> Tensor:
    return torch.ones(n, n).tril()


class Masks:
    @functools.lru_cache(4)  # noqa: B019  as users write it
    def triangle(self, n: int) -> Tensor:
        return torch.ones(n, n).tril()

    @functools.cached_property
    def ones(self) -> Tensor:
        return torch.ones(4)


@pytest.mark.parametrize("fails", [False, True])
def test_caches_keep_no_values_of_a_trace(fails: bool) -> None:
    masks = Masks()

    def fn(x: Tensor, fails: bool = False) -> Tensor:
        out = x @ (triangle(4) + masks.triangle(4)) + masks.ones
        if fails:
            raise ValueError("on the way")
        return out

    triangle.cache_clear()
    step = sl.jit(fn)
    for x in (X, X[:2], X):
        if fails:
            with pytest.raises(ValueError, match="on the way"):
                step(x, True)
        same(step(x), fn(x))
        assert type(triangle(4)) is type(masks.triangle(4)) is Tensor


def test_a_cache_that_a_number_of_the_call_fills_keeps_no_values_of_a_trace() -> None:
    """It is traced twice: with the number as an input, then as a constant."""
    places = functools.lru_cache(lambda n: torch.arange(n).float())
    fn = lambda x, n: x[:, :n] * places(n)
    want = fn(X, 3)
    same([sl.jit(fn)(X, 3) for _ in range(2)], [want, want])
    assert type(places(3)) is Tensor


def test_a_cached_property_is_computed_once() -> None:
    class Doubled:
        def __init__(self) -> None:
            self.w = torch.ones(4)

        @functools.cached_property
        def both(self) -> tuple[Tensor, Tensor]:
            return self.w * 2, self.w + 1

    plain, jitted = Doubled(), Doubled()
    for change in (lambda it: None, lambda it: it.w.add_(1), lambda it: vars(it).pop("both"), lambda it: None):
        change(plain)
        change(jitted)
        same(sl.jit(lambda x: x * jitted.both[0] + jitted.both[1])(X), X * plain.both[0] + plain.both[1])
        same(vars(jitted), vars(plain))


def test_a_cache_that_is_emptied_is_filled_anew() -> None:
    numbers = {"k": 2.0}
    scale = functools.lru_cache(lambda n: numbers["k"] * n)
    step = sl.jit(lambda x: x * scale(3))
    same([step(X), step(X)], [X * 6, X * 6])
    numbers["k"] = 5.0
    same([step(X), step(X)], [X * 6, X * 6])
    scale.cache_clear()
    same([step(X), step(X), step(X)], [X * 15, X * 15, X * 15])
    assert len(step.retraces) <= 3


def test_what_is_refused_is_not_left_behind() -> None:
    held: dict[str, Any] = {}
    items: list[Any] = [1.0]

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        held["y"] = y
        items.append(y)
        masks.all.add(y)  # type: ignore[attr-defined]
        return y

    masks = Masks()
    masks.all = set()  # type: ignore[attr-defined]
    with pytest.raises(ShardingError, match=r"(?s)keeps tensors that it computes.*masks\.all"):
        sl.jit(fn)(X)
    assert (held, items, vars(masks)) == ({}, [1.0], {"all": set()})


def test_a_refused_call_changes_nothing() -> None:
    class Log:
        calls = 0

    items, names, known, log = [1], {"a": 1}, {1}, Log()

    def fn(x: Tensor, how: str) -> Tensor:
        items.append(2)
        names["b"] = 2
        log.calls += 1
        if how == "a set":
            known.add(2)
        return x * float(x.sum()) if how == "a value" else x

    step = sl.jit(fn)
    for how, words in (("a value", "needs the value"), ("a set", "known, read in fn at .*: the items of a set change")):
        with pytest.raises(ShardingError, match=words):
            step(X, how)
        assert (items, names, known, log.calls) == ([1], {"a": 1}, {1}, 0)
    step(X, "")
    assert (items, names, known, log.calls) == ([1, 2], {"a": 1, "b": 2}, {1}, 1)


def test_what_an_earlier_trace_left_in_a_hidden_place_is_refused() -> None:
    hidden: ContextVar[Tensor | None] = ContextVar("hidden", default=None)

    def fn(x: Tensor) -> Tensor:
        if hidden.get() is None:
            hidden.set(torch.ones(4))
        return x + hidden.get()

    step = sl.jit(fn)
    with pytest.raises(ShardingError, match="fn keeps tensors that it computes"):
        step(X)
    with pytest.raises(ShardingError, match="a tensor that an earlier trace left behind"):
        step(X[:2])


def test_what_a_function_changes_itself_may_be_changed_by_others() -> None:
    class Counter:
        n, log = 0, None

        def __call__(self, x: Tensor) -> Tensor:
            self.n += 1
            self.last = {"shapes": [tuple(x.shape)]}
            return x * self.n

    counter = Counter()
    step = sl.jit(counter)
    for i, x in enumerate((X, X[:2], X, X[:2], X), 1):
        same(step(x), x * i)
        assert counter.n == i
    assert len(step.retraces) == 2, "another shape; and n is the object's own from its second call on"
    counter.n = 10
    same(step(X), X * 11)
    assert len(step.retraces) == 3
    counter.last["shapes"].append("another")
    same(step(X), X * 12)
    assert (counter.n, counter.last["shapes"]) == (12, [tuple(X.shape)])


def test_captured_tensors_deep_inside_objects_are_read_or_refused() -> None:
    class Deep:
        pass

    top = here = Deep()
    for _ in range(80):
        here.next = Deep()  # type: ignore[attr-defined]
        here = here.next  # type: ignore[attr-defined]
    here.w = sl.shard(X, "batch _")  # type: ignore[attr-defined]

    def fn(x: Tensor) -> Tensor:
        at: Any = top
        while hasattr(at, "next"):
            at = at.next
        return x + at.w

    with pytest.raises(ShardingError, match="closes over f32"):
        sl.jit(fn)(X)


def test_of_what_is_deep_a_few_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(depth: int) -> Any:
        return types.SimpleNamespace(kids=[tree(depth - 1), tree(depth - 1)] if depth else [])

    root, walks, own_part = tree(9), [0], StateWalk._visit_attributes

    def counted(*args: Any) -> None:
        walks[0] += 1
        own_part(*args)

    monkeypatch.setattr(StateWalk, "_visit_attributes", counted)
    step = sl.jit(lambda x: x + len(root.kids))
    step(X)
    walks[0] = 0
    same(step(X), X + 2)
    assert 2**6 < walks[0] < 2**6 + 210, "each second floor is a list; 200 behind the twelfth"


# --- other Python -----------------------------------------------------------------------------------------------------

SCALE = 2.0
PARAMS = {"w": torch.ones(4), "layers": [torch.ones(4), torch.ones(4)]}


def test_globals_and_variables() -> None:
    global SCALE
    offset = 1.0
    bias = torch.zeros(4)

    def fn(x: Tensor) -> Tensor:
        return x * SCALE + offset + bias + PARAMS["w"] + PARAMS["layers"][1]  # type: ignore[operator]

    step = sl.jit(fn)
    same(step(X), fn(X))
    SCALE = 5.0
    same(step(X), fn(X))
    offset = 7.0
    same(step(X), fn(X))
    bias = torch.ones(4)
    same(step(X), fn(X))
    bias.fill_(9)
    same(step(X), fn(X))
    PARAMS["layers"][1] = torch.full((4,), 3.0)  # type: ignore[index]
    same(step(X), fn(X))
    SCALE = 2.0


def test_objects_by_their_attributes() -> None:
    @dataclasses.dataclass
    class Config:
        scale: float = 1.0
        names: tuple[str, ...] = ("a",)

    class Model:
        def __init__(self) -> None:
            self.config = Config()
            self.w = torch.ones(4)

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.config.scale * len(self.config.names) + self.w

    model = Model()
    step = sl.jit(model)
    for change in ("", "scale", "names", "w", "config"):
        if change == "scale":
            model.config.scale = 3.0
        elif change == "names":
            model.config.names = ("a", "b")
        elif change == "w":
            model.w = torch.zeros(4)
        elif change == "config":
            model.config = Config(scale=9.0)
        for _ in range(2):
            same(step(X), model(X))


class Slotted:
    __slots__ = ("k", "w")

    def __init__(self) -> None:
        self.k, self.w = 2.0, torch.ones(4)


class Settings:
    scale = 2.0
    table = torch.ones(4)


def test_other_containers_of_state() -> None:
    held: dict[str, Any] = {
        "slots": Slotted(),
        "counter": Counter(k=2),
        "default": defaultdict(float, k=2.0),
        "deque": deque([2.0]),
        "array": np.array([2.0]),
        "options": {"lr": 2.0, "n": 0},
    }

    def fn(x: Tensor) -> Tensor:
        held["options"]["n"] += 1
        x = x * held["slots"].k + held["slots"].w + held["counter"]["k"] + held["default"]["k"]
        return x + held["deque"][0] + float(held["array"][0]) + held["options"]["lr"] + Settings.scale + Settings.table

    step = sl.jit(fn)

    def changes() -> Iterator[None]:
        yield
        held["slots"].k = 3.0
        yield
        held["slots"].w = torch.zeros(4)
        yield
        held["counter"]["k"] = 5
        yield
        held["default"]["k"] = 7.0
        yield
        held["deque"][0] = 9.0
        yield
        held["array"][0] = 11.0
        yield
        held["options"]["lr"] = 13.0
        yield
        Settings.scale = 15.0
        yield
        Settings.table = torch.zeros(4)
        yield
        Settings.scale, Settings.table = 2.0, torch.ones(4)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        for _ in changes():
            same(step(X), fn(X))


def test_an_optimizer_that_is_closed_over() -> None:
    w = nn.Parameter(torch.ones(4))
    opt = torch.optim.SGD([w], lr=1.0)

    def step(x: Tensor) -> None:
        opt.zero_grad()
        (w * x).sum().backward()
        opt.step()

    jitted = sl.jit(step)
    jitted(torch.ones(4))
    same(w, torch.zeros(4))
    opt.param_groups[0]["lr"] = 0.5
    jitted(torch.ones(4))
    same(w, torch.full((4,), -0.5))
    momentum = torch.optim.SGD([w], lr=1.0, momentum=0.9)

    def other(x: Tensor) -> None:
        momentum.zero_grad()
        (w * x).sum().backward()
        momentum.step()

    other = sl.jit(other)  # makes its state inside: see test_optimizers
    for expected in (-1.5, -3.4):
        other(torch.ones(4))
        same(w, torch.full((4,), expected))


def test_methods_do_not_keep_their_objects() -> None:
    class Model:
        def __init__(self) -> None:
            self.w = torch.ones(4)
            self.scale = 2.0

        @sl.jit
        def step(self, x: Tensor) -> Tensor:
            return x * self.scale + self.w

    model = Model()
    same(model.step(X), X * 2 + 1)
    assert str(model.step.plan(X)).startswith("step on data=2, tensor=2")
    model.scale = 3.0
    same(model.step(X), X * 3 + 1)
    assert len(model.step.retraces) == 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not Model.step.methods._programs


def test_a_bound_method_is_itself_in_an_argument_and_a_closure() -> None:
    class Model:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        @sl.jit
        def step(self, x: Tensor) -> Tensor:
            return x * self.scale

    one, two = Model(2.0), Model(3.0)
    assert one.step == one.step
    assert hash(one.step) == hash(one.step)
    assert one.step != two.step
    outer = sl.jit(lambda f, x: f(x) + 1)
    for _ in range(3):
        same(outer(one.step, X), X * 2 + 1)
    assert not outer.retraces
    same(outer(two.step, X), X * 3 + 1)
    one.scale = 4.0
    same(outer(one.step, X), X * 4 + 1)
    assert len(outer.retraces) == 2
    bound = types.MethodType(Model.step, one)
    same(outer(bound, X), X * 4 + 1)
    same(outer(types.MethodType(Model.step, one), X), X * 4 + 1)
    assert len(outer.retraces) == 3


def test_threads_that_come_first_together_have_one_set_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Programs):
        def __init__(self) -> None:
            time.sleep(0.05)
            super().__init__()

    monkeypatch.setattr(methods, "Programs", Slow)

    class Model:
        @sl.jit
        def step(self, x: Tensor) -> Tensor:
            return x

    model, found = Model(), list[Any]()
    threads = [threading.Thread(target=lambda: found.append(model.step.programs)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(programs is model.step.programs for programs in found)


def test_counters_and_logs_do_not_compile_again() -> None:
    log: list[Any] = []

    class Model:
        calls = 0

        @sl.jit
        def step(self, x: Tensor) -> Tensor:
            self.calls += 1
            log.append(x.shape)
            return x * 2

    model = Model()
    for _ in range(4):
        same(model.step(X), X * 2)
    assert (len(log), model.calls) == (4, 4)
    assert len(model.step.retraces) <= 1


def test_values_of_a_trace_that_are_kept_are_results_or_refused() -> None:
    kept: list[Tensor] = []

    class Model:
        last: Any = None

        def __call__(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last

    same(sl.jit(model := Model())(X), model.last)
    same(sl.jit(lambda x: kept.append(x * 3) or x)(X), X)
    same(kept[0], X * 3)


@dataclasses.dataclass
class Unregistered:
    y: Tensor


def test_dataclasses_that_nobody_registered_are_results() -> None:
    found = sl.jit(lambda x: {"a": [Unregistered(x * 2)]})(X)
    assert torch.equal(found["a"][0].y.full_tensor(), X * 2)


def local(x: Tensor) -> Any:
    @dataclasses.dataclass
    class Local:
        y: Tensor

    return Local(x)


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (local, "is a Local, with tensors in y"),
        (lambda x: {"a": [local(x)]}, r"result\['a'\]\[0\] is a Local"),
        (lambda x: (y for y in (x, x)), "is a generator"),
        (lambda x: map(abs, [x]), "is a map"),
    ],
)
def test_results_that_nobody_can_look_into_are_refused(fn: Any, what: str) -> None:
    with pytest.raises(ShardingError, match=what) as error:
        sl.jit(fn)(X)
    assert "move a class out of the function that defines it; return list(...) of a generator" in str(error.value)


def test_a_generator_function_is_refused() -> None:
    @sl.jit
    def numbers(x: Tensor) -> Iterator[Tensor]:
        yield x

    with pytest.raises(ShardingError, match="is a generator"):
        numbers(X)


# --- training steps ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_backward_inside_fills_gradients() -> None:
    torch.manual_seed(0)
    for place in (copy.deepcopy, sharded):
        plain = Net()
        plain.drop.p = 0.0
        mine = place(plain)

        def step(net: nn.Module, x: Tensor) -> Tensor:
            loss = net(x).square().mean()
            loss.backward()
            return loss

        jitted = sl.jit(step)
        for zero in (False, True, False):
            for _ in range(2):  # gradients add up
                same(jitted(mine, X), step(plain, X))
                same(left(mine), left(plain))
            if zero:
                mine.zero_grad(), plain.zero_grad()
        for p in mine.parameters():
            if isinstance(p, ShardedTensor):
                assert isinstance(p.grad, ShardedTensor)
                assert p.grad.sharding == p.sharding


@pytest.mark.long
@pytest.mark.parametrize("kept", [False, True])
def test_an_update_by_hand(kept: bool) -> None:
    torch.manual_seed(0)
    for place in (copy.deepcopy, sharded):
        plain = Net()
        plain.drop.p = 0.0
        mine = place(plain)

        def step(net: nn.Module, x: Tensor, lr: float) -> Tensor:
            loss = net(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= lr * p.grad
                    p.grad = p.grad if kept else None
            return loss.detach()

        jitted = sl.jit(step)
        for t in range(1, 5):
            same(jitted(mine, X, 0.1 / t), step(plain, X, 0.1 / t))
            same(left(mine), left(plain))
        assert len(jitted.retraces) == kept  # by the first gradient


def test_an_update_of_a_placed_argument() -> None:
    plain = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    mine = sl.shard(plain.detach(), "a@data b").requires_grad_()

    def step(w: Tensor, x: Tensor, lr: float) -> Tensor:
        loss = (x @ w).square().mean()
        loss.backward()
        with torch.no_grad():
            w.sub_(lr * w.grad)
        return loss.detach()

    jitted = sl.jit(step)
    for t in range(1, 5):
        same(jitted(mine, X, 0.1 / t), step(plain, X, 0.1 / t))
        same((mine, mine.grad), (plain, plain.grad))
    assert len(jitted.retraces) == 1  # by the first gradient


def test_functional_calls_see_what_they_are_given() -> None:
    net = nn.Linear(4, 2)
    step = sl.jit(lambda p, x: torch.func.functional_call(net, p, (x,)))
    params = {k: p.detach() + 1 for k, p in net.named_parameters()}
    same(step(params, X), F.linear(X, params["weight"], params["bias"]))


# What a function reads and changes ------------------------------------------------------------------------------------


class Mutable:
    """Plain values and tensors in attributes, a dict and a list."""

    shared = 1

    def __init__(self) -> None:
        self.n, self.rate, self.ready, self.mode = 0, 0.5, False, "a"
        self.h: Any = torch.ones(4)
        self.w, self.pos = torch.full((4,), 10.0), 0
        self.items: dict[str, Any] = {"n": 1, "h": torch.full((4,), 3.0)}
        self.list, self.last, self.cache = [5, 6], None, torch.zeros(8, 4)


def _first(m: Mutable, x: Tensor) -> Tensor:
    if not m.ready:
        m.h.copy_(x[0])
        m.ready = True
    return x - m.h


def _slot(m: Mutable, x: Tensor) -> Tensor:
    m.cache[m.pos : m.pos + 2] = x[:2]
    m.pos += 2
    return m.cache * 1


def _forgets(m: Mutable, x: Tensor) -> Tensor:
    y = x * m.w if m.h is None else x + m.h
    m.h = None
    return y


def _deletes(m: Mutable, x: Tensor) -> Tensor:
    y = x + m.h if hasattr(m, "h") else x * m.w
    if hasattr(m, "h"):
        del m.h, m.mode
    return y


def _becomes_a_number(m: Mutable, x: Tensor) -> Tensor:
    y = x * m.h
    m.h = m.h + 1 if isinstance(m.h, float) else 2.0
    return y


def _switches(m: Mutable, x: Tensor) -> Tensor:
    m.mode = "b" if m.mode == "a" else "a"
    return x if m.mode == "a" else -x


def _of_two(m: Mutable, x: Tensor) -> Tensor:
    m.n, m.pos = m.pos + 1, m.n
    return x * m.n + m.pos


def _looks(m: Mutable, x: Tensor) -> Tensor:
    m.n += 1
    return x * 2 if m.n % 2 else x


def _in_containers(m: Mutable, x: Tensor) -> Tensor:
    m.items["n"] += 2
    m.list[1] -= 1
    m.items.setdefault("rate", 8.0)
    m.items["rate"] *= 0.5
    return x * m.items["n"] + m.list[1] * m.items["rate"]


def _pops(m: Mutable, x: Tensor) -> Tensor:
    return x + m.items.pop("h", torch.zeros(4))


def _of_the_class(m: Mutable, x: Tensor) -> Tensor:
    Mutable.shared += 1
    return x * m.shared


# With how many times it is compiled again in four calls.
CHANGED: dict[str, tuple[Callable[[Mutable, Tensor], Tensor], int]] = {
    "a counter": (lambda m, x: x * (setattr(m, "n", m.n + 1) or m.n), 0),
    "a rate": (lambda m, x: x * (setattr(m, "rate", m.rate * 0.9) or m.rate), 0),
    "a flag": (_first, 1),
    "a place in a cache": (_slot, 3),
    "a tensor becomes None": (_forgets, 1),
    "a tensor is deleted": (_deletes, 1),
    "a tensor becomes a number": (_becomes_a_number, 1),
    "a text": (_switches, 1),
    "two numbers of each other": (_of_two, 0),
    "a number that is looked at": (_looks, 1),
    "items": (_in_containers, 1),
    "an item is popped": (_pops, 1),
    "of a class": (_of_the_class, 0),
    "a new attribute": (lambda m, x: x * (setattr(m, "made", getattr(m, "made", 2) + 1) or m.made), 1),
}


def _values(x: Any) -> Any:
    """What an object holds, for comparisons."""
    if isinstance(x, Tensor):
        return x.tolist()
    if isinstance(x, dict):
        return {k: _values(y) for k, y in x.items()}
    return _values(vars(x)) if isinstance(x, Mutable) else copy.copy(x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("argument", [False, True])
@pytest.mark.parametrize("name", CHANGED)
def test_what_a_function_reads_and_changes_is_changed_in_each_call(name: str, argument: bool) -> None:
    fn, again = CHANGED[name]
    found = []
    for jitted in (False, True):
        Mutable.shared = 1
        m = Mutable()
        before, given = _values(m), (m,) if argument else ()
        step: Any = (lambda x, m=m: fn(m, x)) if not argument else fn
        if jitted:
            step = sl.jit(fn if argument else lambda x, m=m: fn(m, x))
            step.plan(*given, X[:4])
            assert _values(m) == before, "a plan changes nothing"
        found.append([])
        for i in range(4):
            y = step(*given, X[:4] + i)
            found[-1].append((_values(y.full_tensor() if jitted else y), _values(m), Mutable.shared))
    assert found[0] == found[1]
    assert len(step.retraces) == again


def test_numbers_that_change_are_right_where_the_function_is_traced_twice() -> None:
    """A number among the arguments that is kept, or is no number to its reader, is traced a second time."""
    m = Mutable()

    def step(x: Tensor, n: float) -> Tensor:
        m.n += 1
        m.list.append(1)
        return x * m.n * float(Decimal(n)) + len(m.list)

    jitted = sl.jit(step)
    same(jitted(X, 2.0), X * 2 + 3)
    assert (m.n, m.list) == (1, [5, 6, 1])


def test_a_queue_of_tensors() -> None:
    m = Mutable()
    queue = [torch.ones(4), torch.zeros(4)]
    step = sl.jit(lambda x: x + queue.pop() + m.n)
    with pytest.raises(ShardingError, match=r"queue, read in <lambda> at .*: items of a list are removed"):
        step(X)
    assert len(queue) == 2
    held = types.SimpleNamespace(queue=queue)

    def taken(x: Tensor) -> Tensor:
        *held.queue, last = held.queue
        return x + last + m.n

    step = sl.jit(taken)
    same([step(X), step(X)], [X + m.n, X + 1 + m.n])
    assert not held.queue


# Odd objects ----------------------------------------------------------------------------------------------------------


class Named(functools.partial):  # type: ignore[type-arg]
    """A partial of a class of its own."""


class Options(dict):  # type: ignore[type-arg]
    """A dict with attributes beside its items."""


@dataclasses.dataclass
class Late:
    """A dataclass that has more than its fields."""

    n: int = 1

    def __post_init__(self) -> None:
        self.scale = 2.0


def _odd() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]]:
    """Functions of what they close over, and a change of it."""
    factor, normal, long = [2.0], torch.distributions.Normal(torch.zeros(4), torch.ones(4)), [1] * 1001
    data, named = torch.utils.data.TensorDataset(torch.ones(4)), Named(lambda x: x * factor[0])
    return {
        "a partial of a class of its own": (lambda x: named(x), lambda: factor.__setitem__(0, 3.0)),
        "a distribution": (lambda x: x + normal.loc, lambda: setattr(normal, "loc", torch.full((4,), 7.0))),
        "a dataset": (lambda x: x + data.tensors[0], lambda: setattr(data, "tensors", (torch.full((4,), 5.0),))),
        "a long list": (
            lambda x: torch.arange(4) * long[0] + x[0].long(),
            lambda: long.__setitem__(slice(None), [1.0] * 1001),
        ),
    }


@pytest.mark.parametrize("name", _odd())
def test_changes_in_odd_objects_are_seen(name: str) -> None:
    fn, change = _odd()[name]
    step = sl.jit(fn)
    same(step(X), fn(X))
    change()
    same(step(X), fn(X))


@pytest.mark.parametrize("kind", [Options, Late])
def test_static_arguments_count_with_their_attributes(kind: Any) -> None:
    setting = kind()
    setting.scale = 2.0
    step = sl.jit(lambda x, c: x * c.scale, static_argnums=1)
    same(step(X, setting), X * 2)
    setting.scale = 3.0
    same(step(X, setting), X * 3)


def test_threads_are_freed_when_they_have_ended() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    gone = weakref.ref(thread)
    del thread
    assert gone() is None


def test_a_jitted_method_has_the_name_of_its_function() -> None:
    class Model:
        @sl.jit
        def step(self, x: Tensor) -> Tensor:
            """Twice."""
            return x * 2

    assert (Model().step.__name__, Model().step.__doc__) == ("step", "Twice.")


@pytest.mark.filterwarnings("ignore::shardlib.jit.jit.RetraceWarning")
def test_a_budget_does_not_compile_again() -> None:
    step = sl.jit(lambda x: x * 2, comm_budget=sl.comm_budget(max_bytes=0))
    for _ in range(2):
        for n in range(1, 11):
            step(torch.ones(n, 4))
    assert len(step.retraces) == 9


def test_numbers_that_change_beside_a_scan_and_an_error() -> None:
    """Tensors and numbers that are found are named apart."""
    m = Mutable()

    def scanned(x: Tensor) -> Tensor:
        m.n += 1
        total: Tensor = sl.scan(lambda c, row: (c + row * m.w, None), torch.zeros(4), x)[0]
        return total * m.n

    step = sl.jit(scanned)
    for i in range(1, 4):
        same(step(X), (X * m.w).sum(0) * i)

    def raises(x: Tensor) -> Tensor:
        m.n += 1
        m.h.add_(1)
        if len(x) == 2:
            raise ValueError("too short")
        return x * m.n

    step = sl.jit(raises)
    step(X), step(X)
    with pytest.raises(ValueError, match="too short") as error:
        step(X[:2])
    assert error.value.__notes__ == ["Not written: m.h. A jitted function writes when it has returned."]
    assert m.n == 5


class _Held(types.SimpleNamespace):
    """Tensors under names."""


def _handed_on(t: _Held, x: torch.Tensor) -> torch.Tensor:
    t.prev = t.h
    t.h = t.h + x
    return x.sum()


def _in_a_list(t: _Held, x: torch.Tensor) -> torch.Tensor:
    t.list[0] = t.h
    t.h = t.h + x
    return x.sum()


def _ping_pong(t: _Held, x: torch.Tensor) -> torch.Tensor:
    t.prev.copy_(t.h + x)
    t.h, t.prev = t.prev, t.h
    return x.sum()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("look", [lambda h: h[0], lambda h: setattr(h, "tag", "x"), lambda h: None])
@pytest.mark.parametrize("step", [_handed_on, _in_a_list, _ping_pong])
def test_tensors_that_change_places_are_those_of_each_call(step: Any, look: Any, placed: bool) -> None:
    """Whoever was viewed, or has an attribute, is an owner of values, too: it was kept as the program's constant."""

    def run(place: Callable[[torch.Tensor], torch.Tensor], wrap: Callable[[Any], Any]) -> list[Any]:
        t = _Held(h=place(torch.zeros(4)), prev=place(torch.ones(4)), list=[place(torch.ones(4))])
        jitted, found = wrap(lambda x: step(t, x)), []
        for _ in range(4):
            look(t.h), look(t.prev)
            jitted(torch.ones(4))
            found += [t.h.detach().clone(), t.prev.detach().clone(), t.list[0].detach().clone(), t.h is t.prev]
        return found

    with sl.Mesh(data=2):
        place = (lambda x: sl.shard(x, "a@data")) if placed else (lambda x: x)
        same(run(place, sl.jit), run(lambda x: x, lambda fn: fn))


def test_a_container_that_is_filled_and_replaced_is_as_it_was() -> None:
    class Average:
        def __init__(self, model: torch.nn.Module) -> None:
            self.model, self.kept = model, {n: p.data.clone() * 2 for n, p in model.named_parameters()}
            self.backup: dict[str, torch.Tensor] = {}

        def step(self, x: torch.Tensor) -> torch.Tensor:
            for n, p in self.model.named_parameters():
                self.backup[n], p.data = p.data, self.kept[n]
            y = self.model(x).detach()
            for n, p in self.model.named_parameters():
                p.data = self.backup[n]
            self.backup = {}
            return y

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    average, plain = Average(net), Average(copy.deepcopy(net))
    with sl.Mesh(data=2):
        step = sl.jit(average.step)
        for i in range(3):
            same(step(torch.ones(3, 4) + i), plain.step(torch.ones(3, 4) + i))
            assert average.backup == {}
            same(list(net.parameters()), list(plain.model.parameters()))


def test_halves_without_a_common_element_share_no_memory() -> None:
    both, plain = (torch.arange(32.0).view(4, 8) for _ in range(2))
    with sl.Mesh(data=2):
        step = sl.jit(lambda q, k: (q.add_(k), q.sum())[1])
        same(step(*both.chunk(2, -1)), plain[:, :4].add_(plain[:, 4:]).sum())
        same(both, plain)
        with pytest.raises(ShardingError, match="q and k share memory"):
            step(both[:, :4], both[:, 3:7])


def test_a_gradient_that_is_an_argument_is_that_one() -> None:
    w, g = torch.zeros(4, requires_grad=True), torch.ones(4)

    def step(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        w.grad = g
        return x.sum()

    with sl.Mesh(data=2):
        sl.jit(step)(torch.ones(4), g)
    assert w.grad is g


def test_a_copy_of_a_parameter_has_no_gradient() -> None:
    with sl.Mesh(data=2):
        p = torch.nn.Parameter(sl.shard(torch.ones(4, 2), "a@data _"))
        (p * 2).sum().backward()
        assert copy.deepcopy(p).grad is None


def test_a_parameter_made_of_a_sharded_tensor_inside_is_refused() -> None:
    with sl.Mesh(data=2):
        v = sl.shard(torch.ones(2, 4), "a@data _")
    step = sl.jit(lambda x: x @ torch.nn.Parameter(v).t())
    with sl.Mesh(data=2), pytest.raises(ShardingError, match=r"makes a parameter of a ShardedTensor[\s\S]*detach"):
        step(torch.ones(3, 4))


class _Bare:
    """It has no attribute of its own."""


class _Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        type(self).calls = getattr(type(self), "calls", 0) + 1
        return x * type(self).calls


def _counts_itself(x: Tensor) -> Tensor:
    _counts_itself.calls = getattr(_counts_itself, "calls", 0) + 1
    return x * _counts_itself.calls


def _counts_on_a_class(x: Tensor) -> Tensor:
    _Bare.calls = getattr(_Bare, "calls", 0) + 1
    return x * _Bare.calls


@pytest.mark.parametrize(
    ("fn", "holder"), [(_counts_itself, _counts_itself), (_counts_on_a_class, _Bare), (_Counting(), _Counting)],
    ids=["function", "class", "module"],
)  # fmt: skip
def test_a_plan_leaves_no_first_attribute(fn: Callable[[Tensor], Tensor], holder: Any) -> None:
    """What calls would set for the first time is not there when only a plan was asked for."""
    step = sl.jit(lambda x: fn(x))
    step.plan(X)
    assert not hasattr(holder, "calls")
    try:
        same([step(X) for _ in range(3)], [X, X * 2, X * 3])
    finally:
        del holder.calls


def test_a_first_attribute_is_what_the_call_computed() -> None:
    """Of a function or a class, as of any object."""

    def noted() -> None: ...

    class Noted: ...

    def fn(x: Tensor) -> Tensor:
        noted.last, Noted.last = x * 2, x * 3
        return x

    step = sl.jit(fn)
    step.plan(X)
    assert not hasattr(noted, "last")
    assert not hasattr(Noted, "last")
    for x in (X, X + 1, X + 2):
        step(x)
        same([noted.last, Noted.last], [x * 2, x * 3])
