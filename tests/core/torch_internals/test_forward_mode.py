"""Forward-mode AD inside `jit`: through constraints, loops, per-device code and attention, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import shardlib as sl
from shardlib.core.errors import NoDerivativeError, ShardingError
from shardlib.ops.attention.op import attention, merge

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode calls it

Fn = Callable[[Tensor], Any]
_RNG = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, dtype=torch.float64, generator=_RNG)
WS = torch.randn(3, 6, 6, dtype=torch.float64, generator=_RNG) / 3
BIAS = torch.randn(3, 4, 4, dtype=torch.float64, generator=_RNG)
ROWS, WHOLE = "_@x _", "_ _"
ONE, TWO, UNEVEN, SQUARE = {"x": 1}, {"x": 2}, {"x": 3}, {"x": 2, "y": 2}


def dual(f: Fn, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))).tangent


def pulled(f: Fn, x: Tensor) -> Tensor:
    y, pull = vjp(f, x)
    out: Tensor = jvp(lambda ct: pull(ct)[0], (y,), (y.cos(),))[1]
    return out


def scalar(f: Fn) -> Fn:
    return lambda x: f(x).sin().sum()


# Each makes, of a function of a tensor, a function of that tensor.
DERIVATIVES: dict[str, Callable[[Fn], Fn]] = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "dual level": lambda f: lambda x: dual(f, x),
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(scalar(f)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(scalar(f))),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(scalar(f))),
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (x.cos(),))[1].square().sum()),
    "jvp of grad": lambda f: lambda x: jvp(grad(scalar(f)), (x,), (x.cos(),))[1],
    "vmap of jvp": lambda f: lambda x: vmap(lambda t: jvp(f, (x,), (t,))[1])(torch.stack([x.cos(), x.sin()])),
    "jvp of vmap": lambda f: lambda x: jvp(vmap(f), (torch.stack([x, 2 * x]),), (torch.stack([x.cos(), x.sin()]),)),
    "jvp of a pullback": lambda f: lambda x: pulled(f, x),
}


def heads(x: Tensor) -> Tensor:
    """`[4, 6]` as one sequence of 4 with 3 heads of 2: `[1, 3, 4, 2]`."""
    return x.unflatten(1, (3, 2)).transpose(0, 1)[None]


def joined(o: Tensor) -> Tensor:
    return o[0].transpose(0, 1).flatten(1)


def sdpa(**how: Any) -> Fn:
    return lambda x: joined(F.scaled_dot_product_attention(*(heads(x) * k for k in (1, 2, 0.5)), **how))


def biased(x: Tensor) -> Tensor:
    return joined(F.scaled_dot_product_attention(*[heads(x)] * 3, attn_mask=x[:, :4] * BIAS))


def grouped(x: Tensor) -> Tensor:
    q = heads(x)
    out = F.scaled_dot_product_attention(q.repeat(1, 2, 1, 1), q, q.sin(), is_causal=True, enable_gqa=True)
    return joined(out)


def masked(seen: Tensor) -> tuple[Fn, Fn]:
    """Attention with a mask, and the same by hand: plain torch has NaN for tangents of a row without keys."""

    def by_hand(x: Tensor) -> Tensor:
        p = torch.where(seen, (heads(x) @ heads(x).transpose(-1, -2) * 2**-0.5).exp(), 0)
        total = p.sum(-1, keepdim=True)
        return joined(p / torch.where(total > 0, total, 1) @ heads(x))

    return lambda x: joined(F.scaled_dot_product_attention(*[heads(x)] * 3, attn_mask=seen)), by_hand


def merged(rows_without_keys: bool) -> tuple[Fn, Fn]:
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[1] = not rows_without_keys
    by_hand = masked(seen)[1]

    def parts(x: Tensor) -> Tensor:
        q = heads(x)
        halves = [attention(q, q[:, :, half], q[:, :, half], mask=seen[:, :2]) for half in (slice(2), slice(2, 4))]
        return joined(merge(*halves[0], *halves[1])[0])

    return parts, by_hand


def flex(x: Tensor) -> Tensor:
    return joined(flex_attention(*[heads(x)] * 3, score_mod=lambda s, b, h, i, j: s + x[i, j]))  # type: ignore[arg-type]


def flex_by_hand(x: Tensor) -> Tensor:
    return joined((heads(x) @ heads(x).transpose(-1, -2) * 2**-0.5 + x[:, :4]).softmax(-1) @ heads(x))


def scanned(x: Tensor) -> Tensor:
    outer = x.t() @ x  # closed over
    ws = WS.to(x.dtype)

    def body(carry: tuple[Tensor, Tensor], w: Tensor) -> Any:
        h, total = carry
        h = torch.tanh(h @ (w + outer))
        total = total * 0.5 + h.sum()
        return (h, total), {"y": h.sum(0) * total}

    (h, total), ys = sl.scan(body, (x, x.sum()), ws, reverse=True)
    return h * total + ys["y"].sum()


def looped(x: Tensor) -> Tensor:
    outer, h, total, ys = x.t() @ x, x, x.sum(), x.new_zeros(())
    for w in WS.to(x.dtype).flip(0):
        h = torch.tanh(h @ (w + outer))
        total = total * 0.5 + h.sum()
        ys = ys + (h.sum(0) * total).sum()
    return h * total + ys


def constrained(x: Tensor) -> Tensor:
    return sl.shard(sl.shard(x.sin(), ROWS) @ x.t() @ x, "_ _@x")


# In float64, to plain torch's functions.
FUNCTIONS: dict[str, tuple[Fn, Fn]] = {
    "shard": (constrained, lambda x: x.sin() @ x.t() @ x),
    "scan": (scanned, looped),
    "attention": (sdpa(), sdpa()),
    "causal": (sdpa(is_causal=True, scale=0.3),) * 2,
    "a row without keys": masked(torch.ones(4, 4, dtype=torch.bool).tril(-1)),
    "bias": (biased, biased),
    "grouped heads": (grouped, grouped),
    "merged": merged(False),
    "merged, a row without keys": merged(True),
    "flex attention": (flex, flex_by_hand),
}


def leaves(tree: Any) -> list[Any]:
    flat = torch.utils._pytree.tree_leaves(tree)
    return [x.full_tensor() if isinstance(x, sl.ShardedTensor) else x for x in flat]


def compare(mine: Fn, theirs: Fn, mesh: dict[str, int], x: Tensor = X) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # torch's kernels have no tangents
        want = leaves(theirs(x))
    with sl.Mesh(**mesh):
        torch.testing.assert_close(leaves(sl.jit(mine, in_specs=(ROWS,))(x)), want)


@pytest.mark.long
@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("mesh", [SQUARE, UNEVEN], ids=["2x2", "3"])
def test_derivatives_are_plain_torchs(name: str, derivative: str, mesh: dict[str, int]) -> None:
    if (name, derivative) == ("scan", "jvp of a pullback"):
        pytest.skip("a scan outside of the jvp keeps its own backward pass")
    mine, theirs = FUNCTIONS[name]
    of = DERIVATIVES[derivative]
    compare(of(mine), of(theirs), mesh)


@pytest.mark.parametrize("name", ["shard", "scan", "causal"])
@pytest.mark.parametrize("mesh", [ONE, TWO], ids=["1", "2"])
def test_float32(name: str, mesh: dict[str, int]) -> None:
    mine, theirs = FUNCTIONS[name]
    of = DERIVATIVES["jvp"]
    compare(of(mine), of(theirs), mesh, X.float())


# --- per-device code --------------------------------------------------------------------------------------------------


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:2], x[2:]


def _softmax(x: Tensor) -> Tensor:
    e = (x - sl.pmax(x.detach(), "x")).exp()  # detach() keeps tangents
    return e / sl.psum(e, "x")


# What two devices do with their rows, the specs of argument and result, and the same in plain torch.
BODIES: dict[str, tuple[Fn, str, str, Fn]] = {
    "psum": (lambda x: sl.psum(x.sin(), "x"), ROWS, WHOLE, lambda x: sum(halves(x.sin()))),
    "pmean": (lambda x: sl.pmean(x.sin(), "x"), ROWS, WHOLE, lambda x: sum(halves(x.sin())) / 2),
    "pmax": (lambda x: sl.pmax(x.sin(), "x"), ROWS, WHOLE, lambda x: torch.stack(halves(x.sin())).amax(0)),
    "pmin": (lambda x: sl.pmin(x.sin(), "x"), ROWS, WHOLE, lambda x: torch.stack(halves(x.sin())).amin(0)),
    "a tie": (
        lambda x: sl.pmax(x.sin().clamp(max=0), "x"),
        ROWS,
        WHOLE,
        lambda x: torch.stack(halves(x.sin().clamp(max=0))).amax(0),
    ),
    "softmax": (_softmax, ROWS, ROWS, lambda x: x.unflatten(0, (2, 2)).softmax(0).flatten(0, 1)),
    "all_gather": (
        lambda x: sl.all_gather(x.sin(), "x", dim=1) ** 2,
        ROWS,
        WHOLE,
        lambda x: torch.cat(halves(x.sin()), 1) ** 2,
    ),
    "reduce_scatter": (
        lambda x: sl.reduce_scatter(x.sin(), "x", dim=1) ** 2,
        ROWS,
        "_ _@x",
        lambda x: sum(halves(x.sin())) ** 2,
    ),
    "all_to_all": (lambda x: sl.all_to_all(x.sin(), "x", 1, 0) ** 2, ROWS, "_ _@x", lambda x: x.sin() ** 2),
    "ppermute": (
        lambda x: sl.ppermute(x.sin(), "x", [(0, 1)]) * x,
        ROWS,
        ROWS,
        lambda x: torch.cat([0 * x[:2], x[:2].sin()]) * x,
    ),
    "axis_index": (
        lambda x: x.sin() * (sl.axis_index("x") + 1),
        ROWS,
        ROWS,
        lambda x: torch.cat([x[:2].sin(), 2 * x[2:].sin()]),
    ),
    "whole": (lambda x: x.sin() * sl.psum(x, "x") / 2, WHOLE, WHOLE, lambda x: x.sin() * x),
    "gradient inside": (
        lambda x: sl.grad(lambda x: sl.psum(x.sin().sum(), "x") ** 2)(x),
        ROWS,
        ROWS,
        lambda x: 2 * grad(lambda x: x.sin().sum() ** 2)(x),
    ),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("some", [False, True], ids=["all axes", "axis_names"])
@pytest.mark.parametrize("derivative", ["jvp", "dual level", "hessian", "jacfwd of jacfwd", "grad of jvp"])
@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str, derivative: str, some: bool) -> None:
    body, into, out, theirs = BODIES[name]
    of = DERIVATIVES[derivative]
    mine = sl.shard_map(body, (into,), out, axis_names={"x"} if some else None)
    if name in ("pmax", "pmin", "a tie") and derivative == "hessian":
        with sl.Mesh(**SQUARE), pytest.raises(NoDerivativeError, match="a gradient flows through p"):
            sl.jit(of(mine), in_specs=(ROWS,))(X)
        return
    compare(of(mine), of(theirs), SQUARE)


def test_tangents_of_tangents_of_an_extremum() -> None:
    body, into, out, theirs = BODIES["pmax"]
    of = DERIVATIVES["jacfwd of jacfwd"]
    compare(of(sl.shard_map(body, (into,), out)), of(theirs), TWO)


def test_inside_a_body() -> None:
    body = sl.shard_map(lambda x: jvp(lambda x: sl.psum(x.sin(), "x"), (x,), (x.cos(),))[1], (ROWS,), WHOLE)
    compare(body, lambda x: sum(halves(x.cos() ** 2)), TWO)


# --- what is beside ---------------------------------------------------------------------------------------------------


def test_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(x: Tensor) -> Tensor:
        sl.debug_print("first {:.3f}", x[0, 0])
        return x.sin()

    compare(DERIVATIVES["jacfwd"](printed), jacfwd(torch.sin), TWO)
    assert capsys.readouterr().out == f"first {X[0, 0].item():.3f}\n"


@pytest.mark.parametrize("derivative", ["jvp", "dual level"])
@pytest.mark.parametrize("name", ["mul", "sub", "div", "constant", "inplace"])
def test_numbers_and_constants(name: str, derivative: str) -> None:
    function: Fn = {
        "mul": lambda x: x * torch.inf * 0.5,  # no tangent, which times infinity is none
        "sub": lambda x: 1 - x * 0.5,
        "div": lambda x: 1 / (x + 2),
        "constant": lambda x: x * WS[0, 0, 0] + F.layer_norm(x, (6,), WS[0, 0], WS[0, 1]),
        "inplace": lambda x: x.clone().mul_(2).add_(1),
    }[name]
    compare(DERIVATIVES[derivative](function), DERIVATIVES[derivative](function), TWO)


@pytest.mark.parametrize("gradient", [grad, sl.grad], ids=["torch.func.grad", "sl.grad"])
def test_gradients_under_a_dual_level(gradient: Callable[..., Any]) -> None:
    compare(lambda x: dual(gradient(scalar(F.silu)), x), lambda x: dual(grad(scalar(F.silu)), x), TWO)


def test_no_gradient_but_a_tangent() -> None:
    """A function without a tangent has none."""
    with sl.Mesh(**TWO):
        assert sl.jit(lambda x: dual(lambda x: torch.ones_like(x), x))(X) is None


@pytest.mark.long
@pytest.mark.parametrize("drop", [lambda x: F.dropout(x, 0.5), sdpa(dropout_p=0.5)], ids=["dropout", "attention"])
def test_tangents_drop_what_values_drop(drop: Fn) -> None:
    results = []
    for mesh in (ONE, SQUARE):
        with sl.Mesh(**mesh):
            torch.manual_seed(0)
            alone = sl.jit(drop)(X)
            torch.manual_seed(0)
            value, tangent = sl.jit(lambda x: jvp(drop, (x,), (x.cos(),)), in_specs=(ROWS,))(X)
            torch.manual_seed(0)
            more = sl.jit(lambda x: drop(x + 1e-6 * x.cos()))(X)
        torch.testing.assert_close(value.full_tensor(), alone.full_tensor())
        torch.testing.assert_close(
            tangent.full_tensor(), (more.full_tensor() - value.full_tensor()) / 1e-6, rtol=1e-4, atol=1e-5
        )
        results.append(tangent.full_tensor())
    torch.testing.assert_close(*results)


def test_dropout_of_examples() -> None:
    drop = sdpa(dropout_p=0.5)
    with sl.Mesh(**TWO):
        jacobian = sl.jit(jacfwd(drop, randomness="same"))(X)
        assert jacobian.shape == (4, 6, 4, 6)
        wrong = r"(?s)randomness='different'.*share their random numbers.*randomness=\"same\" in vmap, jacfwd"
        with pytest.raises(ShardingError, match=wrong):
            sl.jit(jacfwd(drop, randomness="different"))(X)


def test_parameters_that_compute_in_less() -> None:
    net = torch.nn.Linear(6, 3)

    def pushed(m: torch.nn.Module, x: Tensor) -> Tensor:
        weights = dict(m.named_parameters())
        along = {name: x.detach().cos() for name, x in weights.items()}
        out: Tensor = jvp(lambda p: functional_call(m, p, (x,)), (weights,), (along,))[1]
        return out

    want = pushed(net, X.float())
    with sl.Mesh(**TWO):
        model = sl.parallelize(net, {"weight": "o _"}, precision=torch.bfloat16)
        tangent = sl.jit(pushed)(model, X.float()).full_tensor()
    assert tangent.dtype == torch.bfloat16
    torch.testing.assert_close(tangent.float(), want, rtol=0.02, atol=0.02)


@pytest.mark.long
def test_check_compares_tangents() -> None:
    with sl.Mesh(**TWO):
        sl.check(lambda x: hessian(lambda x: sdpa()(sl.shard(x, ROWS)).sum())(x), X)
