"""What people get wrong on their first day: the error names their line, their names and the remedy, or it just works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, P, ShardingError, shard

X, W = torch.arange(24.0).view(4, 6), torch.arange(48.0).view(6, 8) / 48
GRID = Mesh(data=2, tensor=2, rules={"batch": "data", "ff": "tensor"})
OTHER = Mesh(data=4)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def masked(x: Tensor, mask: Tensor | None = None) -> Tensor:
    return x if mask is None else x * mask


def keyword(x: Tensor, *, scale: Tensor) -> Tensor:
    return x * scale


# --- the mesh as an argument ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("current", [None, GRID, OTHER])
def test_shard_takes_a_mesh(current: Mesh | None) -> None:
    if current is None:
        x = shard(X, "batch _", mesh=GRID)
    else:
        with current:
            x = shard(X, "batch _", mesh=GRID)
    assert (sl.typeof(x), x.mesh) == ("f32[4@data, 6]", GRID)
    assert torch.equal(x.full_tensor(), X)
    assert sl.typeof(shard(x, "_ f@tensor", mesh=GRID)) == "f32[4, 6@tensor]"


def test_a_traced_function_names_its_own_mesh() -> None:
    step = sl.jit(lambda x: shard(x * 2, "batch _", mesh=GRID))
    with GRID:
        assert sl.typeof(step(X)) == "f32[4@data, 6]"
        sl.check(lambda x: shard(x * 2, "batch _", mesh=GRID), X)
    for other in (OTHER, Mesh(data=2, tensor=2), Mesh.abstract(data=8)):
        with other, pytest.raises(ShardingError, match=r"is given Mesh\(data=2, tensor=2, .* the program runs on "):
            step.plan(X)


def test_without_a_mesh_on_purpose_a_named_mesh_is_not_used() -> None:
    with sl.no_mesh():
        assert shard(X, "batch _", mesh=GRID) is X


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: shard(X, "(mesh b) _", mesh=2), "gets mesh=2"),  # type: ignore[arg-type]
        (lambda: shard(shard(X, "b@data _", mesh=OTHER), "batch _", mesh=GRID), "x lives on Mesh(data=4)"),
    ],
)
def test_another_mesh_is_refused(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ShardingError) as error:
        call()
    assert says in str(error.value)
    assert "mesh=mesh" in str(error.value) or "sizes=" in str(error.value)


# --- as many specs as arguments ---------------------------------------------------------------------------------------

ONE = ("batch _",)
FEW: list[tuple[str, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any], str]] = [
    ("second", product, ONE, (X, W), {}, "  * w of shape [6, 8] has no entry"),
    ("list", product, list(ONE), (X, W), {}, "  * w of shape [6, 8] has no entry"),
    ("none", product, (), (X, W), {}, "  * x of shape [4, 6] has no entry\n  * w of shape [6, 8] has no entry"),
    ("by name", product, ONE, (X,), {"w": W}, "  * w of shape [6, 8] has no entry"),
    ("all by name", product, ONE, (), {"w": W, "x": X}, "  * w of shape [6, 8] has no entry"),
    ("a default by position", masked, ONE, (X, X), {}, "  * mask of shape [4, 6] has no entry"),
    ("a dict", lambda x, p: x @ p["a"] + p["b"], ONE, (X, {"a": W, "b": W[0]}), {}, "  * p with 2 tensors has no entry"),
    ("a builtin", torch.matmul, ONE, (X, W), {}, "  * args[1] of shape [6, 8] has no entry"),
    ("many", lambda *xs: sum(xs), ONE, (X, X, X), {}, "  * xs[1] of shape [4, 6] has no entry\n  * xs[2]"),
]  # fmt: skip


@pytest.mark.parametrize("door", ["call", "plan", "check"])
@pytest.mark.parametrize(("fn", "specs", "args", "named", "says"), [f[1:] for f in FEW], ids=[f[0] for f in FEW])
def test_an_argument_without_a_spec(
    door: str, fn: Any, specs: Any, args: Any, named: dict[str, Any], says: str
) -> None:
    step = sl.jit(fn, in_specs=specs)
    run = {"call": step, "plan": step.plan, "check": lambda *a, **k: sl.check(fn, *a, in_specs=specs, **k)}[door]
    with GRID, pytest.raises(ShardingError) as error:
        run(*args, **named)
    assert says in str(error.value)
    assert "Remedy: write None where the layout is to be inferred" in str(error.value)


@pytest.mark.parametrize(
    ("fn", "specs", "args", "named"),
    [
        (product, ("batch _", None), (X, W), {}),
        (product, ("batch _", "..."), (X,), {"w": W}),
        (product, {"x": "batch _"}, (X, W), {}),
        (product, None, (X, W), {}),
        (lambda x, n: x * n, ONE, (X, 2.0), {}),
        (lambda x, names: x, ONE, (X, ["a", "b"]), {}),
        (lambda x, module: module(x), ONE, (X, torch.nn.Linear(6, 8)), {}),
        (masked, ONE, (X,), {}),
        (masked, ONE, (X,), {"mask": X}),
        (keyword, ONE, (X,), {"scale": X}),
    ],
)
def test_an_argument_that_needs_no_spec(fn: Any, specs: Any, args: Any, named: dict[str, Any]) -> None:
    with GRID:
        out = sl.jit(fn, in_specs=specs)(*args, **named)
    torch.testing.assert_close(out.full_tensor(), fn(*args, **named))


LENGTHS: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    (
        "out_specs too few",
        lambda: sl.jit(lambda x: (x, x * 2), out_specs=ONE)(X),
        ("the result: the specs have a tuple of 1, the values a tuple of 2", "give each of the 2 values an entry"),
    ),
    (
        "shard_map too few",
        lambda: sl.shard_map(product, ONE, "batch _")(X, W),
        ("in_specs has 1 entries, the call has 2 arguments", "  * w has no entry", "they are x, w"),
    ),
    (
        "shard_map too many",
        lambda: sl.shard_map(product, ("batch _", P(), P()), "batch _")(X, W),
        ("in_specs has 3 entries, the call has 2 arguments", "  * 2: P() is for no argument"),
    ),
    (
        "shard_map out_specs",
        lambda: sl.shard_map(product, ("batch _", P()), ("batch _", P()))(X, W),
        ("  * the result: the specs have a tuple of 2, the values a Tensor",),
    ),
    (
        "shard_map a key",
        lambda: sl.shard_map(lambda p, x: x @ p["w"], ({"v": P()}, "batch _"), "batch _")({"w": W}, X),
        ("  * args[0] has no 'v'; it has 'w'",),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), [x[1:] for x in LENGTHS], ids=[x[0] for x in LENGTHS])
def test_specs_of_another_length(call: Callable[[], Any], says: tuple[str, ...]) -> None:
    with GRID, pytest.raises(ShardingError) as error:
        call()
    for line in says:
        assert line in str(error.value)
