"""`scan`: a Python loop, traced once; values and gradients against the loop written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, ShardingError, scan, shard
from tests.helpers.ranks import run_ranks
from tests.helpers.trace_runs import TraceRuns

L = 3
D = torch.float64


def _params() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(L, 4, 8, dtype=D, generator=g) / 4,
        "v": torch.randn(L, 8, 4, dtype=D, generator=g) / 4,
        "b": torch.randn(L, 4, dtype=D, generator=g),
    }


H = torch.linspace(-1, 1, 32, dtype=D).view(8, 4)
C = torch.linspace(0, 2, 4, dtype=D)
SPECS = {"w": "l e f@tensor", "v": "l f@tensor e", "b": "l e"}


def _looped(fn: Callable[..., Any], init: Any, xs: Any, length: int | None = None, reverse: bool = False) -> Any:
    """The oracle: the loop that JAX's documentation writes, for a tensor or a dict."""
    n = length if xs is None else len(next(iter(xs.values())) if isinstance(xs, dict) else xs)
    ys: list[Any] = [None] * n  # type: ignore[operator]
    for i in reversed(range(len(ys))) if reverse else range(len(ys)):
        x = None if xs is None else {k: v[i] for k, v in xs.items()} if isinstance(xs, dict) else xs[i]
        init, ys[i] = fn(init, x)
    if isinstance(ys[0], dict):
        return init, {k: torch.stack([y[k] for y in ys]) for k in ys[0]}
    return init, None if ys[0] is None else torch.stack(ys)


def _mlp(h: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    h = h + torch.tanh(h @ p["w"]) @ p["v"] + p["b"]
    return h, h.sum(0)


class _Straight(torch.autograd.Function):
    """Rounds, with a gradient that no formula of torch's would give."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class _Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


def _annotated(h: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    h = shard(torch.tanh(h @ p["w"]), "b f@tensor") @ p["v"]
    return shard(h, "b@data e"), h.sum()


def _attention(h: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q = (h @ p["w"]).view(1, 8, 2, 4).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(8, 8)
    return h + out @ p["v"], out.sum()


def _inside(h: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    slope = torch.func.grad(lambda x: (x * x * p["b"]).sum())(h)
    return h - 0.1 * slope, slope.sum()


def _written(h: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = h * 1
    out[:, :2] += p["b"][:2]
    out.mul_(0.5)
    return out, {"out": out, "rows": out.argmax(0)}


BODIES: dict[str, Callable[..., Any]] = {
    "mlp": _mlp,
    "no y": lambda h, p: (_mlp(h, p)[0], None),
    "carry untouched": lambda h, p: (h, p["b"]),
    "the same twice": lambda h, p: (h * 1, h),
    "x is the carry": lambda h, p: (p["b"].expand(8, 4) * 1, h),
    "x unread": lambda h, p: (h * 2, h.sum()),
    "closure": lambda h, p: (h * C + p["b"], (h * C).sum()),
    "annotated": _annotated,
    "custom gradient": lambda h, p: (_Straight.apply(4 * h) / 4 + p["b"], h.sum()),
    "old custom gradient": lambda h, p: (_Old.apply(h) * 0.1 + p["b"], h.sum()),
    "attention": _attention,
    "a gradient inside": _inside,
    "writes": _written,
    "integers beside": lambda h, p: (h + p["b"], {"n": h.argmax(1), "h": h}),
    "vmap inside": lambda h, p: (torch.func.vmap(lambda r: r * p["b"])(h), None),
    "detached": lambda h, p: (h.detach() * p["b"] + h, h.detach().sum()),
    "checkpoint": lambda h, p: torch.utils.checkpoint.checkpoint(_mlp, h, p, use_reentrant=False),
}


def _loss(run: Callable[..., Any], body: Callable[..., Any], **how: Any) -> Callable[..., Tensor]:
    def loss(params: Any, h: Tensor) -> Tensor:
        h, ys = run(body, h, params, **how)
        parts = [h, *(ys.values() if isinstance(ys, dict) else [] if ys is None else [ys])]
        total = h.new_zeros(())
        for i, y in enumerate(parts):
            weights = torch.linspace(1, 2, y.numel(), dtype=D, device=y.device).view(y.shape)
            total = total + (i + 1) * (weights * y * y).sum()
        return total

    return loss


def _close(a: Any, b: Any) -> None:
    whole = [x.full_tensor() if isinstance(x, sl.ShardedTensor) else x for x in torch.utils._pytree.tree_leaves(a)]
    for x, y in zip(whole, torch.utils._pytree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def _by_autograd(loss: Callable[..., Tensor], params: dict[str, Tensor]) -> Any:
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    h = H.clone().requires_grad_()
    found = torch.autograd.grad(loss(leaves, h), [*leaves.values(), h], allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip([*leaves.values(), h], found, strict=True)]
    return dict(zip(leaves, zeros, strict=False)), zeros[-1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "reverse"), [*((name, False) for name in BODIES), ("mlp", True), ("integers beside", True)]
)
def test_values_and_gradients_are_those_of_the_loop(name: str, reverse: bool) -> None:
    body, params = BODIES[name], _params()
    one, loop = (_loss(run, body, reverse=reverse) for run in (scan, _looped))
    with sl.no_mesh():
        expected = loop(params, H)
        gradients = _by_autograd(loop, params)
        _close(one(params, H), expected)
        _close(_by_autograd(one, params), gradients)
    with Mesh(data=2, tensor=2):
        found = sl.jit(sl.value_and_grad(one, argnums=(0, 1)), in_specs=(SPECS, "b@data e"))(params, H)
        _close(found, (expected, gradients))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", BODIES)
def test_values_alone_are_those_of_the_loop(name: str) -> None:
    """No gradient is asked for, so that nothing is kept for it."""
    one, loop = (_loss(run, BODIES[name]) for run in (scan, _looped))
    with Mesh(data=2, tensor=2):
        _close(sl.jit(one, in_specs=(SPECS, "b@data e"))(_params(), H), loop(_params(), H))


def test_python_runs_once_whatever_the_number_of_steps() -> None:
    calls = TraceRuns()

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        calls.note()
        return h + x, h

    with Mesh(data=2):
        for n in (1, 4, 16):
            before = len(calls)
            sl.jit(lambda x: scan(body, torch.zeros(4), x)).plan(torch.ones(n, 4))
            assert len(calls) == before + 1
            sl.jit(sl.grad(lambda x: scan(body, torch.zeros(4), x)[0].sum())).plan(torch.ones(n, 4))
            assert len(calls) == before + 2


def test_lines_are_those_of_the_body() -> None:
    with Mesh(data=2, tensor=2):
        step = sl.jit(sl.grad(_loss(scan, _mlp)), in_specs=(SPECS, "b@data e"))
        text = step.plan(_params(), H).full
    line = 'h = h + torch.tanh(h @ p["w"]) @ p["v"] + p["b"]'
    assert f"  {line}" in text
    assert f"backward of {__file__.rpartition('tests')[0]}" in text or "backward of" in text
    assert any(row.lstrip().startswith("backward of") and row.endswith(line) for row in text.splitlines())


def test_no_collective_more_than_the_loop() -> None:
    with Mesh(data=2, tensor=2):
        kinds = [
            sorted(
                c.kind for c in sl.jit(_loss(run, _mlp), in_specs=(SPECS, "b@data e")).plan(_params(), H).collectives
            )
            for run in (scan, _looped)
        ]
    assert kinds[0] == kinds[1]


def test_a_gradient_of_what_the_body_closes_over() -> None:
    def loss(run: Any, c: Tensor, d: Tensor, h: Tensor) -> Tensor:
        both = {"c": c * 2}

        def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.sin(h * both["c"]) + x * d.sum(), h

        return run(body, h, torch.ones(L, 4, dtype=D))[0].square().sum()  # type: ignore[no-any-return]

    expected = sl.grad(lambda *a: loss(_looped, *a), argnums=(0, 1, 2))(C, C + 1, H)
    with Mesh(data=2):
        step = sl.jit(sl.grad(lambda *a: loss(scan, *a), argnums=(0, 1, 2)), in_specs=(None, None, "b@data e"))
        _close(step(C, C + 1, H), expected)


def test_plain_autograd_inside_jit() -> None:
    loss = _loss(scan, _mlp)

    def step(params: dict[str, Tensor], h: Tensor) -> Any:
        with torch.no_grad():
            before = loss(params, h)
        return before, torch.autograd.grad(loss(params, h), params["w"])[0]

    params = _params()
    expected = _by_autograd(_loss(_looped, _mlp), params)[0]["w"]
    with Mesh(data=2, tensor=2):
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        value, found = sl.jit(step, in_specs=(SPECS, "b@data e"))(leaves, H)
        _close(found.detach(), expected)
        _close(value.detach(), _loss(_looped, _mlp)(params, H))


def test_scans_in_scans() -> None:
    def loss(run: Any, ps: Tensor, h: Tensor) -> Tensor:
        def outer(h: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
            h, ys = run(lambda h, q: (torch.tanh(h * q + p[0]), h.sum()), h, p)
            return h, ys

        h, ys = run(outer, h, ps)
        return h.sum() + (ys * ys).sum()

    ps = _params()["w"]
    ps = ps[:, :, :4]
    expected = sl.value_and_grad(lambda *a: loss(_looped, *a), argnums=(0, 1))(ps, H)
    with Mesh(data=2):
        _close(sl.jit(sl.value_and_grad(lambda *a: loss(scan, *a), argnums=(0, 1)))(ps, H), expected)


def test_steps_without_xs_and_carries_of_numbers() -> None:
    def body(c: Any, _: None) -> Any:
        return {"n": c["n"] + 1, "v": c["v"] * 2}, c["n"]

    with Mesh(data=2):
        carry, ys = sl.jit(lambda: scan(body, {"n": 0, "v": 1.5}, length=4))()
        assert (int(carry["n"]), float(carry["v"]), ys.tolist()) == (4, 24.0, [0, 1, 2, 3])
    carry, ys = scan(body, {"n": 0, "v": 1.5}, None, 4, True)
    assert (int(carry["n"]), float(carry["v"]), ys.tolist()) == (4, 24.0, [3, 2, 1, 0])


def test_sharded_tensors_outside_jit() -> None:
    params = _params()
    with Mesh(data=2, tensor=2):
        placed = {k: shard(v, SPECS[k]).requires_grad_() for k, v in params.items()}
        h, ys = scan(_mlp, shard(H, "b@data e"), placed)
        _close((h.detach(), ys.detach()), _looped(_mlp, H, params))
        (h.sum() + ys.square().sum()).backward()
    plain = {k: v.clone().requires_grad_() for k, v in params.items()}
    h, ys = _looped(_mlp, H, plain)
    (h.sum() + ys.square().sum()).backward()
    _close({k: v.grad for k, v in placed.items()}, {k: v.grad for k, v in plain.items()})


def test_a_stack_cut_along_its_layers_is_gathered() -> None:
    with Mesh(data=3):
        step = sl.jit(lambda x: scan(lambda h, p: (h + p, None), torch.zeros(4), x)[0], in_specs=("l@data e",))
        _close(step(torch.arange(12.0).view(3, 4)), torch.arange(12.0).view(3, 4).sum(0))
        assert [c.kind for c in step.plan(torch.zeros(3, 4)).collectives] == ["all_gather"]


def test_prints_of_the_body(capsys: Any) -> None:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        sl.debug_print("h {}", h[0])
        return h + x, None

    with Mesh(data=2):
        sl.jit(lambda x: scan(body, torch.zeros(2), x)[0])(torch.ones(L, 2))
        assert capsys.readouterr().out == "h 0.0\nh 1.0\nh 2.0\n"
        sl.jit(sl.grad(lambda x: scan(body, torch.zeros(2), x)[0].sum()))(torch.ones(L, 2))
        assert capsys.readouterr().out == "h 0.0\nh 1.0\nh 2.0\n"


X = torch.ones(L, 4, dtype=D)

REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("no pair", lambda: scan(lambda h, x: h, C, X), "does not return a pair:\n  * it returns a tensor of shape [4]"),
    ("three", lambda: scan(lambda h, x: (h, h, h), C, X), "it returns a tuple of 3"),
    (
        "another dtype",
        lambda: scan(lambda h, x: (h.float(), h), {"a": C}["a"], X),
        "changes its carry:\n  * carry comes in as f64[4], goes out as f32[4]",
    ),
    (
        "another shape",
        lambda: scan(lambda h, x: ({"a": h["a"][:2]}, None), {"a": C}, X),
        "carry['a'] comes in as f64[4]",
    ),
    ("another structure", lambda: scan(lambda h, x: ((h, h), None), C, X), "its structure is"),
    ("a number", lambda: scan(lambda h, x: (h, 3), C, X), "returns what is no tensor:\n  * 3, a int"),
    (
        "lengths differ",
        lambda: scan(lambda h, x: (h, None), C, {"a": X, "b": X[:2]}),
        "how many steps there are:\n  * xs['a'] of shape [3, 4]: 3 steps\n  * xs['b'] of shape [2, 4]: 2 steps",
    ),
    ("length differs", lambda: scan(lambda h, x: (h, None), C, X, length=4), "  * length: 4 steps"),
    ("no length", lambda: scan(lambda h, x: (h, None), C), "does not know how many steps there are"),
    ("no steps", lambda: scan(lambda h, x: (h, None), C, X[:0]), "xs of shape [0, 4]: 0 steps"),
    ("no dim", lambda: scan(lambda h, x: (h, None), C, X.sum()), "xs has no dim"),
    ("no tensor", lambda: scan(lambda h, x: (h, None), C, [1, 2]), "xs[0] is 1, no tensor"),
]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("call", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(call: Any, message: str, jitted: bool) -> None:
    with Mesh(data=2), pytest.raises(ShardingError) as error:
        sl.jit(call).plan() if jitted else call()
    assert message in str(error.value)


def _lossy(h: Tensor) -> Tensor:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x * (h * 1).sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    return scan(lambda c, x: (Scaled.apply(c) + x, None), C, X)[0].sum()  # type: ignore[no-any-return]


INSIDE: list[tuple[str, Callable[[], Any], str]] = [
    (
        "draws",
        lambda: sl.jit(lambda x: scan(lambda h, p: (F.dropout(h) + p, None), C, x)).plan(X),
        "the body of scan draws random numbers",
    ),
    ("a gradient lost", lambda: sl.jit(sl.grad(_lossy)).plan(C), "where its gradient is not followed"),
    (
        "a gradient of xs set",
        lambda: sl.jit(lambda x: scan(lambda h, p: (_back(h.detach(), p), (h, None))[1], C, x)[0]).plan(
            X.clone().requires_grad_()
        ),
        "  * x.grad",
    ),
    (
        "writes to the carry",
        lambda: sl.jit(lambda x: scan(lambda h, p: (h.add_(p), None), C, x)).plan(X),
        "the body of scan writes to tensors that it did not make",
    ),
]


@pytest.mark.parametrize(("call", "message"), [r[1:] for r in INSIDE], ids=[r[0] for r in INSIDE])
def test_refused_inside_jit(call: Any, message: str) -> None:
    with Mesh(data=2), pytest.raises(ShardingError) as error:
        call()
    assert message in str(error.value)


def test_the_gradient_of_a_scan_in_the_steps_of_one() -> None:
    """Steps of gradient descent, and the gradient through them."""

    def descended(run: Any, c: Tensor, xs: Tensor) -> Tensor:
        def loss(h: Tensor) -> Tensor:
            out: Tensor = run(lambda h, x: (torch.tanh(h * x), None), h, xs)[0].square().sum()
            return out

        def step(h: Tensor, _: Tensor) -> tuple[Tensor, None]:
            return h - sl.grad(loss)(h), None

        out: Tensor = run(step, c, xs)[0]
        return out

    expected = descended(_looped, C, X)
    with Mesh(data=2):
        found = sl.jit(lambda c, xs: descended(scan, c, xs), in_specs=("k@data", None))
        torch.testing.assert_close(found(C, X).full_tensor(), expected)
        through = sl.jit(sl.grad(lambda c, xs: descended(scan, c, xs).sin().sum()))
        expected = torch.func.grad(lambda c, xs: descended(_looped, c, xs).sin().sum())(C, X)
        torch.testing.assert_close(through(C, X).full_tensor(), expected)


W = torch.linspace(-1, 1, 16, dtype=D).view(4, 4)
BATCHES = torch.linspace(0, 2, L * 8 * 4, dtype=D).view(L, 8, 4)


def _mse(w: Tensor, b: Tensor) -> Tensor:
    return (b @ w).square().mean()


def _summed(gradient: Callable[[Tensor, Tensor], Tensor], run: Any, w: Tensor, xs: Tensor) -> Tensor:
    return run(lambda g, b: (g + gradient(w, b), None), torch.zeros_like(w), xs)[0]  # type: ignore[no-any-return]


_LINEAR = torch.nn.Linear(4, 4, bias=False, dtype=D)
ACCUMULATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "value_and_grad": lambda w, b: sl.value_and_grad(_mse)(w, b)[1],
    "torch.func": lambda w, b: torch.func.grad_and_value(_mse)(w, b)[0],
    "a pytree": lambda w, b: sl.grad(lambda p, b: _mse(p["w"] * p["c"][0], b))({"w": w, "c": (C[1],)}, b)["w"],
    "functional_call": lambda w, b: torch.func.grad(
        lambda p: torch.func.functional_call(_LINEAR, p, b).square().mean()
    )({"weight": w})["weight"],
    "vmap": lambda w, b: torch.vmap(lambda row: (row * b[0]).sin())(w),
    "autograd.grad": lambda w, b: torch.autograd.grad(_mse(v := w.detach().requires_grad_(), b), v)[0],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("gradient", ACCUMULATED.values(), ids=list(ACCUMULATED))
def test_gradients_of_what_the_body_closes_over_add_up(gradient: Any, followed: bool) -> None:
    if followed and gradient is ACCUMULATED["autograd.grad"]:
        pytest.skip("it has no history")
    a, b = W.clone().requires_grad_(followed), W.clone().requires_grad_(followed)
    expected = _summed(gradient, _looped, a, BATCHES)
    with Mesh(data=2):
        found = sl.jit(lambda w, xs: _summed(gradient, scan, w, xs), in_specs=(None, "l b@data e"))(b, BATCHES)
        _close(found.detach(), expected.detach())
        assert found.requires_grad == expected.requires_grad
        if followed:
            (found * W).sum().backward()
            (expected * W).sum().backward()
            _close(b.grad, a.grad)


def test_a_frozen_part_of_the_body() -> None:
    teacher, student = torch.nn.Linear(4, 4, dtype=D), torch.nn.Linear(4, 4, dtype=D)

    def loss(run: Any, xs: Tensor) -> Tensor:
        def body(h: Tensor, b: Tensor) -> tuple[Tensor, None]:
            with torch.no_grad():
                y = teacher(b)
            return h + (student(b) - y).square().mean(), None

        return run(body, torch.zeros((), dtype=D), xs)[0]  # type: ignore[no-any-return]

    expected = torch.autograd.grad(loss(_looped, BATCHES), student.weight)[0]
    with Mesh(data=2):
        sl.jit(lambda xs: loss(scan, xs))(BATCHES).backward()
        assert teacher.weight.grad is None
        _close(student.weight.grad, expected)
        frozen = torch.no_grad()(lambda h, b: (h + teacher(b), None))
        assert not sl.jit(lambda xs: scan(frozen, xs[0] * 0, xs)[0])(BATCHES).requires_grad


def test_results_require_a_gradient_as_those_of_a_loop() -> None:
    w = W.clone().requires_grad_()
    with Mesh(data=2):
        carry, ys = sl.jit(lambda xs: scan(lambda c, b: (c + b.sum(), w.sum()), torch.zeros((), dtype=D), xs))(X)
        assert (carry.requires_grad, ys.requires_grad) == (False, True)


def test_the_gradient_of_what_the_body_closes_over_is_read() -> None:
    w = torch.tensor(2.0, dtype=D, requires_grad=True)
    with Mesh(data=2):
        step = sl.jit(lambda x: scan(lambda h, p: (h * (1.0 if w.grad is None else w.grad), None), x, X)[0])
        _close(step(C), C)
        (w * 3).backward()
        _close(step(C), C * 3**L)


def test_the_body_detaches_all() -> None:
    w = W.clone().requires_grad_()
    with Mesh(data=2):
        step = sl.jit(lambda w, n: scan(lambda c, r: (c + r.detach(), None), torch.zeros(4, dtype=D), w)[0] * n)
        _close(step(w, 0.5), W.sum(0) * 0.5)


def _counting(place: str) -> Callable[[Any, Any], Any]:
    class Holder:
        n = 0.0

    holder, n, items = Holder(), 0, {"n": 0}

    def variable(h: Tensor, b: Tensor) -> Any:
        nonlocal n
        n += 1
        return h + b, None

    def attribute(h: Tensor, b: Tensor) -> Any:
        holder.n += 1
        return h + b, None

    def item(h: Tensor, b: Tensor) -> Any:
        items["n"] += 1
        return h + b, None

    return {"n": variable, "holder.n": attribute, "items['n']": item}[place]


@pytest.mark.parametrize("place", ["n", "holder.n", "items['n']"])
def test_counts_are_refused(place: str) -> None:
    body = _counting(place)
    with Mesh(data=2), pytest.raises(ShardingError) as error:
        sl.jit(lambda x: scan(body, torch.zeros(4, dtype=D), x)).plan(X)
    assert "the body of scan changes values that are not its own" in str(error.value)
    assert f"{place} was 0" in str(error.value)


def _back(w: Tensor, b: Tensor) -> None:
    (w * b).sum().backward()


def _drop(w: Tensor, b: Tensor) -> None:
    w.grad = None


def _empty(w: Tensor, b: Tensor) -> None:
    assert w.grad is not None
    w.grad.zero_()


@pytest.mark.parametrize(
    ("write", "has"), [(_back, False), (_back, True), (_drop, True), (_empty, True)], ids=["none", "add", "drop", "0"]
)
def test_gradients_that_the_body_sets_are_refused(write: Any, has: bool) -> None:
    w = C.clone().requires_grad_()
    w.grad = C.clone() if has else None

    def body(h: Tensor, b: Tensor) -> tuple[Tensor, None]:
        write(w, b)
        return h + b, None

    with Mesh(data=2), pytest.raises(ShardingError) as error:
        sl.jit(lambda x: scan(body, torch.zeros(4, dtype=D), x)).plan(X)
    assert "sets gradients of tensors that it did not make, by backward() or .grad:\n  * w.grad" in str(error.value)
    if has:
        _close(w.grad, C)


def test_under_vmap() -> None:
    def one(h: Tensor, x: Tensor) -> Any:
        return scan(lambda h, p: (torch.sin(h * p), h), h, x)

    hs, xs = H, X
    with Mesh(data=2):
        _close(sl.jit(sl.vmap(one, in_dims=(0, None)))(hs, xs), sl.vmap(one, in_dims=(0, None))(hs, xs))


def _ranked() -> float:
    params = _params()
    n = torch.distributed.get_world_size()
    with Mesh(data=n // 2, tensor=2):
        step = sl.jit(sl.value_and_grad(_loss(scan, _mlp), argnums=(0, 1)), in_specs=(SPECS, "b@data e"))
        found = step(params, H)
        _close(found, sl.value_and_grad(_loss(_looped, _mlp), argnums=(0, 1))(params, H))
        return float(found[0])


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.ranks
@pytest.mark.parametrize("n", [2, 4])
def test_on_ranks(n: int) -> None:
    assert len(set(run_ranks(_ranked, n))) == 1


# Transforms of a scan -------------------------------------------------------------------------------------------------

XS = torch.linspace(0, 1, 12, dtype=D).view(3, 4)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Loop = Callable[..., Any]

CELLS: dict[str, Callable[[Tensor], Callable[..., Any]]] = {
    "saves its result": lambda w: lambda h, x: (torch.exp(-h) * x, None),
    "closes over a weight": lambda w: lambda h, x: (torch.tanh(h @ w + x), (h * w.sum()).sum()),
    "linear": lambda w: lambda h, x: (h @ w + x, h.sum()),
    "custom gradient": lambda w: lambda h, x: (_Cosine.apply(2 * h) * x, h.square()),
    "a gradient inside": lambda w: lambda h, x: (h - sl.grad(lambda z: (z.sin() * x * z).sum())(h), None),
    "carry untouched": lambda w: lambda h, x: (h, h.square() * x),
    "detached": lambda w: lambda h, x: (h.detach() * x.exp() + h.sin(), h.detach()),
}


class _Cosine(torch.autograd.Function):
    """Rounds, with a gradient that depends on its operand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def _cell_loss(loop: Loop, cell: str) -> Loss:
    def loss(h: Tensor, xs: Tensor, w: Tensor) -> Tensor:
        carry, ys = loop(CELLS[cell](w), h, xs)
        out: Tensor = carry.sin().sum() + (0 if ys is None else ys.cos().sum())
        return out

    return loss


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def _penalty(f: Loss) -> Loss:
    def run(*tensors: Tensor) -> Any:
        own = _leaves(*tensors)
        loss = f(*own)
        grads = torch.autograd.grad(loss, own, create_graph=True, allow_unused=True)
        (loss + sum(g.square().sum() for g in grads if g is not None)).backward()
        return [x.grad for x in own if x.grad is not None]

    return run


def _third(f: Loss) -> Loss:
    def run(*tensors: Tensor) -> Any:
        own = _leaves(*tensors)
        (first,) = torch.autograd.grad(f(*own), own[0], create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), own[1], create_graph=True)
        second.square().sum().backward()
        return [x.grad for x in own if x.grad is not None]

    return run


def _maml(f: Loss) -> Loss:
    def run(h: Tensor, xs: Tensor, w: Tensor) -> Tensor:
        def outer(w: Tensor) -> Tensor:
            return f(h.cos(), xs, w - 0.1 * sl.grad(lambda w: f(h, xs, w))(w))

        return sl.grad(outer)(w)

    return run


def _mapped(f: Loss, *dims: int | None) -> Loss:
    def run(*tensors: Tensor) -> Tensor:
        batches = [x if d is None else torch.stack([x, 2 * x], d) for x, d in zip(tensors, dims, strict=True)]
        return torch.func.vmap(f, dims)(*batches).sum()

    return run


SECOND: dict[str, Callable[[Loss], Any]] = {
    "gradient penalty": _penalty,
    "third derivative": _third,
    "MAML": _maml,
    "grad of grad": lambda f: torch.func.grad(lambda *a: torch.func.grad(f)(*a).square().sum(), (0, 1, 2)),
    "jacrev": lambda f: torch.func.jacrev(lambda h, xs, w: f(h, xs, w) * h),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "cotangents of vjp": lambda f: torch.func.grad(
        lambda h, xs, w: torch.func.vjp(lambda z: f(z, xs, w) * z, h)[1](h)[0].sin().sum()
    ),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f, (0, 1, 2)), (None, None, 0)),
    "vmap over init": lambda f: torch.func.grad(_mapped(f, 0, None, None), (0, 1, 2)),
    "vmap over xs": lambda f: torch.func.grad(_mapped(f, None, 1, None), (0, 1, 2)),
    "vmap over what it closes over": lambda f: torch.func.grad(_mapped(f, None, None, 0), (0, 1, 2)),
    "penalty of vmap": lambda f: _penalty(_mapped(f, None, 0, None)),
}


@pytest.mark.long
@pytest.mark.sampled(13)
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("kind", SECOND)
@pytest.mark.parametrize("cell", CELLS)
def test_transforms(cell: str, kind: str, axes: int) -> None:
    h, xs, w = C.cos(), XS, torch.stack([W, -W]) if kind == "vmap of grad" else W
    want = torch.utils._pytree.tree_leaves(SECOND[kind](_cell_loss(_looped, cell))(h, xs, w))
    with Mesh(a=axes):
        out = sl.jit(SECOND[kind](_cell_loss(scan, cell)), in_specs=("_@a", None, None))(h, xs, w)
    for x, y in zip(torch.utils._pytree.tree_leaves(out), want, strict=True):
        torch.testing.assert_close(x.full_tensor(), y)


def test_second_derivatives_outside_of_jit() -> None:
    own, theirs = _leaves(C.cos()), _leaves(C.cos())
    with Mesh(a=2):
        f = sl.jit(lambda h: _cell_loss(scan, "saves its result")(h, XS, W), in_specs=("_@a",))
        for run, leaves in ((f, own), (lambda h: _cell_loss(_looped, "saves its result")(h, XS, W), theirs)):
            loss = run(*leaves)
            (g,) = torch.autograd.grad(loss, leaves, create_graph=True)
            (loss + g.square().sum()).backward()
    torch.testing.assert_close(own[0].grad, theirs[0].grad)


def test_what_a_second_derivative_reads_was_written_to() -> None:
    def f(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = x * 1
        out = scan(lambda h, p: (h.sin() + p, None), h, XS)[0].sum()
        h.add_(1)
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        return g

    with Mesh(a=2), pytest.raises(ShardingError, match="modified by an inplace operation"):
        sl.jit(f)(C)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients(mode: Any) -> None:
    want = _cell_loss(_looped, "saves its result")(C, XS, W)
    with Mesh(a=2), mode():
        out = sl.jit(_cell_loss(scan, "saves its result"))(C.clone(), XS.clone(), W.clone())
        torch.testing.assert_close(out.full_tensor(), want)
