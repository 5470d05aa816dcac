"""What a call is keyed by: all that a trace can see. Each case calls a jitted function, and the function itself."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, ShardingError
from shardlib.compiler import pipeline as compiling
from shardlib.compiler.program.text import parse, show
from shardlib.jit.call.program_cache import PROGRAMS
from shardlib.jit.jit import RetraceWarning
from tests.helpers.oracle import same

X = torch.arange(24.0).view(6, 4)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, tensor=2, rules={"batch": "data"}) as mesh:
        yield mesh


def each(fn: Callable[..., Any], calls: list[tuple[Any, ...]], *, programs: int | None = None) -> None:
    """Every call gives what plain torch gives, twice; in all they make so many programs."""
    step = sl.jit(fn)
    for args in calls * 2:
        same(step(*args), fn(*args))
    if programs is not None:
        assert len(step.retraces) + 1 == programs, step.retraces


# --- modes and switches -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Any]]] = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda x: x @ x.t()),
    "autocast to half": (lambda: torch.autocast("cpu", torch.float16), lambda x: x @ x.t()),
    "autocast's cache": (lambda: torch.autocast("cpu", cache_enabled=False), lambda x: x @ x.t()),
    "default dtype": (lambda: default_dtype(torch.float64), lambda x: x.long() / 3 + torch.ones(4)),
    "no grad": (torch.no_grad, lambda x: x * (2 if torch.is_grad_enabled() else 3)),
    "inference": (torch.inference_mode, lambda x: x * (2 if torch.is_inference_mode_enabled() else 3)),
    "deterministic": (deterministic, lambda x: x * (2 if torch.are_deterministic_algorithms_enabled() else 3)),
    "default device": (lambda: torch.device("cpu"), lambda x: x + torch.ones(4)),
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("first", [True, False], ids=["on first", "off first"])
def test_modes(name: str, first: bool) -> None:
    mode, fn = MODES[name]
    step = sl.jit(fn)
    for on in (first, not first) * 2:
        with mode() if on else contextlib.nullcontext():
            same(step(X), fn(X))


def test_a_switch_of_ops_plans_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step = sl.jit(lambda x: x.sum(), in_specs="batch _")
    step(X)
    monkeypatch.setenv("SHARDLIB_OPS", "torch")
    step(X)
    assert step.retraces == ["SHARDLIB_OPS: None -> torch"]


def test_the_reason_names_the_mode() -> None:
    step = sl.jit(lambda x: x @ x.t())
    step(X)
    with torch.autocast("cpu", torch.bfloat16):
        step(X)
    assert step.retraces == ["autocast on cpu: None -> torch.bfloat16"]


def test_the_reason_names_the_gradient() -> None:
    w, d = torch.ones(4, 4, requires_grad=True), {"v": sl.shard(torch.ones(4, 4), "a b@tensor").requires_grad_()}
    d["v"].mask = torch.ones(4)  # type: ignore[attr-defined]
    step = sl.jit(lambda w, d: (w * d["v"] * d["v"].mask).sum() * (2 if w.grad is None else 3))
    step(w, d).backward()
    step(w, d)
    assert step.retraces == ["w.grad: None -> a tensor; d['v'].grad: None -> a tensor"]
    w.grad = d["v"].grad = None
    step(w, d)
    assert len(step.retraces) == 1, "it was compiled for that already"
    names = step.plan(w, d).compiled.traced.input_names
    assert names[:3] == ("w", "d['v']", "d['v'].mask"), "what hangs on an argument is called after it"


def test_reasons_where_tensors_are_keys() -> None:
    """Each walk numbers tensors anew: what is kept under them is compared by their names."""
    model = torch.nn.Linear(3, 2)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    opt.zero_grad()
    plain = copy.deepcopy((model, opt))

    def stepped(model: Any, opt: Any) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            opt.zero_grad(set_to_none=False)
            loss: Tensor = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss

        return step

    step, alone = sl.jit(stepped(model, opt), in_specs=("b@data _",)), stepped(*plain)
    for i in range(4):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        same(step(x), alone(x))
    assert step.retraces == ["model.weight.grad: None -> a tensor; model.bias.grad: None -> a tensor"]


def test_reasons_name_tensors_that_are_keys() -> None:
    w, more, of, sizes = torch.ones(4, 2), list[Tensor](), list[Tensor](), {}
    of.append(w)
    sizes[w] = "small"
    step = sl.jit(lambda x: x * of[0].sum() * (2 if sizes[w] == "small" else 3) + len(more), in_specs=("b@data _",))
    same(step(torch.ones(4, 2)), torch.full((4, 2), 16.0))
    more.append(torch.ones(2))  # it is found before w, which has another number from now on
    sizes[w] = "large"
    same(step(torch.ones(4, 2)), torch.full((4, 2), 25.0))
    assert "sizes[of[0]], read in <lambda>" in step.retraces[0]
    assert "'small' -> 'large'" in step.retraces[0]


def test_meshes_count_by_value() -> None:
    step = sl.jit(lambda x: x.sum(), in_specs="batch _")
    for rules in ({"batch": "data"}, {"batch": "data"}, {"batch": "tensor"}):
        with Mesh(data=2, tensor=2, rules=rules):
            same(step(X), X.sum())
    assert len(step.retraces) == 1


# --- strides ----------------------------------------------------------------------------------------------------------


def contiguous_or_not(x: Tensor) -> Tensor:
    return x + 1 if x.is_contiguous() else x * 10


def strided_and_written(x: Tensor) -> Tensor:
    y = torch.zeros(3)
    y += 1
    return x.as_strided((2, 3), (1, 2)) + y


STRIDED = [X, X.t().contiguous().t(), X[::2], X[:, ::2], X[:, :3], X.t(), X[:1].expand(6, 4)]


def test_strides_of_plain_inputs() -> None:
    each(contiguous_or_not, [(x,) for x in STRIDED])
    dense = [X, X.t().contiguous().t(), X.t()]
    each(strided_and_written, [(x,) for x in dense])
    each(lambda x: x.as_strided((2, 3), (1, 2)), [(x,) for x in dense])
    with pytest.raises(ShardingError, match="a strided view cannot be traced"):
        sl.jit(strided_and_written)(X[::2])
    each(lambda x: x.stride(0) * x, [(x,) for x in STRIDED])


def test_strides_of_sharded_inputs() -> None:
    placed = sl.shard(X, "batch _")
    each(contiguous_or_not, [(placed,), (placed.t(),), (placed[:, 1:],)])
    each(strided_and_written, [(placed,), (placed.t(),)])


# --- numbers ----------------------------------------------------------------------------------------------------------

FLOATS = [0.5, 2.0, 0.0, -0.0, NAN, INF, -INF, 1e-30, 3.0]
INTS = [0, 1, -1, 2, 7, 10**6]

# A function of a tensor and a number, and how many programs it may take.
ARITHMETIC: dict[str, Callable[[Tensor, Any], Any]] = {
    "mul": lambda x, n: x * n,
    "rmul": lambda x, n: n * x,
    "add": lambda x, n: x + n,
    "sub": lambda x, n: x - n,
    "rsub": lambda x, n: n - x,
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "value": lambda x, n: torch.addcmul(x, x, x, value=n),
    "in place": lambda x, n: x.clone().mul_(n),
    "full_like": lambda x, n: torch.full_like(x, n),
    "fill_": lambda x, n: x.clone().fill_(n),
    "where": lambda x, n: torch.where(x > 3, x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 3, n),
    "compare": lambda x, n: (x > n, x == n),
    "int tensor": lambda x, n: x.long() * n,
    "bool tensor": lambda x, n: (x > 3) + n,
    "half tensor": lambda x, n: x.half() * n,
    "zero-dim tensor": lambda x, n: x[0, 0].double() * n,
    "python": lambda x, n: x * (2 * n + 1 - n),
    "power of a constant": lambda x, n: x * 0.9 ** min(5, 3) + 0.5 * n,
    "floor": lambda x, n: x * (n // 2),
    "rest": lambda x, n: x * (n % 3) + 7 % (abs(n) + 1),
    "floor and rest": lambda x, n: x * divmod(n, 3)[1] - divmod(n, 0.5)[0],
    "abs": lambda x, n: x * abs(n),
    "unused": lambda x, n: x + 1,
    "returned": lambda x, n: (x, n),
    "computed and returned": lambda x, n: (x, -n, n + 1, {"n": n * 2}),
    "foreach": lambda x, n: torch._foreach_mul([x, x + 1], n),
    "gradient": lambda x, n: torch.func.grad(lambda x: (x * n).sin().sum())(x),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("numbers", [FLOATS, INTS], ids=["floats", "ints"])
def test_arithmetic_takes_one_program(name: str, numbers: list[Any]) -> None:
    numbers = [n for n in numbers if not (name in ("int tensor", "bool tensor") and abs(n) > 1e9)]
    each(ARITHMETIC[name], [(X, n) for n in numbers], programs=1)


LOOKING: dict[str, Callable[[Tensor, Any], Any]] = {
    "branch": lambda x, n: x + 1 if n else x * 2,
    "comparison": lambda x, n: x + 1 if n > 1 else x * 2,
    "equality": lambda x, n: x + 1 if n == 1 else x * 2,
    "class": lambda x, n: x * 2 if isinstance(n, float) else x * 3 if isinstance(n, int) else x,
    "type": lambda x, n: x * 2 if type(n + 0) is float else x * 3,
    "sign of zero": lambda x, n: x * math.copysign(1.0, n),
    "math": lambda x, n: x * math.exp(min(n, 5.0) if n == n else 0.0),
    "text": lambda x, n: x * len(f"{n}"),
    "repr": lambda x, n: x * len(repr(n)),
    "key": lambda x, n: x * {0: 2, 1: 3}.get(n, 5),
    "floor": lambda x, n: x * (n // 2 if n == n and abs(n) < 1e9 else 1),
    "square root": lambda x, n: x * math.sqrt(abs(n)) if n == n else x,
    "tensor of it": lambda x, n: x * torch.tensor(n),
    "exponent": lambda x, n: x**n,
    "softplus": lambda x, n: torch.nn.functional.softplus(x, beta=2.0, threshold=n),
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::shardlib.jit.jit.RetraceWarning")
@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("numbers", [FLOATS, INTS], ids=["floats", "ints"])
def test_numbers_that_python_looks_at(name: str, numbers: list[Any]) -> None:
    each(LOOKING[name], [(X, n) for n in numbers])


SIZES: dict[str, Callable[[Tensor, int], Any]] = {
    "view": lambda x, n: x.view(n, -1),
    "slice": lambda x, n: x[:n],
    "item": lambda x, n: x[n],
    "zeros": lambda x, n: x.sum() + torch.zeros(n),
    "range": lambda x, n: sum((x * i for i in range(n)), x),
    "dim": lambda x, n: x.sum(n % 2),
    "sizes": lambda x, n: x.reshape(x.shape[0] // n, n * x.shape[1]),
    "repeat": lambda x, n: x.repeat(n, 1),
    "arange": lambda x, n: x[0, 0] + torch.arange(n),
    "chunk": lambda x, n: x.chunk(n),
    "list": lambda x, n: [x] * n,
    "shard": lambda x, n: sl.shard(x, "(a b) c", b=n) * 2,
}


@pytest.mark.parametrize("name", SIZES)
def test_numbers_that_are_sizes(name: str) -> None:
    each(SIZES[name], [(X, n) for n in (1, 2, 3)])


def test_a_counter_costs_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that a function changes is an input of its first program: no later stage runs twice."""

    class Model:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    searches, propagate = [], compiling.propagate
    monkeypatch.setattr(
        compiling, "propagate", lambda *args, **how: (searches.append(args), propagate(*args, **how))[1]
    )
    model, plain = Model(), Model()
    step = sl.jit(model.__call__)
    for _ in range(3):
        same(step(X), plain(X))
    assert model.calls == plain.calls == 3
    assert len(searches) == 1


def test_a_counter_is_for_its_rest() -> None:
    """Every so many steps something else happens: that is as many programs as there are rests, whatever the count."""
    each(lambda x, n: x * 2 if n % 10 == 0 else x, [(X, n) for n in range(1, 25)], programs=2)
    each(lambda x, n: x[n % 3] + (n // 3) * x[0], [(X, n) for n in range(12)], programs=3)
    each(lambda x, n: x.sum(n // 5 % 2), [(X, n) for n in range(20)], programs=2)
    program = sl.jit(lambda x, n: x * (n // 2 % 3) + abs(n)).plan(X, 7).compiled.program
    assert show(parse(show(program))) == show(program)


def test_functions_of_numbers_are_part_of_the_program() -> None:
    """A schedule that somebody writes himself, and the corrections of an own optimizer."""
    each(lambda x, n: x * (1 + math.cos(math.pi * n / 20)) / 2, [(X, n) for n in range(12)], programs=1)
    each(lambda x, n: x * (math.sqrt(1 - 0.99**n) / (1 - 0.9**n)), [(X, n) for n in range(1, 9)], programs=1)
    each(lambda x, n: (x * math.exp(-n / 3), math.log1p(n) + 1), [(X, n) for n in range(8)], programs=1)
    each(lambda x, n: x * (1 - math.pow(n, -0.8)), [(X, n) for n in range(1, 8)], programs=1)  # Adafactor
    each(lambda x, n: x * math.log(n, 2) + math.atan2(-1.0, n), [(X, n) for n in (2, 3.0)], programs=2)
    program = sl.jit(lambda x, n: x * math.hypot(n, -0.5, math.inf)).plan(X, 7).compiled.program
    assert show(parse(show(program))) == show(program)
    program = sl.jit(lambda x, n: x * math.tanh(n) + math.sqrt(abs(math.sin(n) * 2))).plan(X, 7).compiled.program
    assert show(parse(show(program))) == show(program)
    assert "math.sqrt(abs((math.sin($" in show(program)
    step = sl.jit(lambda x, n: x * math.sqrt(n))
    same(step(X, 4), X * 2)
    with pytest.raises(ValueError, match="math domain error"):
        step(X, -1)


def test_numbers_are_compared_as_numbers() -> None:
    def fn(x: Tensor, n: Any) -> Any:
        return x * 2 if n == 1.0 else x * 3 if n in [2.0] else x * {3.0: 7}.get(n, 5)

    each(fn, [(X, n) for n in (1, 2, 3, 4, 1.0)])
    each(lambda x, n: (x.long() * (n + 1), x.long() * (n + 1.0), x.long() * (n * True)), [(X, 2), (X, 3)], programs=1)
    each(lambda x, n: (x / (n * 0.0 + 0.0), x / (n * -0.0 - 0.0)), [(X, 2.0)])
    each(lambda x, n: x * (n * math.inf), [(X, 2.0), (X, 3.0)], programs=1)
    each(lambda x, n: x * 2 if copy.deepcopy({"n": n})["n"] > 2 else x * 3, [(X, 1.0), (X, 5.0)])


def test_a_number_that_is_kept_is_a_plain_one() -> None:
    class Kept:
        last: Any = 0

    kept = Kept()

    def fn(x: Tensor, n: float) -> Tensor:
        kept.last = n
        return x * n

    same(sl.jit(fn)(X, 2.0), X * 2)
    assert type(kept.last) is float
    assert kept.last == 2.0


def test_keys_of_dicts_by_their_kinds() -> None:
    step = sl.jit(lambda d: {repr(k): v * 2 for k, v in d.items()})
    for d in ({1: X}, {True: X}, {1.0: X}, {1: X}):
        same(step(d), {repr(k): v * 2 for k, v in d.items()})


def test_flags_and_numbers() -> None:
    def fn(x: Tensor, n: Any) -> Any:
        return x * 2 if n is True else x * 3 if n is False else x + n

    each(fn, [(X, n) for n in (True, 1, 1.0, False, 0, 0.0, -0.0)])


def test_a_number_that_meets_integers_promotes_as_in_python() -> None:
    for x in (X.long(), X.bool(), X.half(), X.double(), X[0, 0].long(), X.to(torch.complex64)):
        each(lambda x, n: (x * n, x + n), [(x, 2), (x, 2.5), (x, 3), (x, 3.5)])


def test_a_learning_rate_that_changes() -> None:
    """Adam's bias correction, in Python's arithmetic."""

    def adam(p: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: float, t: int) -> tuple[Tensor, Tensor, Tensor]:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8), m, v

    step, sharded = sl.jit(adam), (X, X * 0, X * 0)
    plain = sharded
    for t in range(1, 30):
        lr = 0.1 / t
        sharded, plain = step(*sharded, X.sin(), lr, t), adam(*plain, X.sin(), lr, t)
    same(sharded, plain)
    assert len(step.retraces) == 1, "plain arguments, then its own results"


@pytest.mark.filterwarnings("ignore::shardlib.jit.jit.RetraceWarning")
def test_static_values_are_told_apart() -> None:
    step = sl.jit(lambda x, n: x * len(repr(n)), static_argnums=1)
    for n in ((1, 0.0), (True, 0.0), (1, -0.0), (1.0, 0.0), ((1,), "a"), ((True,), "a"), 0.0, -0.0, 1, True) * 2:
        same(step(X, n), X * len(repr(n)))


def test_numbers_that_differ_in_kind_are_other_programs() -> None:
    step = sl.jit(lambda x, n: x.long() * n)
    assert [step(X, n).dtype for n in (1, 1.0, True, 2, 2.5)] == [
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int64,
        torch.float32,
    ]


def lengths(step: Any, upto: int) -> None:
    for n in range(1, upto):
        same(step(torch.ones(n, 4)), torch.full((n, 4), 2.0))


def test_compiling_again_and_again_is_said_once() -> None:
    step = sl.jit(lambda x: x * 2)
    why = r"<lambda> has been compiled 9 times, the last time because of x: f32\[8, 4\] -> f32\[9, 4\]"
    with pytest.warns(RetraceWarning, match=why) as found:
        lengths(step, 20)
    assert len(found) == 1
    assert found[0].filename == __file__, "the line that calls"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::shardlib.jit.jit.RetraceWarning")
def test_programs_that_are_kept_are_bounded() -> None:
    step = sl.jit(lambda x: x * 2)
    lengths(step, PROGRAMS + 20)
    assert sum(map(len, step.programs.entries.values())) == PROGRAMS
    assert len(step.retraces) <= PROGRAMS


def test_a_set_is_the_same_after_a_trace() -> None:
    """A copy of it goes through its items in another order."""
    drawn = (random.Random(seed).sample(range(1 << 16), 7) for seed in range(1000))
    chosen = next(found for numbers in drawn if list(found := set(iter(numbers))) != list(set(found)))

    class Layer(torch.nn.Module):
        chosen: set[int]

        def forward(self, x: Tensor) -> Tensor:
            return sum((x * i for i in self.chosen), torch.zeros_like(x))

    layer = Layer()
    layer.chosen = chosen
    step = sl.jit(layer)
    with Mesh(data=2):
        for _ in range(3):
            step(torch.ones(2))
    assert step.retraces == []


class Run:
    """Trains, and keeps what it saw."""

    def __init__(self) -> None:
        self.scale, self.losses, self.by_name = 2.0, list[float](), {"loss": list[float]()}
        self.step = sl.jit(self._step)

    def _step(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum()

    def fit(self, steps: int) -> None:
        for i in range(steps):
            loss = self.step(X + i).item()
            self.losses.append(loss)
            self.by_name["loss"].append(loss)


def test_what_the_caller_notes_in_an_object_is_no_reason_to_compile() -> None:
    run = Run()
    run.fit(6)
    assert len(run.step.retraces) <= 1, run.step.retraces
    assert run.losses == run.by_name["loss"] == [float((2 * (X + i)).sum()) for i in range(6)]


def test_what_is_noted_counts_when_somebody_reads_it() -> None:
    run = Run()
    how = {"now": lambda self, x: x * self.scale}
    run.step = step = sl.jit(lambda x: how["now"](run, x))
    for i in range(3):
        same(step(X), X * 2)
        run.losses.append(float(i))
    how["now"] = lambda self, x: x * len(self.losses)
    for i in range(3):
        same(step(X), X * len(run.losses))
        run.losses.append(float(i))


FACTOR = 2.0


def _executed(x: Tensor) -> Tensor:
    found: dict[str, float] = {}
    exec("y = FACTOR", globals(), found)
    return x * found["y"]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x * globals()["FACTOR"],
        lambda x: x * eval("FACTOR"),
        _executed,
        lambda x: x * sys.modules[__name__].FACTOR,
        lambda x: x * importlib.import_module(__name__).FACTOR,
        lambda x: x * _executed.__globals__["FACTOR"],
        lambda x: x * inspect.currentframe().f_globals["FACTOR"],
    ],
    ids=["globals", "eval", "exec", "modules", "import_module", "__globals__", "f_globals"],
)
def test_variables_that_no_instruction_names(step: Any) -> None:
    run = sl.jit(step)
    with sl.Mesh(data=2):
        for globals()["FACTOR"] in (2.0, 3.0, 2.0):
            assert torch.equal(run(torch.ones(2)).full_tensor(), step(torch.ones(2)))


def test_a_reason_says_first_what_the_caller_did() -> None:
    """And what of it is new as a whole, rather than all that is in that."""
    model = nn.Linear(4, 4)
    opt = torch.optim.Adam(model.parameters())

    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, last: bool) -> None:
        model(x).sum().backward()
        if last:
            opt.step()
            opt.zero_grad()

    step = sl.jit(step)
    with Mesh(data=2):
        for last in (False, False, True):
            step(model, opt, torch.ones(4, 4), last)
    assert step.retraces[1:] == [
        "last: False -> True; opt.state: a defaultdict of 0 -> a defaultdict of 2; "
        "opt.state[model.weight] is new and 1 more",
    ]


def test_a_partial_that_is_called_is_the_same() -> None:
    """Python notes in it how it is called, in its first call."""

    def scaled(x: Tensor, by: float) -> Tensor:
        return by * x

    net = nn.Linear(4, 4)
    net.act = functools.partial(scaled, by=2.0)
    step = sl.jit(lambda x: net.act(net(x)).sum())
    with Mesh(data=2):
        for _ in range(2):
            step(torch.ones(4, 4))
    assert step.retraces == []


class Training:
    """As many write one: what is recorded is read by a method that the step does not call."""

    def __init__(self) -> None:
        self.weight, self.losses = torch.ones(4), []
        self.run = sl.jit(self.step)

    def step(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()

    def fit(self, x: Tensor, record: list[float]) -> None:
        for _ in range(10):
            record.append(float(self.run(x)))

    def mean(self) -> float:
        return sum(self.losses) / len(self.losses)


def test_a_record_that_may_be_read_is_told_with_the_remedy() -> None:
    with Mesh(data=2):
        run = Training()
        with pytest.warns(match=r"self\.losses: a list of 7 -> a list of 8.*\n.*Remedy: keep a growing record"):
            run.fit(torch.ones(4, 4), run.losses)
        run = Training()
        run.fit(torch.ones(4, 4), [])
        assert run.run.retraces == []


# --- traced again, planned once ---------------------------------------------------------------------------------------


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Holds an item for each program that is decided and lowered."""
    programs: list[int] = []
    lower = compiling._lower
    monkeypatch.setattr(compiling, "_lower", lambda *args: (programs.append(1), lower(*args))[1])
    return programs


class Chooses:
    """Notes in the first call what it does, as models note what their labels are; `way` is what it does then, and
    later."""

    def __init__(self, way: tuple[Any, Any]) -> None:
        self.way, self.chosen = way, ""
        self.weight = torch.ones(4)

    def __call__(self, x: Tensor) -> Tensor:
        is_first, self.chosen = not self.chosen, "chosen"
        how: Callable[..., Tensor] = self.way[not is_first]
        return how(x, self.weight)


SECOND: dict[str, tuple[Any, Any, int]] = {
    "the same": ((lambda x, w: x * w + 2.0), None, 1),
    "another number": ((lambda x, w: x * w + 2.0), (lambda x, w: x * w + 3.0), 2),
    "zero with a sign": ((lambda x, w: w / (x * 0.0)), (lambda x, w: w / (x * -0.0)), 2),
    "other operands": ((lambda x, w: x - w), (lambda x, w: w - x), 2),
    "another constant": ((lambda x, w: x * torch.tensor([1.0, 2, 3, 4])), (lambda x, w: x * torch.arange(4.0)), 2),
    "other values": (
        *((lambda x, w, t=t: x * w * torch.tensor(t)) for t in ([1.0, 2, 3, 4], [1.0, 2, 3, 5])),
        2,
    ),
    "a value's sign": ((lambda x, w: w / torch.tensor(0.0) * x), (lambda x, w: w / torch.tensor(-0.0) * x), 2),
    "another place": ((lambda x, w: sl.shard(x * w, "data _")), (lambda x, w: sl.shard(x * w, "_ tensor")), 2),
    "another result": ((lambda x, w: x.sin() + x.cos()), (lambda x, w: [x.sin() + x.cos()][0].cos()), 2),
}


def test_a_module_that_notes_something_is_planned_once(decided: list[int]) -> None:
    """Its parameters have gradients by the second call, which are found, too."""

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.kind = nn.Linear(4, 2), ""

        def forward(self, x: Tensor) -> Tensor:
            self.kind = self.kind or "regression"
            out: Tensor = self.lin(x)
            return out

    torch.manual_seed(0)
    plain = Notes()
    model = sl.parallelize(copy.deepcopy(plain), {"lin.weight": "_ in@tensor"})
    for x in (X, X + 1, X - 1):
        a, b = model(x), plain(x)
        same(a, b)
        for y in (a, b):
            y.square().sum().backward()
        same(model.lin.weight.grad, plain.lin.weight.grad)
    assert len(decided) == 1
    assert model.kind == "regression"


@pytest.mark.parametrize("name", SECOND)
def test_what_is_traced_again_to_the_same_program_is_planned_once(name: str, decided: list[int]) -> None:
    first, later, programs = SECOND[name]
    sharded, plain = (Chooses((first, later or first)) for _ in range(2))
    step = sl.jit(lambda f, x: f(x), in_specs=(None, "batch _"))
    for x in (X, X + 1, X - 1):
        same(step(sharded, x), plain(x))
    assert len(step.retraces) == 1
    assert len(decided) == programs
    assert "chosen" in str(step.retraces)
    assert str(step.plan(sharded, X)).startswith("<lambda> on data=2, tensor=2")


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("tensor", [False, True])
def test_a_weight_that_each_call_makes_is_planned_once(norm: Any, tensor: bool, decided: list[int]) -> None:
    """From the second call on it is found where the first one put it."""
    torch.manual_seed(0)
    plain = nn.Sequential(norm(nn.Linear(4, 8)), nn.Linear(8, 2))
    model = copy.deepcopy(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    norm(model[0])
    model.load_state_dict(plain.state_dict())
    if tensor:
        sl.parallelize(model, {"1.weight": "_ in@tensor"})

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    jitted = sl.jit(step)
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain))
    for x in (X, X + 1, X - 1):
        same(jitted(model, mine, x), step(plain, theirs, x))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        same(a, b)
    assert len(decided) == 1


class Equal:
    """Equal to all others of its kind, as dataclasses are."""

    def __init__(self) -> None:
        self.counts = np.arange(3)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)


@pytest.mark.parametrize("result", ["object", "array"])
def test_what_is_traced_again_to_the_same_program_returns_its_own_objects(result: str) -> None:
    step = sl.jit(lambda f, x: (x * 2, f if result == "object" else f.counts))
    first, second = Equal(), Equal()
    for f in (first, second, first):
        found = step(f, X)[1]
        assert (found is f) if result == "object" else np.array_equal(found, f.counts)
