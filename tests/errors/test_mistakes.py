"""What people write at first: each is refused in words that name it, and what the words advise works."""

from __future__ import annotations

import collections
import io
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, P, ShardingError, shard
from shardlib.jit.jit import RetraceWarning

X, ROW = torch.arange(24.0).view(4, 6), torch.arange(6.0)
K, PLACE = torch.arange(192.0).view(2, 3, 8, 4), torch.tensor(3)


@pytest.fixture(autouse=True)
def _mesh() -> Any:
    with Mesh(data=2, tensor=2, rules={"batch": "data"}) as mesh:
        yield mesh


class Mistake(NamedTuple):
    name: str
    call: Callable[[], Any]
    words: tuple[str, ...]
    instead: Callable[[], Any]  # as the words advise


def _run(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: sl.jit(fn, **options)(*args)


def _in_scan(body: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: sl.jit(lambda h, xs: sl.scan(body, h, xs))(ROW[:6], X)


def _no_grad(w: Tensor) -> Tensor:
    with torch.no_grad():
        w.add_(1)
    return w.sum()


def _grows(h: Tensor, xs: Tensor) -> Tensor:
    found: list[Tensor] = []
    h, _ = sl.scan(lambda h, x: (h + x, found.append(h)), h, xs)
    return torch.stack(found)


def _placed(k: Tensor, i: Tensor) -> Tensor:
    k[:, :, i] = 7.0
    return k.sum()


def _kept(k: Tensor, i: Tensor) -> Tensor:
    y = k[0, 0, i]
    k[:, :, i] = 7.0
    return y


def _picked(k: Tensor, i: Tensor) -> Tensor:
    k[:, :, i] += 1
    return k


def _narrowed(k: Tensor, i: Tensor) -> Tensor:
    k.narrow(2, i, 1).zero_()
    return k


def _added(k: Tensor, i: Tensor) -> Tensor:
    k[:, :, i] = k[:, :, i] + 1
    return k


def _norm(training: bool) -> Callable[[], Any]:
    norm = torch.nn.BatchNorm1d(6).train(training)
    return _in_scan(lambda h, x: (norm(h[None] + x[None].expand(2, -1))[0], None))


def _counted(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
    COUNT.add_(1)
    return h + x, None


COUNT = torch.zeros((), dtype=torch.int64)
DRAWS = random.Random(0)


class Stepper:
    @sl.jit(in_specs=("batch _",))
    def wrong(self, x: Tensor) -> Tensor:
        return x + 1

    @sl.jit(in_specs=(None, "batch _"))
    def right(self, x: Tensor) -> Tensor:
        return x + 1


def _class(way: Any) -> Any:
    return lambda: types.new_class("C", (), {}, lambda space: space.update(step=sl.jit(way(lambda x: x))))


MISTAKES = [
    Mistake("if", _run(lambda x: x if x.sum() > 0 else -x, X), ("if x.sum() > 0", "torch.where(condition, a, b)"),
            _run(lambda x: torch.where(x.sum() > 0, x, -x), X)),
    Mistake("float", _run(lambda x: x / float(x.sum()), X), ("compute with the tensor itself",),
            _run(lambda x: x / x.sum(), X)),
    Mistake("the name of a tensor", _run(lambda x, n: torch.arange(n), X, PLACE), ("the value of n (int64[])",),
            _run(lambda x, n: torch.arange(n), X, 3)),
    Mistake("a format", _run(lambda x: f"{x.sum():.2f}", X), ('sl.debug_print("{}", x)',),
            _run(lambda x: sl.debug_print("{}", x.sum()), X)),
    Mistake("a slice", _run(lambda k, i: k[:, :, i : i + 2], K, PLACE), ("i (int64[])", "x.narrow(dim, start, length)"),
            _run(lambda k, i: k.narrow(2, i, 2), K, PLACE)),
    Mistake("a mask", _run(lambda x: x[x > 3], X), ("by x[mask]", "x.where(mask, 0)"),
            _run(lambda x: x.where(x > 3, 0), X)),
    Mistake("repeats", _run(lambda x, n: x.repeat_interleave(n), ROW, torch.arange(6)), ("output_size=total",),
            _run(lambda x, n: x.repeat_interleave(n, output_size=15), ROW, torch.arange(6))),
    Mistake("saved", _run(lambda x: torch.save(x, io.BytesIO()), X), ("saves a tensor, f32[4, 6]", "save it outside"),
            lambda: torch.save(sl.jit(lambda x: x)(X).full_tensor(), io.BytesIO())),
    Mistake("address", _run(lambda x: x * x.data_ptr(), X), ("asks for the address",), _run(lambda x: x * 2, X)),
    Mistake("cuda", _run(lambda x: x.to("cuda:99"), X), ("asks for a device that is not here",), _run(lambda x: x, X)),
    Mistake("random", _run(lambda x: x * random.random(), X), ("from Python's random", "torch.rand(())"),
            _run(lambda x: x * torch.rand(()), X)),
    Mistake("numpy", _run(lambda x: x * np.random.rand(), X), ("from numpy.random",), _run(torch.rand_like, X)),
    Mistake("a generator", _run(lambda x: x * DRAWS.random(), X), ("from a Random",),
            _run(lambda x, r: x * r, X, DRAWS.random())),
    Mistake("a leaf", _run(lambda w: w.add_(1), ROW.clone().requires_grad_()), ("with torch.no_grad():",),
            _run(_no_grad, ROW.clone().requires_grad_())),
    Mistake("turned in place", _run(lambda x: x.t_(), X.clone()), ("input x", "x.t(...)"), _run(lambda x: x.t(), X)),
    Mistake("resized", _run(lambda x: x.resize_(2, 3), X.clone()), ("y = x.flatten()[:n].reshape(shape)",),
            _run(lambda x: x.flatten()[:6].reshape(2, 3), X)),
    Mistake("a write to x[i]", _run(_picked, K.clone(), PLACE), ("k[:, :, i] += 1", "x[i] = x[i] + 1"),
            _run(_added, K.clone(), PLACE)),
    Mistake("a write to narrow", _run(_narrowed, K.clone(), PLACE), ("is written to", "x.index_copy_"),
            _run(lambda k, i: k.index_copy_(2, i.reshape(1), k[:, :, :1] * 0), K.clone(), PLACE)),
    Mistake("x[i] behind a write", _run(_kept, K.clone(), PLACE), ("is read after x was written to",),
            _run(_placed, K.clone(), PLACE)),
    Mistake("a carry in place", _in_scan(lambda h, x: (h.add_(x), None)), ("h.add_(x)", "h = h + x instead"),
            _in_scan(lambda h, x: (h + x, None))),
    Mistake("a buffer in scan", _in_scan(_counted), ("COUNT.add_(1)", "take a buffer into the carry"),
            _in_scan(lambda h, x: (h + x, None))),
    Mistake("norm in scan", _norm(training=True), ("body of scan writes", "eval()"), _norm(training=False)),
    Mistake("a list in scan", _run(_grows, ROW, X), ("body of scan left behind", "scan gives back the ys"),
            _in_scan(lambda h, x: (h + x, h))),
    Mistake("a tuple as a spec", _run(lambda x: x, X, in_specs=((None, "data"),)),
            ("* x: the specs", "P('data', None)"),
            _run(lambda x: x, X, in_specs=(P(None, "data"),))),
    Mistake("a tuple for one result", _run(lambda x: x, X, out_specs=("batch", "_")), ("* the result: the specs",),
            _run(lambda x: x, X, out_specs="batch _")),
    Mistake("self", lambda: Stepper().wrong(X), ("* self: spec 'batch _' for a Stepper", "a method's self"),
            lambda: Stepper().right(X)),
    Mistake("a staticmethod", _class(staticmethod), ("put @staticmethod above @sl.jit",),
            lambda: staticmethod(sl.jit(lambda x: x))(X)),
    Mistake("a classmethod", _class(classmethod), ("given a classmethod",), lambda: sl.jit(lambda x: x)(X)),
    Mistake("a class", lambda: sl.jit(torch.nn.ReLU), ("a class, ReLU", "an object"),
            lambda: sl.jit(torch.nn.ReLU())(X)),
    Mistake("a result", lambda: sl.jit(X + 1), ("given a tensor",), lambda: sl.jit(torch.sin)(X)),
    Mistake("static", _run(lambda x, n: x, X, 2, static_argnums=2), ("2 is no position",),
            _run(lambda x, n: x, X, 2, static_argnums=1)),
    Mistake("a transform outside", lambda: sl.grad(lambda x: shard(x, "batch _").sum())(X), ("sl.jit(sl.grad(f))(x)",),
            lambda: sl.jit(sl.grad(lambda x: shard(x, "batch _").sum()))(X)),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=[m.name for m in MISTAKES])
def test_a_mistake_is_told(mistake: Mistake) -> None:
    with pytest.raises(ShardingError) as error:
        mistake.call()
    for words in mistake.words:
        assert words in str(error.value)
    mistake.instead()


# --- tensors that are not dense ---------------------------------------------------------------------------------------

OTHERS: dict[str, Callable[[], tuple[Tensor, str]]] = {
    "coo": lambda: (X.to_sparse(), "x.to_dense()"),
    "csr": lambda: (X.to_sparse_csr(), "x.to_dense()"),
    "nested": lambda: (torch.nested.nested_tensor([X, X[:2]]), "to_padded_tensor(x, 0.0)"),
    "jagged": lambda: (torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged), "to_padded_tensor(x, 0.0)"),
    "quantized": lambda: (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "x.dequantize()"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHERS)
def test_tensors_that_are_not_dense_are_refused(kind: str) -> None:
    x, remedy = OTHERS[kind]()
    calls = [_run(lambda x: x * 2, x), _run(lambda y: y * x, X), lambda: shard(x, "...")]
    for call in [*calls, *([lambda: shard(X, "batch _") * x] if kind != "quantized" else [])]:
        with pytest.raises(ShardingError) as error:
            call()
        assert remedy in str(error.value)


# --- text -------------------------------------------------------------------------------------------------------------


def test_text_of_a_traced_value_is_its_type() -> None:
    told = '<f32[4, 6], traced: sl.debug_print("{}", x) shows its values>'
    texts = sl.jit(lambda x: [str(x * 2), f"{x}", repr([x])])(X)
    assert texts == [told, told, f"[{told}]"]


# --- a place that a tensor says ---------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Tensor], Any]] = {
    "last": lambda i: (..., i),
    "middle": lambda i: (slice(None), slice(None), i),
    "and a slice": lambda i: (0, ..., i, slice(1, 3)),
    "two": lambda i: (i % 2, slice(None), i, None),
    "first": lambda i: i % 2,
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("spec", ["a@data b c d", "a b c@tensor d", "a b c d@data"])
@pytest.mark.parametrize("place", PLACES)
def test_places_that_a_tensor_says(place: str, spec: str) -> None:
    at = PLACES[place]

    def write(k: Tensor, i: Tensor) -> Tensor:
        k = k * 1
        k[at(i)] = k[at(i)] * 2
        return (k.sin() * k).sum() + k[at(i)].sum()

    for i in (PLACE, -PLACE):
        sl.check(write, K, i, in_specs=(spec, None))


# --- mappings ---------------------------------------------------------------------------------------------------------


class Batch(collections.UserDict[str, Tensor]):
    """As tokenizers give one back: its items are attributes, and a record of a library's lies beside."""

    def __init__(self, items: Any, record: Any = None) -> None:
        super().__init__(items)
        self.record, self.scale = record, 2

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Named(dict[str, Tensor]):
    __getattr__ = dict.__getitem__


MAPPINGS: list[Callable[..., Any]] = [
    Batch, Named, collections.UserDict, collections.OrderedDict, collections.ChainMap, types.MappingProxyType,
]  # fmt: skip
SPECS: list[Any] = [({"x": "batch _"},), "batch _", {"batch": {"x": "batch _"}}, ("batch _",)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("specs", SPECS, ids=str)
@pytest.mark.parametrize("kind", MAPPINGS)
def test_mappings_are_containers(kind: Callable[..., Any], specs: Any) -> None:
    def both(x: Tensor, y: Tensor) -> Tensor:
        return x - y

    def fn(batch: Any) -> Any:
        assert type(batch) is type(kind({}))
        return kind({"z": both(**batch) + batch["x"]})

    step = sl.jit(fn, in_specs=specs)
    for i in range(3):
        found = step(kind({"x": X + i, "y": X * i}))
        assert type(found) is type(kind({}))
        assert torch.equal(found["z"].full_tensor(), 2 * (X + i) - X * i)
    assert step.retraces == []
    assert str(step.plan(kind({"x": X, "y": X})).layout_of("batch['x']")) == "4@data, 6"


def test_what_a_mapping_has_beside_its_items() -> None:
    step = sl.jit(lambda batch: batch.x * batch.scale)
    for i in range(3):
        assert torch.equal(step(Batch({"x": X + i}, record=np.zeros(i))).full_tensor(), 2 * (X + i))
    assert step.retraces == [], "the record is a library's"
    batch = Batch({"x": X})
    batch.scale = 5
    assert torch.equal(step(batch).full_tensor(), 5 * X)
    with pytest.raises(AttributeError, match="record"):
        sl.jit(lambda batch: batch.record)(Batch({"x": X}, record=np.zeros(2)))


# --- custom ops -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("shardlib_test::scale_", mutates_args={"x"})
def scale_(x: Tensor, factor: float = 2.0) -> None:
    x.mul_(factor)


@torch.library.custom_op("shardlib_test::count", mutates_args={"x", "n"})
def count(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
    x.add_(y)
    n.add_(1)
    return x.sum()


@count.register_fake
def _(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
    return x.new_empty(())


@torch.library.custom_op("shardlib_test::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    return x * 2


def test_custom_ops_that_write() -> None:
    def fn(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 1
        scale_(y[1:], 3.0)
        return y, count(y, x, n)

    here, there = torch.zeros(()), torch.zeros(())
    wanted = fn(X, here)
    found = sl.jit(fn, in_specs=("batch _", None))(X, there)
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(found, wanted, strict=True))
    assert torch.equal(there, here)
    x = shard(X, "batch _")
    scale_(x)
    assert torch.equal(x.full_tensor(), 2 * X)


def test_a_custom_op_without_a_fake_form() -> None:
    with pytest.raises(ShardingError, match="does not say its shapes"):
        sl.jit(lambda x: shapeless(x))(X)
    assert torch.equal(shapeless(shard(X, "batch _")).full_tensor(), 2 * X)  # type: ignore[attr-defined]


def test_a_wrong_rule_is_suspected() -> None:
    @sl.rule("a b -> a b")
    @torch.library.custom_op("shardlib_test::running", mutates_args=())
    def running(x: Tensor) -> Tensor:
        return x.cumsum(0)

    running.register_fake(torch.empty_like)  # type: ignore[attr-defined]
    with pytest.raises(ShardingError, match=r"look at the rule of shardlib_test::running\S*, 'a b -> a b'"):
        sl.check(lambda x: running(x) * 1, X, in_specs=("batch _",))


# --- why it is compiled again -----------------------------------------------------------------------------------------


class Settings:
    scale = 1.0

    def __init__(self) -> None:
        self.alpha, self.sizes, self.options = 1.0, [1, 2], {"lr": 0.5}


def test_reasons_can_be_read() -> None:
    settings, norm, power = Settings(), torch.nn.Dropout(0.0), 2

    @sl.jit
    def step(x: Tensor, given: Any) -> Tensor:
        x = norm(x) ** power * settings.alpha * Settings.scale
        return x * settings.sizes[1] * settings.options["lr"] * given.alpha

    other = Settings()
    step(X, other)
    for change in (
        lambda: setattr(settings, "alpha", 3.0),
        lambda: settings.sizes.__setitem__(1, 5),
        lambda: settings.options.update(lr=0.25),
        lambda: setattr(Settings, "scale", 2.0),
        lambda: setattr(other, "alpha", 4.0),
        norm.eval,
    ):
        change()
        step(X, other)
    Settings.scale = 1.0
    first = step.fn.__code__.co_firstlineno
    assert [reason.replace(f"{first + 2}", "A").replace(f"{first + 3}", "B") for reason in step.retraces] == [
        "settings.alpha, read in step at test_mistakes.py:A: 1.0 -> 3.0",
        "settings.sizes[1], read in step at test_mistakes.py:B: 2 -> 5",
        "settings.options['lr'], read in step at test_mistakes.py:B: 0.5 -> 0.25",
        "Settings.scale, read in step at test_mistakes.py:A: 1.0 -> 2.0",
        "given.alpha: 1.0 -> 4.0",
        "norm.training, read in step at test_mistakes.py:A: True -> False",
    ]
    step(X, Settings())
    assert step.retraces[-1] == "given is another one now (a Settings)", "numbers are inputs by now"


def _again(step: Any, change: Callable[[int], Any]) -> str:
    def run() -> None:
        for i in range(10):
            change(i)
            step(X)

    with pytest.warns(RetraceWarning) as told:
        run()
    assert len(told) == 1
    return str(told[0].message)


def test_numbers_outside_that_change_are_said_with_what_helps() -> None:
    alpha: Any = 0.0

    def change(i: int) -> None:
        nonlocal alpha
        alpha = float(i)

    step = sl.jit(lambda x: x * alpha)
    for i in range(9):
        change(i)
        assert torch.equal(step(X).full_tensor(), X * i)
    assert len(step.retraces) == 1, "from its second value on it is an input"
    step = sl.jit(lambda x: x * alpha if alpha < 100 else x)
    for i in range(9):
        change(i)
        step(X)
    assert len(step.retraces) == 1, "and what is asked of it has one answer"
    step = sl.jit(lambda x: x * alpha if int(alpha) < 100 else x)  # but this looks at it
    told = _again(step, change)
    assert "the last time because of alpha, read in <lambda> at test_mistakes.py:" in told
    assert "hold it as a tensor: torch.tensor(x)" in told
    step = sl.jit(lambda x: x * alpha)
    for i in range(3):
        alpha = torch.tensor(float(i))
        assert torch.equal(step(X).full_tensor(), X * i)
    assert step.retraces == []


def test_functions_made_for_every_call_are_said() -> None:
    made: Any = None

    def change(i: int) -> None:
        nonlocal made
        made = lambda x: x + i

    step = sl.jit(lambda x, f: f(x))
    told = _again(lambda x: step(x, made), change)
    assert "f is another one now (" in told
    assert "Remedy: make it once, outside the loop, and keep it" in told


@pytest.mark.parametrize("n", [2, torch.tensor(3), torch.arange(6), torch.tensor(3, dtype=torch.int8)])
@pytest.mark.parametrize("shift", [lambda x, n: (x > 2) << n, lambda x, n: (x > 2) >> n, lambda x, n: x.long() << n])
def test_bools_are_shifted(shift: Any, n: Any) -> None:
    expected = shift(X, n)
    for found in (sl.jit(shift)(X, n), shift(shard(X, "a@data b"), n)):
        assert found.dtype == expected.dtype
        assert torch.equal(found.full_tensor(), expected)


def test_what_only_tensors_without_values_refuse_is_not_called_a_mistake() -> None:
    with pytest.raises(ShardingError, match="refuses more of them than on one device") as error:
        sl.jit(lambda x: (x > 2).masked_fill(x > 5, 1j))(X)
    assert "plain torch refuses" not in str(error.value)
    found = sl.jit(lambda x: (x > 2).masked_fill(x > 5, bool(1j)))(X)
    assert torch.equal(found.full_tensor(), (X > 2).masked_fill(X > 5, 1j))
    with pytest.raises(ShardingError, match="plain torch refuses these operands, too"):
        sl.jit(lambda x: x.long().masked_fill(x > 5, 1j))(X)
