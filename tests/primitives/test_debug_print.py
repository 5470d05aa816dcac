"""`debug_print`: whole values, in order, once, from wherever the program runs."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib import Mesh, ShardingError, debug_print, shard
from tests.helpers.ranks import run_ranks

X = torch.arange(24.0).view(4, 6)
W = torch.arange(30.0).view(6, 5)


def _printed(call: Any) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call()
    return out.getvalue()


FORMATS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("x {}", (X,), {}),
    ("{x!r} and {x!s}", (), {"x": X[0]}),
    ("{1} before {0}", (X[0], X[1]), {}),
    ("{:.3f} {:>8} {}", (X.sum(), X.sum(), X.sum()), {}),
    ("{:d} {:08.2e} {}", (X.sum().long(), X.mean(), X > 3), {}),
    ("{x.shape} {x.dtype} {x[1]} {x[2][0]}", (), {"x": X}),
    ("{} {{braces}} {} {name}", (X[0], {"a": [X[1], 3], "b": "{c}"}), {"name": "{}"}),
    ("nothing", (), {}),
    ("{} steps", (3,), {}),
    ("{} {}", (torch.zeros(0), torch.zeros(0, 3)), {}),
]


@pytest.mark.parametrize(("fmt", "args", "kwargs"), FORMATS, ids=[f[0] for f in FORMATS])
def test_text_is_that_of_format(fmt: str, args: Any, kwargs: Any) -> None:
    expected = fmt.format(*args, **kwargs) + "\n"
    assert _printed(lambda: debug_print(fmt, *args, **kwargs)) == expected

    def step(args: Any, tensors: Any) -> torch.Tensor:
        debug_print(fmt, *args, **tensors)
        return torch.zeros(())

    with Mesh(data=2, tensor=2):
        jitted = sl.jit(step)
        plan = _printed(lambda: jitted.plan(args, kwargs))
        assert plan == ""  # nothing runs
        assert _printed(lambda: jitted(args, kwargs)) == expected
        assert _printed(lambda: jitted(args, kwargs)) == expected  # warm, too


@pytest.mark.parametrize("spec", ["b@data f@tensor", "b@(data tensor) _", "_ (a f@tensor)", "b@data=[3 1] _", "_ _"])
def test_sharded_values_are_whole(spec: str) -> None:
    with Mesh(data=2, tensor=2):
        x = shard(X, spec, **({"a": 2} if "(a" in spec else {}))
        assert _printed(lambda: debug_print("{}", x)) == f"{X}\n"

        def step(x: torch.Tensor) -> torch.Tensor:
            debug_print("{}", x + 1)
            return x

        assert _printed(lambda: sl.jit(step)(x)) == f"{X + 1}\n"


def _step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = x @ w
    debug_print("h {}", h)
    for i in range(3):
        debug_print("again")  # the same three times: never made one
        debug_print("{} {}", i, h.sum())
    return torch.relu(h).sum()


TEXT = "".join(
    [f"h {X @ W}\n", *(f"again\n{i} {(X @ W).sum()}\n" for i in range(3))]
)  # fmt: skip


@pytest.mark.long
def test_order_and_repeats_under_grad() -> None:
    with Mesh(data=2, tensor=2):
        specs = ("_ f@tensor", "b@data _")
        assert _printed(lambda: sl.jit(_step, in_specs=specs)(W, X)) == TEXT
        assert _printed(lambda: sl.jit(sl.value_and_grad(_step), in_specs=specs)(W, X)) == TEXT
        out: list[Any] = []
        assert _printed(lambda: out.append(sl.jit(sl.grad(_step), in_specs=specs)(W, X))) == TEXT
    plain = sl.grad(_step)
    assert _printed(lambda: out.append(plain(W, X))) == TEXT
    assert torch.allclose(out[0].full_tensor(), out[1])


def test_values_that_nobody_else_reads() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        debug_print("{}", x.exp().sum(0))
        return x * 2

    with Mesh(data=2):
        assert _printed(lambda: sl.jit(step, in_specs=("b@data _",))(X)) == f"{X.exp().sum(0)}\n"


def test_before_and_after_a_write() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        debug_print("{}", y[0])
        y.add_(1)
        debug_print("{}", y[0])
        return y.mul_(2)

    with Mesh(data=2):
        assert _printed(lambda: sl.jit(step, in_specs=("b@data _",))(X)) == f"{X[0]}\n{X[0] + 1}\n"


def test_once_for_each_element_under_vmap() -> None:
    def one(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        debug_print("{} {:.1f}", x, w)
        return x * w

    expected = "".join(f"{row} 2.0\n" for row in X)
    assert _printed(lambda: sl.vmap(one, in_dims=(0, None))(X, torch.tensor(2.0))) == expected
    with Mesh(data=2):
        step = sl.jit(sl.vmap(one, in_dims=(0, None)), in_specs=("b@data _", ""))
        assert _printed(lambda: step(X, torch.tensor(2.0))) == expected


def test_plan_shows_the_print_and_what_it_costs() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        debug_print("y {}", y)
        return y

    with Mesh(data=2):
        plan = sl.jit(step, in_specs=("b@data _",)).plan(X)
    assert [c.kind for c in plan.collectives] == ["all_gather"]
    assert "read by debug_print(y)" in plan.collectives[0].reason
    assert "debug_print('y {0}', y)" in plan.full
    assert "by the first device" in plan.full
    assert plan.replicated_ops == ()
    assert str(plan.layout_of("result")) == "4@data, 6"  # where it would be anyway


def test_check_runs_prints_too() -> None:
    with Mesh(data=2):
        text = _printed(lambda: sl.check(_step, W, X, in_specs=(None, "b@data _")))
    assert text.startswith(TEXT + TEXT)


REFUSED: list[tuple[Any, str]] = [
    (lambda x: debug_print("{:.2f}", x), "cannot write a tensor of shape [4, 6] and dtype torch.float32 as '.2f'"),
    (lambda x: debug_print("{:d}", x.sum()), "cannot write a tensor of shape [] and dtype torch.float32 as 'd'"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_formats_that_a_tensor_does_not_take(call: Any, message: str) -> None:
    with Mesh(data=2):
        for refused in (lambda: call(X), lambda: sl.jit(call).plan(X), lambda: call(shard(X, "b@data _"))):
            with pytest.raises(ShardingError) as error:
                refused()
            assert message in str(error.value)


def test_a_field_without_an_argument() -> None:
    with pytest.raises(IndexError):
        debug_print("{} {}", X)
    with pytest.raises(KeyError):
        debug_print("{x}", X)


def test_a_body_is_refused() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        debug_print("{}", x)
        return x

    with Mesh(data=2):
        step = sl.jit(sl.shard_map(body, in_specs=("b@data _",), out_specs="b@data _"))
        with pytest.raises(ShardingError, match=r"debug_print\('\{\}'\) is inside a shard_map body"):
            step.plan(X)


def _ranked() -> tuple[str, str, str]:
    n = torch.distributed.get_world_size()
    with Mesh(data=n // 2, tensor=2):
        step = sl.jit(sl.grad(_step), in_specs=("_ f@tensor", "b@data _"))
        first = _printed(lambda: step(W, X))
        x = shard(X, "b@data _")
        under_grad = _printed(lambda: sl.grad(lambda x: (debug_print("{}", x[0]), x.sum())[1])(x))
        return first, _printed(lambda: debug_print("{}", x * 2)), under_grad


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.ranks
@pytest.mark.parametrize("n", [2, 4])
def test_the_first_rank_prints(n: int) -> None:
    results = run_ranks(_ranked, n)
    assert results[0] == (TEXT, f"{X * 2}\n", f"{X[0]}\n")
    assert results[1:] == [("", "", "")] * (n - 1)
