"""What a function does to Python's values beside returning: every call does it, or the function is traced anew."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
import datetime
import enum
import functools
import math
import re
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, ShardedTensor, ShardingError
from shardlib.jit.call import compile_call
from shardlib.jit.jit import RetraceWarning
from tests.helpers.oracle import same

ONE = torch.ones(())
X = torch.ones(2, 4)
Case = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]  # a function, and a look at what it changes


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        yield mesh


class Phase(enum.Enum):
    A, B, C = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int = 0


@dataclasses.dataclass
class Open:
    n: int = 0


class Items(dict):  # type: ignore[type-arg]
    """A dict that has attributes, too."""


class Numbers(list):  # type: ignore[type-arg]
    """A list that has attributes, too."""


def held(value: Any, step: Callable[[Any, Tensor], tuple[Any, Tensor]]) -> Callable[[], Case]:
    """`step(what an attribute has, x)` gives what it has next, and the result."""

    def make() -> Case:
        owner = types.SimpleNamespace(value=copy.deepcopy(value))

        def fn(x: Tensor) -> Tensor:
            owner.value, y = step(owner.value, x)
            return y

        return fn, lambda: owner.value

    return make


def inside(value: Any, step: Callable[[Any, Tensor], Tensor]) -> Callable[[], Case]:
    """`step(a container, x)` changes the container, and reads it."""

    def make() -> Case:
        container = copy.deepcopy(value)
        return lambda x: step(container, x), lambda: container

    return make


def _next(d: Any, key: Any) -> Any:
    d[key] = d.get(key, 0) + 1
    return d[key]


def _taken(d: dict[str, int], x: Tensor) -> Tensor:
    if "a" in d:
        del d["a"]
        return x
    return x * 10


def _cached(d: dict[int, int], x: Tensor) -> Tensor:
    if 3 not in d:
        d[3] = 7
        return x * 100
    return x * d[3]


def _grown(d: Any, x: Tensor, k: int = 3) -> Tensor:
    d.clear() if len(d) == k else d.update({len(d): 1})
    return x * len(d)


def _logged(h: list[float], x: Tensor, v: float = 1.5) -> Tensor:
    h.append(v)
    return x * sum(h) / len(h)


def _grown_anew(h: list[int], x: Tensor) -> Tensor:
    h[0] += 1
    h.append(1)
    return x * sum(h)


def _put(x: Any, key: Any, value: Any) -> Any:
    x[key] = value
    return value


def _swapped(d: Any, a: Any, b: Any) -> Any:
    d[a], d[b] = d[b], d[a]
    return d[a]


def _counted(x: Any) -> int:
    x.step += 1
    return int(x.step)


def a_cell() -> Case:
    pair = (1, 1)

    def fn(x: Tensor) -> Tensor:
        nonlocal pair
        a, b = pair
        pair = (b, a + b)
        return x * a

    return fn, lambda: pair


def a_default() -> Case:
    def fn(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return x * len(seen)

    fn.__defaults__ = ([],)
    return fn, lambda: fn.__defaults__


def attribute_of(make: Callable[[], Any]) -> Callable[[], Case]:
    def case() -> Case:
        owner = make()
        owner.step = 0
        return lambda x: x * _counted(owner), lambda: (owner.step, str(owner))

    return case


def of_a_parameter() -> Case:
    w = nn.Parameter(torch.ones(()))
    w.step = 0  # type: ignore[attr-defined]
    return lambda x: (x * w * _counted(w)).detach(), lambda: w.step  # type: ignore[attr-defined]


def a_counter_and_a_list() -> Case:
    s, h = types.SimpleNamespace(step=0), []

    def fn(x: Tensor) -> Tensor:
        h.append(_counted(s))
        return x * len(h)

    return fn, lambda: (s.step, h)


def a_module_that_is_chosen() -> Case:
    torch.manual_seed(0)
    m = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    m.now = m[0]

    def fn(x: Tensor) -> Tensor:
        y = m.now(x[None]).sum().detach()
        m.now = m[1] if m.now is m[0] else m[0]
        return y

    return fn, lambda: m.now is m[0]


def a_buffer() -> Case:
    class Tables(nn.Module):
        n = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.n < 3:
                self.n += 1
                self.register_buffer("table", torch.arange(self.n) * 2.0)
            return x * self.table.sum()

    m = Tables()
    return m, lambda: ({k: v.tolist() for k, v in m.state_dict().items()}, m.n)


def a_scheduler() -> Case:
    w = nn.Parameter(torch.ones(6))
    opt = torch.optim.SGD([w], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1.0 if n < 2 else 0.1)

    def fn(x: Tensor) -> Tensor:
        opt.zero_grad()
        (x * w).sum().backward()
        opt.step()
        scheduler.step()
        return x

    return fn, lambda: (scheduler.get_last_lr(), opt.param_groups[0]["lr"], [round(v, 5) for v in w.tolist()])


def a_tensor_as_a_key() -> Case:
    w, seen = torch.ones(()), {}

    def fn(x: Tensor) -> Tensor:
        seen[w] = 1
        return x * w * len(seen)

    return fn, lambda: seen


def phases() -> Case:
    s = types.SimpleNamespace(n=0, phase="warm")

    def fn(x: Tensor) -> Tensor:
        s.n += 1
        s.phase = "end" if s.n >= 4 else "main" if s.n >= 2 else s.phase
        return x * len(s.phase)

    return fn, lambda: (s.n, s.phase)


def an_object_made_once() -> Case:
    s = types.SimpleNamespace(made=None)

    def fn(x: Tensor) -> Tensor:
        if s.made is None:
            s.made = types.SimpleNamespace(step=0)
        return x * _counted(s.made)

    return fn, lambda: s.made and s.made.step


def two_names() -> Case:
    s = types.SimpleNamespace(a=[0], b=None)

    def fn(x: Tensor) -> Tensor:
        s.a = s.b = [*s.a, len(s.a)]
        s.b.append(1)
        return x * len(s.a)

    return fn, lambda: (s.a, s.a is s.b)


def lists_that_change_places() -> Case:
    first, second = [1], [2, 2]
    s = types.SimpleNamespace(a=first, b=second)

    def fn(x: Tensor) -> Tensor:
        s.a, s.b = s.b, s.a
        return x * len(s.a)

    return fn, lambda: (s.a is first, s.b is second)


def the_last_used() -> Case:
    d = collections.OrderedDict(a=1, b=2, c=3)

    def fn(x: Tensor) -> Tensor:
        d.move_to_end(next(iter(d)))
        return x * d[next(iter(d))]

    return fn, lambda: list(d)


def rotated(d: Any) -> Callable[[], Case]:
    def case() -> Case:
        items = copy.deepcopy(d)

        def fn(x: Tensor) -> Tensor:
            k = next(iter(items))
            items[k] = items.pop(k)
            return x * items[next(iter(items))]

        return fn, lambda: list(items)

    return case


def a_log_that_is_read(read: Callable[[Any], int]) -> Callable[[], Case]:
    def case() -> Case:
        s = types.SimpleNamespace(log=[])

        def fn(x: Tensor) -> Tensor:
            s.log.append(1)
            return x * read(s)

        return fn, lambda: s.log

    return case


class Counting(list):  # type: ignore[type-arg]
    """A list whose append says how long it is."""

    def append(self, x: Any) -> int:  # type: ignore[override]
        super().append(x)
        return len(self)


def a_shape() -> Case:
    s = types.SimpleNamespace(shape=None, n=0)

    def fn(x: Tensor) -> Tensor:
        s.n = s.shape.numel() if s.shape is not None else s.n
        s.shape = x.shape
        return x * s.n

    return fn, lambda: (s.shape, s.n)


def buffers_in_turns() -> Case:
    both = [[1.0], [2.0]]
    s = types.SimpleNamespace(now=both[0], i=0)

    def fn(x: Tensor) -> Tensor:
        s.i = 1 - s.i
        s.now = both[s.i]
        s.now[0] += 1
        return x * s.now[0]

    return fn, lambda: (both, s.now is both[s.i])


def a_ring() -> Case:
    s = types.SimpleNamespace(kept=[torch.zeros(()) for _ in range(3)], i=0)

    def fn(x: Tensor) -> Tensor:
        s.kept[s.i] = x * (s.i + 1)
        s.i = (s.i + 1) % 3
        return s.kept[s.i] * 1

    return fn, lambda: [float(v) for v in s.kept]


EFFECTS: dict[str, Callable[[], Case]] = {
    "a tuple": held((0, 1), lambda t, x: ((t[0] + 1, t[1] + 1), x * t[1])),
    "a list": held([1.0, 2.0], lambda t, x: ([v * 0.5 for v in t], x * sum(t))),
    "a dict": held({"a": 1}, lambda t, x: ({k: v + 1 for k, v in t.items()}, x * t["a"])),
    "an enum": held(Phase.A, lambda t, x: (Phase((t.value + 1) % 3), x * t.value)),
    "a function": held(None, lambda t, x: (torch.neg if t is None else t, x if t is None else t(x))),
    "a number of numpy's": held(np.float32(0), lambda t, x: (t + 1, x * float(t))),
    "a number that becomes numpy's": held(1.0, lambda t, x: (t * np.exp(-0.5), x * float(t))),
    "tensors or none": held((), lambda t, x: (() if t else (x * 2,), x * len(t))),
    "a variable": a_cell,
    "an item that is a tuple": inside({"r": (0, 1)}, lambda d, x: x * _put(d, "r", (d["r"][0] + 1, d["r"][1] + 1))[1]),
    "a new key": inside({}, lambda d, x: x * _next(d, "n")),
    "a new key of a counter": inside(collections.Counter(), lambda d, x: x * _next(d, "n")),
    "a new key of a defaultdict": inside(collections.defaultdict(int), lambda d, x: x * _next(d, "n")),
    "a cache": inside({}, _cached),
    "a list that grows": inside([], _logged),
    "a list whose items change while it grows": inside(
        [1], lambda h, x: (_put(h, 0, h[0] + 1), h.append(1), x * sum(h))[2]
    ),
    "a list that grows at its front": inside([1], lambda h, x: (h.insert(0, 2), x * h[0] * len(h))[1]),
    "an item of a tuple": held((0, {"n": 1}), lambda t, x: ((t[0] + 1, {"n": t[1]["n"] * 2}), x * t[0] * t[1]["n"])),
    "a sum of tensors": inside({"loss": torch.zeros(())}, lambda d, x: _put(d, "loss", d["loss"] + x) * 2),
    "a sum from a number": inside({"loss": 0.0}, lambda d, x: _put(d, "loss", d["loss"] + x) * 2),
    "a cache of keys": inside({"k": torch.zeros(0)}, lambda d, x: _put(d, "k", torch.cat([d["k"], x[None]])).sum()),
    "a list of tensors": inside([], lambda h, x: (h.append(x * len(h)), torch.stack(h).sum())[1]),
    "tensors that change places": inside(
        {"a": torch.ones(()), "b": torch.zeros(())}, lambda d, x: x * _swapped(d, "a", "b")
    ),
    "a default argument": a_default,
    "an attribute of a dict": attribute_of(lambda: Items(a=1)),
    "an attribute of a list": attribute_of(lambda: Numbers([1])),
    "an attribute of a parameter": of_a_parameter,
    "a counter, and a list": a_counter_and_a_list,
    "a module": a_module_that_is_chosen,
    "a buffer": a_buffer,
    "a scheduler": a_scheduler,
    "phases": phases,
    "a ring": a_ring,
    "two names for one": two_names,
    "lists that change places": lists_that_change_places,
    "a log that getattr reads": a_log_that_is_read(lambda s: len(getattr(s, "log"))),  # noqa: B009
    "a log that vars reads": a_log_that_is_read(lambda s: len(vars(s)["log"])),
    "a log that tells": inside(Counting(), lambda h, x: x * h.append(1)),
    "a shape": a_shape,
    "buffers in turns": buffers_in_turns,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EFFECTS)
def test_every_call_has_its_effects(name: str) -> None:
    found = []
    for jitted in (False, True):
        fn, look = EFFECTS[name]()
        if jitted:
            fn = sl.jit(fn)
            before = repr(look())
            fn.plan(ONE)  # type: ignore[attr-defined]
            assert repr(look()) == before, "a plan changes nothing"
        found.append([(round(float(fn(ONE)), 4), repr(_plain(look()))) for _ in range(5)])
    assert found[0] == found[1]


REFUSED: dict[str, tuple[Callable[[], Case], str, str, str]] = {
    "a set": (
        held(frozenset({0}), lambda t, x: (t | {len(t)}, x * len(t))),
        "owner.value",
        "another frozenset is bound",
        "bind a list or a dict",
    ),
    "a frozen dataclass": (
        held(Frozen(), lambda t, x: (dataclasses.replace(t, n=t.n + 1), x * t.n)),
        "owner.value",
        "another object, a Frozen, is bound",
        "make the object before the first call",
    ),
    "a dataclass": (
        held(Open(), lambda t, x: (dataclasses.replace(t, n=t.n + 1), x * t.n)),
        "owner.value",
        "another object, a Open, is bound",
        "make the object before the first call",
    ),
    "an array": (
        held(np.zeros(2), lambda t, x: (t + 1, x * float(t[0]))),
        "owner.value",
        "another object, a ndarray, is bound",
        "make the object before the first call",
    ),
    "a key that goes": (inside({"a": 1}, _taken), "container", "a key of a dict is deleted", "bind a new dict"),
    "a dict that is emptied": (
        inside({0: 1, 1: 1, 2: 1}, _grown),
        "container",
        "a key of a dict is deleted",
        "bind a new dict",
    ),
    "a long dict": (
        inside(dict.fromkeys(range(1100), 1), lambda d, x: x * _next(d, 700)),
        "container",
        "items of a dict of more than 1000 change",
        "hold a tensor, and write to it in place",
    ),
    "a list that shrinks": (
        inside([3, 2, 1], lambda h, x: x * (h.pop() if h else 0)),
        "container",
        "items of a list are removed",
        "bind a new list",
    ),
    "a long list": (
        inside([0] * 1100, lambda h, x: x * _put(h, 700, h[700] + 1)),
        "container",
        "items of a list of more than 1000 change",
        "hold a tensor, and write to it in place",
    ),
    "a set that grows": (
        inside(set(), lambda s, x: (s.add(len(s)), x * len(s))[1]),
        "container",
        "the items of a set change",
        "hold the items as keys of a dict",
    ),
    "a deque": (
        inside(collections.deque([1, 2, 3]), lambda d, x: (d.rotate(1), x * d[0])[1]),
        "container",
        "the items of a deque change",
        "hold a list and an index",
    ),
    "an item of a deque": (
        inside(collections.deque([0, 0]), lambda d, x: x * _put(d, 0, d[0] + 1)),
        "container",
        "the items of a deque change",
        "hold a list and an index",
    ),
    "an item of an array": (
        inside(np.zeros(1), lambda v, x: x * float(_put(v, 0, v[0] + 1))),
        "container",
        "the elements of a ndarray change",
        "hold a tensor, and write to it in place",
    ),
    "bytes": (
        inside(bytearray(b"\0"), lambda b, x: x * _put(b, 0, b[0] + 1)),
        "container",
        "the elements of a bytearray change",
        "hold a tensor, and write to it in place",
    ),
    "an object made once": (
        an_object_made_once,
        "s.made",
        "another object, a SimpleNamespace, is bound",
        "make the object before the first call",
    ),
    "the last used": (the_last_used, "d", "the keys of a OrderedDict change their order", "bind a new dict"),
    "the order of numbers": (
        rotated({"a": 1, "b": 2, "c": 3}),
        "items",
        "the keys of a dict change their order",
        "bind a new dict",
    ),
    "the order of tensors": (
        rotated({"a": torch.ones(()), "b": torch.zeros(())}),
        "items",
        "the keys of a dict change their order",
        "bind a new dict",
    ),
    "a deque that grows": (
        inside(collections.deque(), lambda d, x: (d.append(1), x * len(d))[1]),
        "container",
        "the items of a deque change",
        "hold a list and an index",
    ),
    "a set that nobody reads": (
        inside(set(), lambda s, x: (s.add(1), x)[1]),
        "container",
        "the items of a set change",
        "hold the items as keys of a dict",
    ),
    "an array of numbers": (
        inside(array.array("i", [0]), lambda b, x: x * _put(b, 0, b[0] + 1)),
        "container",
        "the elements of a array change",
        "hold a tensor, and write to it in place",
    ),
    "a tensor as a key": (
        a_tensor_as_a_key,
        "seen",
        "a tensor is the key of a new item",
        "use a name or a number as the key",
    ),
    "a new key in another order": (
        inside({"a": 1, "b": 2}, lambda d, x: x * _put(d, "a", d.pop("a") + 1)),
        "container",
        "the keys of a dict change their order",
        "bind a new dict",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_call_can_repeat_is_refused_before_anything_runs(name: str) -> None:
    make, place, change, remedy = REFUSED[name]
    fn, look = make()
    step, before = sl.jit(fn), repr(look())
    for call in (step.plan, step, step):
        with pytest.raises(ShardingError, match="has side effects that its calls cannot repeat") as error:
            call(ONE)
        assert f"  * {place}" in str(error.value)
        assert re.search(r", read in \S+ at test_python_effects.py:\d+: ", str(error.value))
        assert f": {change}\nRule: each call binds tensors, numbers, texts" in str(error.value)
        assert f"Remedy: {remedy}" in str(error.value)
        assert repr(look()) == before


def test_a_default_that_grows_is_read_by_its_parameter() -> None:
    """By its length: it is no log."""
    for named in (False, True):

        def fn(x: Tensor, *, seen: list[int]) -> Tensor:
            seen.append(1)
            return x * len(seen)

        fn.__kwdefaults__ = {"seen": []}
        step = sl.jit(fn if named else a_default()[0])
        assert [float(step(ONE)) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]


def _plain(x: Any) -> Any:
    """Values without what jit makes of tensors."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: round(float(t.detach().sum()), 4), x)


def test_every_effect_that_is_refused_is_listed() -> None:
    owner = types.SimpleNamespace(made=Open(), seen={1}, n=0)

    def fn(x: Tensor) -> Tensor:
        owner.n += 1
        owner.made = Open(owner.made.n + 1)
        owner.seen.add(2)
        return x * owner.made.n

    with pytest.raises(ShardingError, match=r"(?s)\* owner.made, read in fn.*\* owner.seen, read in fn"):
        sl.jit(fn)(X)
    assert (owner.made, owner.seen, owner.n) == (Open(), {1}, 0)


def test_what_another_thread_changes_meanwhile_is_its_own() -> None:
    owner = types.SimpleNamespace(n=1.0, other=None)

    def fn(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: setattr(owner, "other", 3))
        thread.start()
        thread.join()
        return x * owner.n

    same(sl.jit(fn)(X), X)
    assert owner.other == 3


def test_appends_to_lists_that_are_not_read_need_no_new_trace() -> None:
    shapes: list[Any] = []
    owner = types.SimpleNamespace(losses=[torch.zeros(())])

    def fn(x: Tensor, n: float) -> Tensor:
        shapes.append(x.shape)
        owner.losses.append((x * n).sum())
        owner.losses.append(n)
        return x * n

    step = sl.jit(fn)
    for n in (1.0, 2.0, 3.0):
        same(step(X, n), X * n)
    assert (shapes, step.retraces) == ([X.shape] * 3, [])
    assert [float(x) for x in owner.losses] == pytest.approx([0, X.sum(), 1, 2 * X.sum(), 2, 3 * X.sum(), 3])


class Meter(list):
    """A list that counts what it got."""

    total = 0.0

    def append(self, x: float) -> None:
        super().append(x)
        self.total += x


def _tuple_around_a_list(s: Any) -> Any:
    n, items = s.pair
    items.append(n)
    s.pair = (n + 1, items)
    return len(items)


def _dict_around_a_dict(s: Any) -> Any:
    s.state = {**s.state, "step": s.state["step"] + 1}
    s.inner["n"] += 1
    return s.state["inner"]["n"]


def _row_of_a_list(s: Any) -> Any:
    s.rows.append(len(s.rows))
    s.row["n"] += 1
    return s.rows[0]["n"]


def _meter(s: Any) -> Any:
    s.meter.append(2.0)
    return s.meter.total


@pytest.mark.parametrize("change", [_tuple_around_a_list, _dict_around_a_dict, _row_of_a_list, _meter])
def test_objects_inside_new_values_stay_the_same(change: Any) -> None:
    def fresh() -> Any:
        row, inner = {"n": 0}, {"n": 0}
        return types.SimpleNamespace(
            pair=(1, [2]), inner=inner, state={"step": 0, "inner": inner}, row=row, rows=[row], meter=Meter()
        )

    plain, jitted = fresh(), fresh()
    held = jitted.pair[1], jitted.inner, jitted.row, jitted.meter
    step = sl.jit(lambda x: x * change(jitted))
    for _ in range(4):
        same(step(X), X * change(plain))
        assert (jitted, jitted.meter.total) == (plain, plain.meter.total)
    now = jitted.pair[1], jitted.state["inner"], jitted.rows[0], jitted.meter
    assert all(a is b for a, b in zip(held, now, strict=True))


def test_what_raises_leaves_nothing_behind() -> None:
    s = types.SimpleNamespace(n=0, text="a", seen=[])

    def fn(x: Tensor, bad: bool) -> Tensor:
        s.n, s.text = s.n + 1, "b"
        s.seen.append(len(s.seen))
        if bad:
            raise KeyError
        return x * s.n

    step = sl.jit(fn)
    for bad, left in ((True, (0, "a", [])), (False, (1, "b", [0])), (True, (1, "b", [0]))):
        with contextlib.suppress(KeyError):
            step(X, bad)
        assert (s.n, s.text, s.seen) == left


def test_a_number_keeps_its_type_and_its_sign() -> None:
    power = sl.jit(lambda x, n: x * (-2) ** n)
    same([power(X, 2), power(X, 4)], [X * 4, X * 16])
    whole = sl.jit(lambda x, n: x * 2**n)
    given = torch.arange(4)
    same(whole(given, 3), given * 8)
    y = whole(given, -1)
    assert y.dtype == y.full_tensor().dtype == torch.float32
    signed = types.SimpleNamespace(c=complex(0.0, 0.0))
    sign = sl.jit(lambda x: x * math.copysign(1, signed.c.real))
    same(sign(X), X)
    signed.c = complex(-0.0, 0.0)
    same(sign(X), -X)


def test_attributes_of_what_is_called_and_of_classes() -> None:
    @sl.jit
    def step(x: Tensor) -> Tensor:
        step.n += 1
        return x * step.n * step.scale

    step.n = 0
    for scale in (2.0, 3.0, torch.tensor(4.0)):
        step.scale = scale
        same(step(X), X * step.n * scale)
    assert step.n == 3

    class Scaled(functools.partial):  # type: ignore[type-arg]
        pass

    part = Scaled(torch.mul)
    of_a_partial = sl.jit(lambda x: part(x, part.scale))
    local = threading.local()
    of_a_thread = sl.jit(lambda x: x * local.scale)
    for scale in (2.0, 3.0):
        part.scale = local.scale = scale
        same([of_a_partial(X), of_a_thread(X)], [X * scale] * 2)

    class Base:
        k = 1.0

    class Derived(Base):
        m = 5

    c = Derived()
    of_a_class = sl.jit(lambda x: x * c.k)
    same(of_a_class(X), X)
    del Derived.m
    Derived.k = 2.5
    same(of_a_class(X), X * 2.5)
    Derived.k = 3.0
    same(of_a_class(X), X * 3.0)


def test_results_that_can_be_changed_are_new_in_every_call() -> None:
    step = sl.jit(lambda x: (x, {1, 2}, [3]))
    for result in step(X)[1:]:
        result.clear()
    assert step(X)[1:] == ({1, 2}, [3])


def test_threads_that_trace_do_not_see_each_other() -> None:
    owner, mesh, errors = types.SimpleNamespace(h=torch.ones(4)), Mesh(data=2), []

    def keeps(x: Tensor) -> Tensor:
        owner.h = owner.h * 1
        return x + owner.h

    steps = [sl.jit(keeps), sl.jit(lambda x: x + owner.h)]

    def work(i: int) -> None:
        with mesh:
            for n in range(3, 7):
                try:
                    same(steps[i % 2](torch.ones(n * 2 + i // 2, 4)), torch.full((n * 2 + i // 2, 4), 2.0))
                except Exception as error:  # noqa: BLE001  told by the thread that looks
                    errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_views_beside_each_other_are_two() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b

    a, b = torch.zeros(2, 4).unbind()
    same(sl.jit(fn)(a, b), torch.ones(4))
    same([a, b], [torch.ones(4), torch.zeros(4)])


def test_a_lazy_module_is_named() -> None:
    with pytest.raises(ShardingError, match="call the module once without jit"):
        sl.jit(nn.LazyLinear(3))(X)


# Results of ops outside, beside what they come from.


def from_a_leaf(make: Callable[[Any], Any], use: Callable[[Any, Any, Tensor], Tensor]) -> Callable[[], Any]:
    def case() -> Any:
        w = nn.Parameter(torch.arange(4.0) + 1)
        h = make(w)
        return lambda x: use(h, w, x), [w]

    return case


def tied() -> Any:
    torch.manual_seed(0)
    m = nn.Linear(4, 4)
    e = m.weight.t()
    return lambda x: (m(x) @ e).sum(), list(m.parameters())


def of_shards() -> Any:
    w = sl.shard(torch.arange(4.0), "a@data").requires_grad_()
    h = w.sin()
    return lambda x: (x * h * w).sum(), [w]


def hooked(w: Tensor) -> Tensor:
    h = w + 1
    h.register_hook(lambda g: g * 2)
    return h * 3


OUTSIDE: dict[str, Callable[[], Any]] = {
    "a view": from_a_leaf(lambda w: w[:2], lambda h, w, x: (x[:, :2] * h).sum() + w.sum()),
    "what is saved": from_a_leaf(torch.sin, lambda h, w, x: (x * h * w).sum()),
    "a chain": from_a_leaf(lambda w: [w * 2, w * 6], lambda h, w, x: (x * h[0] * h[1]).sum()),
    "an item": from_a_leaf(lambda w: {"a": w * 2}, lambda h, w, x: (x * h["a"] * w).sum()),
    "items of tuples": from_a_leaf(
        lambda w: (w * 2, "a", (w.sin(), w * 3)), lambda h, w, x: (x * h[0] * h[2][0] * h[2][1] * w).sum()
    ),
    "a hook": from_a_leaf(hooked, lambda h, w, x: (x * h * w).sum()),
    "not read": from_a_leaf(lambda w: w * 2, lambda h, w, x: (x * h * (w if len(x) > 9 else 1)).sum()),
    "a tied weight": tied,
    "shards": of_shards,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_history_outside_is_followed_once(name: str) -> None:
    grads = []
    for jitted in (False, True):
        fn, leaves = OUTSIDE[name]()
        (sl.jit(fn) if jitted else fn)(torch.arange(8.0).view(2, 4)).backward()
        grads.append([g.full_tensor() if isinstance(g := w.grad, ShardedTensor) else g for w in leaves])
    torch.testing.assert_close(grads[0], grads[1])


def test_functions_that_keep_values_of_a_trace_are_refused() -> None:
    s = types.SimpleNamespace(fn=None)

    def keeps(x: Tensor) -> Tensor:
        y = x * 2
        s.fn = lambda z: z + y
        return y

    with pytest.raises(ShardingError, match="y has become a value of the trace"):
        sl.jit(keeps)(X)
    assert s.fn is None

    layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def turns(x: Tensor) -> Tensor:
        k = next(iter(layers))
        layers[k] = layers.pop(k)
        return layers[k](x)

    with pytest.raises(ShardingError, match="in another order each time that it is traced"):
        sl.jit(turns)(X)


def test_what_holds_it_for_ever_is_refused() -> None:
    w = nn.Parameter(torch.ones(4))
    held = frozenset([w * 2])
    with pytest.raises(ShardingError, match=r"comes from w, and the traced function reads both"):
        sl.jit(lambda x: (x * next(iter(held)) * w).sum())(X)


@pytest.mark.parametrize("looks", [False, True])
def test_back_through_time(looks: bool) -> None:
    """Also where a function looks at its number in a way that has it traced again."""
    grads = []
    for jitted in (False, True):
        w = nn.Parameter(torch.ones(4))
        s = types.SimpleNamespace(h=torch.zeros(4), pair=(torch.zeros(4), torch.ones(4), 1))

        def fn(x: Tensor, n: int, w: Tensor = w, s: Any = s) -> Tensor:
            s.h = w * x + s.h * (datetime.timedelta(days=n).days if looks else n)
            s.pair = s.h * s.pair[1] - s.pair[0], w * s.pair[0], s.pair[2] + 1
            return s.h.sum() + s.pair[0].sum() * s.pair[2]

        step = sl.jit(fn) if jitted else fn
        sum(step(k * torch.arange(4.0), k) for k in (1, 2, 3)).backward()
        assert s.pair[2] == 4
        grads.append(w.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("meanwhile", [None, "n", "items"])
def test_what_a_function_leaves_alone_is_looked_at_twice(
    meanwhile: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it and behind it; where a rule, say, changes something while the program is made, once more."""
    owner = types.SimpleNamespace(n=2.0, items=[1.0, 2.0], layer=nn.Linear(4, 4))
    looks: list[Any] = []
    look, compiled = compile_call.Invocation.look, compile_call.compile_program

    def changing(*args: Any, **kwargs: Any) -> Any:
        made = compiled(*args, **kwargs)
        if meanwhile == "items":
            owner.items[1] += 1
        elif meanwhile:
            owner.n += 1
        return made

    monkeypatch.setattr(compile_call.Invocation, "look", lambda call: looks.append(1) or look(call))
    monkeypatch.setattr(compile_call, "compile_program", changing)
    with torch.no_grad():
        step = sl.jit(lambda x: x * owner.n * owner.items[1] + owner.layer.bias)
        step(X)
        assert len(looks) == (2 if meanwhile is None else 3)
        same(step(X), X * owner.n * owner.items[1] + owner.layer.bias)


class Stateful(nn.Module):
    """A cell that goes on from where it was, without going back there."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4, 4), nn.Linear(4, 4)
        self.state: Any = None

    def forward(self, xs: Tensor) -> Tensor:
        self.state = self.state and tuple(x.detach() for x in self.state)
        ys = []
        for x in xs:
            self.state = self.cell(x, self.state)
            ys.append(self.out(self.state[0]))
        return torch.stack(ys)


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, True])
def test_truncated_back_through_time(inside: bool) -> None:
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        m = Stateful().double()
        opt = torch.optim.SGD(m.parameters(), lr=0.1)

        def step(m: Any, opt: Any, x: Tensor) -> None:
            m(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        if sharded:
            sl.parallelize(m, {})
            opt = torch.optim.SGD(m.parameters(), lr=0.1)
        train = sl.jit(step) if sharded and inside else step
        for i in range(4):
            train(m, opt, torch.arange(24.0, dtype=torch.float64).view(3, 2, 4) * 0.1 + i)
        found.append([x.full_tensor() if sharded else x for x in (*m.parameters(), *m.state)])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["dicts", "objects"])
def test_what_is_deep_is_seen(kind: str) -> None:
    def wrapped(x: Any) -> Any:
        return {"next": x} if kind == "dicts" else types.SimpleNamespace(next=x)

    last = {"w": 1.0}
    head = functools.reduce(lambda x, _: wrapped(x), range(40), last)

    def fn(x: Tensor) -> Tensor:
        node = head
        for _ in range(40):
            node = node["next"] if isinstance(node, dict) else node.next
        node["w"] += 1
        return x * node["w"]

    step = sl.jit(fn)
    for w in (2.0, 3.0, 4.0):
        same(step(X), X * w)
    last["w"] = 8.0
    same(step(X), X * 9.0)
    assert last == {"w": 9.0}


def test_a_module_with_effects_that_are_refused_runs_op_by_op() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.seen, self.made = nn.Linear(4, 4), {0}, None

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add(len(self.seen))
            self.made = self.made or Open(2)
            return self.lin(x) * len(self.seen) * self.made.n

    torch.manual_seed(0)
    plain = Seen()
    module = copy.deepcopy(plain)
    sl.parallelize(module, {})
    with pytest.warns(sl.nn.forward.EagerWarning, match=r"has side effects that its calls cannot repeat: self\.made"):
        found = module(X)
    same([found, module(X)], [plain(X), plain(X)])
    assert (module.seen, module.made) == (plain.seen, plain.made)
