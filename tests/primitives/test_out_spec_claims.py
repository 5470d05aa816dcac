"""What the out_specs of a shard_map claim is proved, or refused; gradients agree with it. The oracle is plain torch."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, P, ShardingError, shard_map
from shardlib.core.context import single_device
from shardlib.testing.check import run_unshared

MESH = {"data": 2, "tensor": 4}
X = torch.arange(32.0, dtype=torch.float64).view(4, 8).sin()
CUT = "b@data k@tensor"

# body of one argument, cut by CUT; out_spec; the axes that it leaves out although the result varies over them.
CLAIMS: dict[str, tuple[Callable[[Tensor], Any], Any, str]] = {
    "a sum of its own piece": (lambda x: x.sum(), P(), "'data' (2 devices) and 'tensor' (4 devices)"),
    "summed over one axis": (lambda x: sl.psum(x.sum(), "data"), P(), "'tensor' (4 devices)"),
    "summed over the other": (lambda x: sl.psum(x.sum(), "tensor"), P(), "'data' (2 devices)"),
    "as it came in": (lambda x: x, "b@data _", "'tensor' (4 devices), as it came in"),
    "its place": (lambda x: sl.axis_index("data") + 0 * sl.psum(x.sum(), ("data", "tensor")).long(), P(), "'data'"),
    "scattered": (lambda x: sl.reduce_scatter(sl.psum(x, ("data", "tensor")), "data"), P("tensor"), "'data'"),
    "permuted": (lambda x: sl.ppermute(sl.psum(x, ("data", "tensor")), "tensor", [(0, 1)]), P(), "'tensor'"),
    "exchanged": (lambda x: sl.all_to_all(sl.psum(x, ("data", "tensor")), "data", 0, 1), P(), "'data'"),
    "a condition": (lambda x: torch.where(x.sum() > 0, sl.psum(x, ("data", "tensor")), 0.0), P(), "'data'"),
    "written to": (lambda x: torch.zeros(2, 2, dtype=x.dtype).add_(x), P(), "'data'"),
    "one of many": (lambda x: torch.cat([x, sl.psum(x, ("data", "tensor"))])[2:], P(), "'data'"),
    "summed": (lambda x: sl.psum(x.sum(), ("data", "tensor")), P(), ""),
    "summed one after the other": (lambda x: sl.psum(sl.psum(x.sum(), "data"), "tensor"), P(), ""),
    "a mean": (lambda x: sl.pmean(x, ("tensor", "data")), P(), ""),
    "a maximum": (lambda x: sl.pmax(x, "data"), P(None, "tensor"), ""),
    "gathered": (lambda x: sl.all_gather(sl.all_gather(x, "tensor", 1), "data"), P(), ""),
    "gathered over one": (lambda x: sl.all_gather(x, "tensor", 1), "b@data _", ""),
    "a constant": (lambda x: torch.ones(3), P(), ""),
    "cut as it varies": (lambda x: x.sum().view(1, 1), CUT, ""),
    "cut more than it varies": (lambda x: sl.psum(x, ("data", "tensor")), CUT, ""),
    "of its shape alone": (lambda x: torch.zeros_like(x) + x.new_full((2,), x.shape[0]), P(), ""),
}


def _call(mode: str, fn: Callable[..., Any], *args: Any) -> Any:
    return sl.jit(fn)(*args) if mode == "jit" else fn(*args)


@pytest.mark.parametrize("mode", ["jit", "eager"])
@pytest.mark.parametrize("name", CLAIMS)
def test_claims(name: str, mode: str) -> None:
    body, out_spec, over = CLAIMS[name]
    with Mesh(**MESH):
        mapped = shard_map(body, CUT, out_spec)
        if not over:
            _call(mode, mapped, X)
            return
        with pytest.raises(ShardingError) as error:
            _call(mode, mapped, X)
        assert f"varies over {over}" in str(error.value)
        _call(mode, shard_map(body, CUT, out_spec, check=False), X)


def test_words() -> None:
    """All results at once, each with its place in the pytree, its shape, its spec, its axes and its line."""

    def body(x: Tensor) -> dict[str, Any]:
        total = x.sum(0)
        rows = x.sum(1)
        return {"total": total, "rows": [rows, sl.psum(rows, ("data", "tensor"))]}

    with Mesh(**MESH), pytest.raises(ShardingError) as error:
        shard_map(body, CUT, {"total": "k@tensor", "rows": P()})(X)
    assert re.sub(r"py:\d+", "py:LINE", str(error.value)).splitlines() == [
        "shard_map(body) out_specs leave out axes over which the devices' results differ:",
        "  * result['total'] of shape [2] with spec 'k@tensor' varies over 'data' (2 devices), "
        "made at tests/primitives/test_out_spec_claims.py:LINE  total = x.sum(0)",
        "  * result['rows'][0] of shape [2] with spec '...' varies over 'data' (2 devices) and 'tensor' (4 devices), "
        "made at tests/primitives/test_out_spec_claims.py:LINE  rows = x.sum(1)",
        "Rule: an axis that an out_spec does not name is one along which all devices return the same",
        "Remedy: name the axis in out_specs, or make the result the same: sl.psum(x, ('data', 'tensor')), pmean, pmax, "
        "all_gather; shard_map(..., check=False) where the devices do return the same, but by other means",
    ]


@pytest.mark.parametrize("mode", ["jit", "eager"])
def test_a_gradient_holds_results_to_their_claims_that_nothing_reads(mode: str) -> None:
    """The gradient of a linear body needs no value of it, but rests on the claim."""
    with Mesh(**MESH):
        mapped = shard_map(lambda x: (3 * x).sum(), CUT, P())
        with pytest.raises(ShardingError, match="varies over 'data'"):
            _call(mode, sl.grad(lambda x: mapped(x)), X)


def test_claims_are_checked_without_devices() -> None:
    step = sl.jit(shard_map(lambda x: x, "b@data", "b"))
    with Mesh.abstract(data=1024, tensor=8), pytest.raises(ShardingError, match=r"'data' \(1024 devices\)"):
        step.plan(torch.empty(4096, device="meta"))


def test_an_axis_of_one_device_is_the_same() -> None:
    with Mesh(data=1, tensor=4):
        out = shard_map(lambda x: sl.psum(x.sum(), "tensor") + sl.axis_index("data"), CUT, P())(X)
    torch.testing.assert_close(out.full_tensor(), X.sum())


def test_rules_of_the_mesh_name_axes() -> None:
    with Mesh(data=2, tensor=4, rules={"batch": "data"}):
        assert torch.equal(shard_map(lambda x: x, "batch _", "batch _")(X).full_tensor(), X)
        with pytest.raises(ShardingError, match="varies over 'data'"):
            shard_map(lambda x: x, "batch _", "rows _")(X)


def test_under_vmap_and_grad() -> None:
    xs = torch.stack([X, X + 1, X + 2])
    with Mesh(**MESH):
        good = shard_map(lambda x: sl.psum((x * x).sum(), ("data", "tensor")), CUT, P())
        torch.testing.assert_close(sl.jit(sl.vmap(sl.grad(good)))(xs).full_tensor(), 2 * xs)
        bad = shard_map(lambda x: (x * x).sum(), CUT, P())
        with pytest.raises(ShardingError, match="varies over 'data'"):
            sl.jit(sl.vmap(sl.grad(bad)))(xs)


# --- bodies that nobody thought of ------------------------------------------------------------------------------------

STEPS = [
    "torch.sin({0})",
    "{0} * {1}",
    "{0} + {1}",
    "sl.psum({0}, {axis}) / 4",
    "sl.pmean({0}, {axis})",
    "sl.all_gather({0}, {axis}, 0)[:2]",
    "sl.all_gather({0}, {axis}, 1, tiled=False).sum(1) / 4",
    "sl.reduce_scatter(torch.cat([{0}] * sl.axis_size({axis})), {axis}) / 4",
    "sl.all_to_all({0}.repeat(4, 1), {axis}, 0, 0)[:2]",
    "sl.ppermute({0}, {one}, [(1, 0), (0, 1)])",
    "{0} * (1 + sl.axis_index({axis}).to({0}.dtype))",
    "{0}.t() @ {1} / 4",
]
SPECS = {"x": CUT, "v": "b k@tensor", "u": "b@data k", "w": "b k"}
WHOLE = {"x": (4, 8), "v": (2, 8), "u": (4, 2), "w": (2, 2)}


def _body(rng: random.Random) -> str:
    names = [*WHOLE]
    lines = []
    for i in range(rng.randint(2, 6)):
        axis = rng.choice(["'data'", "'tensor'", "('data', 'tensor')"])
        one = rng.choice(["'data'", "'tensor'"])
        text = rng.choice(STEPS).format(rng.choice(names[-4:]), rng.choice(names), axis=axis, one=one)
        if "all_to_all" in text and "(" in axis:
            text = text.replace("repeat(4, 1)", "repeat(8, 1)")
        names.append(f"t{i}")
        lines.append(f"    t{i} = {text}")
    return "\n".join([f"def body({', '.join(WHOLE)}):", *lines, f"    return {names[-1]}"])


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("block", range(4))
def test_what_is_proved_is_so(block: int) -> None:
    """Where a claim passes, all devices hold the same bits, and gradients are those of the program for one device."""
    refusals = []
    for seed in range(15 * block, 15 * block + 15):
        rng = random.Random(seed)
        source = _body(rng)
        names: dict[str, Any] = {"torch": torch, "sl": sl}
        exec(source, names)
        args = [
            torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
            for i, s in enumerate(WHOLE.values())
        ]
        out_spec = rng.choice(["_ _", "b@data _", "_ k@tensor"])
        mapped = shard_map(names["body"], tuple(SPECS.values()), out_spec)

        def both(*args: Tensor) -> Any:
            def loss(*args: Tensor) -> tuple[Tensor, Tensor]:
                out = mapped(*args)  # noqa: B023
                return (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)).square().sum(), out

            return torch.func.grad_and_value(loss, (0, 1, 2, 3), has_aux=True)(*args)

        with Mesh(**MESH) as mesh:
            step = sl.jit(both)
            try:
                step.plan(*args)
            except ShardingError as error:
                refusals.append(str(error))
                continue
            grads, (_, out) = run_unshared(step, mesh, args, {})
            with single_device():
                expected, (_, value) = both(*args)
        for local, coords in zip(out._locals, mesh.all_coords(), strict=True):
            assert torch.equal(local, out.sharding.scatter(out.full_tensor(), coords)), source
        for found, wanted in zip((out, *grads), (value, *expected), strict=True):
            assert torch.allclose(found.full_tensor(), wanted, rtol=1e-9, atol=1e-9), source
    assert 1 <= len(refusals) <= 12, "nothing is shown"
    assert all("out_specs leave out axes" in text for text in refusals)


# --- gradients of what is the same on several devices -----------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", ["jit", "eager"])
@pytest.mark.parametrize(
    ("body", "in_specs", "out_spec", "plain"),
    [
        (lambda x, w: sl.psum(x @ w, "tensor"), (CUT, "k@tensor _"), "b@data _", lambda x, w: x @ w),
        (lambda x, w: x * w, (CUT, P()), CUT, lambda x, w: x * w),
        (lambda x, w: sl.psum((x * w).sum(), ("data", "tensor")), (CUT, P()), P(), lambda x, w: (x * w).sum()),
        (lambda x, w: sl.pmean((x * w).mean(), ("data", "tensor")), (CUT, P()), P(), lambda x, w: (x * w).mean()),
        (lambda x, w: w.sin() * 1.0, (CUT, P()), P(), lambda x, w: w.sin()),
        (
            lambda x, w: sl.all_gather(x, "tensor", 1) * sl.psum(w, "data"),
            (CUT, P()), "b@data _", lambda x, w: x * 2 * w,
        ),
    ],
)  # fmt: skip
def test_gradients_are_summed_once(
    body: Callable[..., Tensor], in_specs: Any, out_spec: Any, plain: Callable[..., Tensor], mode: str
) -> None:
    """An argument that several devices have whole gets the sum of their gradients, once."""
    w = torch.randn((8, 3) if in_specs[1] != P() else (), dtype=torch.float64)

    def slopes(fn: Callable[..., Tensor]) -> Callable[..., Any]:
        return torch.func.grad(lambda x, w: (fn(x, w).cos() ** 2).sum(), (0, 1))

    with Mesh(**MESH):
        found = _call(mode, slopes(shard_map(body, in_specs, out_spec)), X, w)
    for a, b in zip(found, slopes(plain)(X, w), strict=True):
        torch.testing.assert_close(a.full_tensor() if isinstance(a, sl.ShardedTensor) else a, b)


# --- how it may be called ---------------------------------------------------------------------------------------------

MODES = ["jit", "eager", "one device"]


def _run_in(mode: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if mode == "one device":
        with single_device():
            return fn(*args, **kwargs)
    out = sl.jit(fn)(*args, **kwargs) if mode == "jit" else fn(*args, **kwargs)
    return torch.utils._pytree.tree_map_only(sl.ShardedTensor, lambda t: t.full_tensor(), out)


def _affine(x: Tensor, w: Tensor, bias: float = 0.0, *, scale: Tensor | None = None) -> Tensor:
    y = sl.psum(x @ w, "tensor") + bias
    return y if scale is None else y * scale


SPECS_OF = {"x": CUT, "w": "k@tensor _", "scale": P()}
W = torch.arange(24.0, dtype=torch.float64).view(8, 3).cos()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("in_specs", "args", "kwargs"),
    [
        ((CUT, "k@tensor _"), (X,), {"w": W}),
        ((CUT, "k@tensor _"), (), {"w": W, "x": X}),
        ((CUT, "k@tensor _", None), (X,), {"bias": 2.0, "w": W}),
        ({k: SPECS_OF[k] for k in ("x", "w")}, (X, W), {}),
        (SPECS_OF, (X,), {"w": W, "scale": torch.tensor(3.0, dtype=torch.float64)}),
    ],
)
def test_arguments_by_name(in_specs: Any, args: Any, kwargs: Any, mode: str) -> None:
    def plain(x: Tensor, w: Tensor, bias: float = 0.0, *, scale: Tensor | float = 1.0) -> Tensor:
        return (x @ w + bias) * scale

    with Mesh(**MESH):
        mapped = shard_map(_affine, in_specs, "b@data _")
        torch.testing.assert_close(_run_in(mode, mapped, *args, **kwargs), plain(*args, **kwargs))


def test_gradients_of_arguments_by_name() -> None:
    with Mesh(**MESH):
        w = W.clone().requires_grad_()
        (shard_map(_affine, SPECS_OF, "b@data _")(X, w=w) ** 2).sum().backward()
    torch.testing.assert_close(
        w.grad.full_tensor() if isinstance(w.grad, sl.ShardedTensor) else w.grad, 2 * X.t() @ X @ W
    )


@pytest.mark.parametrize(
    ("in_specs", "kwargs", "text"),
    [
        ((CUT,), {"w": W}, "in_specs has 1 entries, the call has 2 arguments"),
        ((CUT, "k@tensor _"), {"w": W, "scale": W}, "scale of shape [8, 3] has no spec"),
        ({**SPECS_OF, "wight": P()}, {"w": W, "scale": W}, "'wight' is no parameter; they are x, w, bias, scale"),
        ({"x": CUT}, {"w": W}, "args[1] of shape [8, 3] has no spec"),
        ({**SPECS_OF, "w": "k@tensor"}, {"w": W, "scale": W}, "args[1] with spec 'k@tensor' on shape [8, 3]"),
    ],
)
def test_names_that_do_not_fit(in_specs: Any, kwargs: Any, text: str) -> None:
    with Mesh(**MESH), pytest.raises(ShardingError) as error:
        shard_map(_affine, in_specs, "b@data _")(X, **kwargs)
    assert text in str(error.value)


@pytest.mark.parametrize("mode", MODES)
def test_decorators(mode: str) -> None:
    @shard_map(in_specs=CUT, out_specs=P())
    def total(x: Tensor) -> Tensor:
        """The sum of all."""
        return sl.psum(x.sum(), ("data", "tensor"))

    @functools.partial(shard_map, in_specs=(CUT,), out_specs="b@data _", check=False)
    def rows(x: Tensor) -> Tensor:
        return sl.psum(x, "tensor")

    class Model:
        def __init__(self) -> None:
            self.w = 3.0

        @shard_map(in_specs=(CUT,), out_specs=CUT)
        def scaled(self, x: Tensor) -> Tensor:
            return self.w * x

    assert (total.__name__, total.__doc__) == ("total", "The sum of all.")
    with Mesh(**MESH):
        torch.testing.assert_close(_run_in(mode, total, X), X.sum())
        torch.testing.assert_close(_run_in(mode, rows, X), X.view(4, 4, 2).sum(1))
        torch.testing.assert_close(_run_in(mode, Model().scaled, X), 3 * X)


def test_specs_of_axes_left_to_the_compiler_are_refused() -> None:
    with Mesh(**MESH):
        every = shard_map(lambda x: x, CUT, CUT, axis_names={"data", "tensor"})
        assert torch.equal(every(X).full_tensor(), X)
        with pytest.raises(ShardingError, match="left to the compiler"):
            shard_map(lambda x: x, CUT, CUT, axis_names={"tensor"})(X)


# --- pytrees and numbers ----------------------------------------------------------------------------------------------

TREES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "psum": (lambda t: sl.psum(t, "data"), lambda x: x[:2] + x[2:]),
    "pmean": (lambda t: sl.pmean(t, "data"), lambda x: (x[:2] + x[2:]) / 2),
    "pmax": (lambda t: sl.pmax(t, "data"), lambda x: torch.maximum(x[:2], x[2:])),
    "pmin": (lambda t: sl.pmin(t, "data"), lambda x: torch.minimum(x[:2], x[2:])),
    "all_gather": (lambda t: sl.all_gather(t, "data"), lambda x: x),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TREES)
def test_pytrees_that_are_the_same(name: str, mode: str) -> None:
    call, plain = TREES[name]

    def body(x: Tensor, y: Tensor) -> Any:
        return call({"a": x, "b": [y.sin(), None]})

    with Mesh(data=2):
        found = _run_in(mode, shard_map(body, "b@data _", "b _"), X, X + 1)
    torch.testing.assert_close(found["a"], plain(X))
    torch.testing.assert_close(found["b"][0], plain((X + 1).sin()))
    assert found["b"][1] is None


@pytest.mark.parametrize("mode", MODES)
def test_pytrees_that_differ(mode: str) -> None:
    def body(x: Tensor) -> Any:
        pair = (x, 2 * x)
        return (
            sl.reduce_scatter(pair, "data"),
            sl.all_to_all(pair, "data", 0, 1),
            sl.ppermute(pair, "data", [(0, 1), (1, 0)]),
        )

    swapped = torch.cat([X[2:], X[:2]])
    scattered = X[:2] + X[2:]
    exchanged = torch.stack([torch.cat([X[i], X[2 + i]]) for i in range(2)])
    with Mesh(data=2):
        found = _run_in(mode, shard_map(body, "b@data _", "b@data _"), X)
    for (one, two), plain in zip(found, (scattered, exchanged, swapped), strict=True):
        torch.testing.assert_close(one, plain)
        torch.testing.assert_close(two, 2 * plain)


def test_numbers() -> None:
    """As in JAX: a number is the same on all devices, so the sum of 1 is the size of the axis."""

    def body(x: Tensor) -> Tensor:
        assert sl.psum(1, "tensor") == 4
        assert sl.psum({"n": (1, 2.5)}, ("data", "tensor")) == {"n": (8, 20.0)}
        assert (sl.pmean(3, "data"), sl.pmax(3, "data"), sl.pmin(-1.5, "data")) == (3, 3, -1.5)
        return x * sl.psum(1, "data")

    with Mesh(**MESH):
        assert torch.equal(shard_map(body, CUT, CUT)(X).full_tensor(), 2 * X)
        for call in (lambda: sl.psum("x", "data"), lambda: sl.all_gather([1.0], "data")):
            with pytest.raises(ShardingError, match="of what is no tensor"):
                shard_map(lambda x: call(), CUT, CUT)(X)  # noqa: B023
