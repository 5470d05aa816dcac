"""flex_attention: sharded, in jit and outside, as torch's own; other operators that take functions are refused."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention, or_masks

import shardlib as sl
from shardlib.frontend.torch_rewrites.flex_attention import flex_attention as plain_form

B, H, S, E = 2, 4, 10, 6
SLOPES = 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1, 3]])

YES = torch.tensor(True)


def causal(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i >= j, score, -float("inf"))


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - SLOPES[h] * (i - j).abs()


def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2) + (b + 1) * 0.1 * (i * j == 6)


def blinding(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Row 4 sees nothing, by a bias: what it adds is no constant to autograd."""
    return score + torch.where(i == 4, -float("inf"), 0.0)


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 4)


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return DOCUMENTS[b, i] == DOCUMENTS[b, j]


def blind(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Rows 2 and 7 of every second head see nothing."""
    return ((i != 2) & (i != 7)) | (h % 2 == 1)


@dataclass(frozen=True)
class Case:
    score: Callable[..., Tensor] | None = None
    mask: Callable[..., Tensor] | None = None
    heads: int = H  # of keys
    value: int = E  # head size
    relative: bool = False  # a learnt bias of every head and distance, on top
    lse: bool = False
    whole: tuple[int | None, int | None] = (None, None)  # batches and heads of the block mask

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        def with_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + table[h, j - i + S - 1]

        out = flex_attention(
            q,
            k,
            v,
            score_mod=with_bias if self.relative else self.score,
            block_mask=self.blocks(),
            enable_gqa=self.heads != H,
            return_aux=AuxRequest(lse=True) if self.lse else None,
        )
        return (out[0], out[1].lse) if self.lse else (out,)

    def blocks(self) -> Any:
        return None if self.mask is None else create_block_mask(self.mask, *self.whole, S, S, device="cpu")

    def loss(self, *args: Tensor) -> Tensor:
        out, *lse = self(*args)
        weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
        total = (out * weight).sum()
        for x in lse:
            total = total + torch.where(x.isfinite(), x, 0.0).sin().sum()
        return total

    def arguments(self) -> tuple[Tensor, ...]:
        g = torch.Generator().manual_seed(0)
        shapes = ((B, H, S, E), (B, self.heads, S, E), (B, self.heads, S, self.value), (H, 2 * S - 1))
        return tuple(torch.randn(n, generator=g, dtype=torch.float64) for n in shapes)


CASES = {
    "plain": Case(),
    "plain, lse": Case(lse=True),
    "causal": Case(causal),
    "alibi": Case(alibi, lse=True),
    "cap": Case(capped),
    "relative bias": Case(relative=True),
    "window": Case(mask=window),
    "documents": Case(mask=documents, whole=(B, None)),
    "blind rows": Case(mask=blind, whole=(None, H), lse=True),
    "blind rows, alibi": Case(alibi, blind, whole=(None, H), lse=True),
    "blind by a bias": Case(blinding, lse=True),
    "grouped": Case(causal, or_masks(window, documents), heads=2, whole=(B, None)),
    "grouped, no score_mod": Case(mask=window, heads=2),
    "wide values": Case(mask=window, value=3),
}
SHARDINGS = {
    "batch and heads": ({"data": 2, "tensor": 2}, ("b@data h@tensor _ _",) * 3),
    "queries": ({"tensor": 2}, ("_ _ q@tensor _", "_ _ _ _", "_ _ _ _")),
    "sequence, uneven": ({"data": 2, "seq": 4}, ("b@data _ s@seq _",) * 3),
    "keys, heads": ({"seq": 4, "tensor": 2}, ("_ h@tensor _ _", "_ h@tensor t@seq _", "_ h@tensor t@seq _")),
}


@functools.cache
def by_torch(name: str) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Results and gradients of torch's own, on plain tensors."""
    case = CASES[name]
    args = tuple(x.clone().requires_grad_() for x in case.arguments())
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # torch recommends that one compiles it
        patch.setattr(torch_flex, "_validate_device", lambda *_: None)  # its kernel for CPUs has no gradients
        case.loss(*args).backward()
        with torch.no_grad():
            return case(*args), tuple(x.grad for x in args)


def close(found: Any, expected: Any) -> None:
    whole = found.full_tensor() if isinstance(found, sl.ShardedTensor) else found
    torch.testing.assert_close(whole, torch.zeros_like(whole) if expected is None else expected, rtol=1e-6, atol=1e-7)


@pytest.mark.long
@pytest.mark.sampled(37)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", CASES)
def test_jitted_as_torch(name: str, sharding: str) -> None:
    case, (axes, specs) = CASES[name], SHARDINGS[sharding]
    values, gradients = by_torch(name)

    def both(*args: Tensor) -> Any:
        return case(*args), torch.func.grad(case.loss, argnums=(0, 1, 2, 3))(*args)

    with sl.Mesh(**axes):
        found, back = sl.jit(both, in_specs=(*specs, "_ _"))(*case.arguments())
    for x, y in zip((*found, *back), (*values, *gradients), strict=True):
        close(x, y)


@pytest.mark.long
@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CASES)
def test_eager_as_torch(name: str) -> None:
    case, (axes, specs) = CASES[name], SHARDINGS["sequence, uneven"]
    values, gradients = by_torch(name)
    with sl.Mesh(**axes):
        placed = zip(case.arguments(), (*specs, "_ _"), strict=True)
        args = [sl.shard(x, spec).detach().requires_grad_() for x, spec in placed]
        found = case(*args)
        case.loss(*args).backward()
    for x, y in zip((*found, *(x.grad for x in args)), (*values, *gradients), strict=True):
        if x is None:
            assert y is None
        else:
            close(x.detach(), y)


Q, K, V, _ = CASES["plain"].arguments()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "alibi", "window"])
def test_one_device_in_check(name: str, dtype: torch.dtype) -> None:
    """Values and gradients in the precisions that programs have; a table of biases is an argument."""
    args = (x.to(dtype) for x in CASES[name].arguments())
    with sl.Mesh(data=2, tensor=2):
        report = sl.check(CASES[name].loss, *args, in_specs=(*("b@data h@tensor _ _",) * 3, "_ _"), rtol=2e-2)
    assert len(report.leaves) == 6


def test_sequence_is_passed_round() -> None:
    """Without a score_mod, the keys of a cut sequence travel as those of scaled_dot_product_attention do."""
    q, k, v = (torch.randn(1, 1, 4096, 16) for _ in range(3))
    with sl.Mesh(seq=4):
        plan = sl.jit(lambda q, k, v: flex_attention(q, k, v), in_specs="b h s@seq e").plan(q, k, v)
        other = sl.jit(torch.nn.functional.scaled_dot_product_attention, in_specs="b h s@seq e").plan(q, k, v)
    assert [c.kind for c in plan.collectives] == [c.kind for c in other.collectives] != []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mask", "known"),
    [
        (lambda b, h, i, j: i >= j, True),
        (lambda b, h, i, j: j <= i, True),
        (lambda b, h, i, j: torch.ge(i, j), True),
        (lambda b, h, i, j: i > j, False),
        (lambda b, h, i, j: j >= i, False),
        (lambda b, h, i, j: i <= j, False),
        (lambda b, h, i, j: i >= h, False),
        (lambda b, h, i, j: ~(i >= j), False),
        (lambda b, h, i, j: i + 1 >= j, True),
        (lambda b, h, i, j: (i >= j, YES)[1], False),
    ],
)
def test_causal_is_known(mask: Callable[..., Tensor], known: bool) -> None:
    """A mask of places alone that is the causal one is not made, and others are."""
    keys = S - 3
    blocks = create_block_mask(mask, None, None, S, keys, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=blocks).square().sum()

    with sl.Mesh(data=2, seq=2):
        step = sl.jit(attend, in_specs="b@data h s@seq e")
        sl.check(step, Q, K[:, :, :keys], V[:, :, :keys])
        listing = step.plan(Q, K[:, :, :keys], V[:, :, :keys]).listing()
    assert bool(re.search(r"attention\S*\(.*None, None, None, None, True,", listing)) == known  # neither mask nor bias


INF = float("inf")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("score", "known"),
    [
        (lambda s, b, h, i, j: torch.where(i >= j, s, -INF), True),
        (lambda s, b, h, i, j: torch.where(i < j, -INF, s), True),
        (lambda s, b, h, i, j: torch.where(i - j < 4, torch.where(i >= j, s, -INF), -INF), True),
        (lambda s, b, h, i, j: torch.where((i >= j) & (DOCUMENTS[b, i] == DOCUMENTS[b, j]), s, -INF), True),
        (lambda s, b, h, i, j: s, False),
        (lambda s, b, h, i, j: torch.where(i >= j, s, -1e9), False),
        (lambda s, b, h, i, j: torch.where(i >= j, s * 2, -INF), False),
        (lambda s, b, h, i, j: torch.where(i >= j, s, -INF) + 1, False),
        (lambda s, b, h, i, j: (i - j) * 0.1 + s, False),
        (lambda s, b, h, i, j: torch.where(s > 0, s, -INF), False),
        (lambda s, b, h, i, j: s.masked_fill(i < j, -INF), False),
        (lambda s, b, h, i, j: torch.where(i >= j, s, s), False),
        (lambda s, b, h, i, j: -s, False),
        (lambda s, b, h, i, j: torch.where((s != 0) & (i >= j), s, -INF), False),
        (lambda s, b, h, i, j: torch.where((s == 0) | (i < j), -INF, s), False),
        (lambda s, b, h, i, j: torch.where(i >= j, s // 1, -INF), False),
        (lambda s, b, h, i, j: torch.where(i >= j, s, -INF) if not isinstance(s, Tensor) else s * 2, False),
    ],
)
def test_a_score_that_is_only_hidden_is_a_mask(score: Callable[..., Tensor], known: bool) -> None:
    """Such a `score_mod` is attention with a mask, whose sequence may be cut; others are worked out as they are."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=score, block_mask=create_block_mask(window, None, None, S, S, "cpu"))

    with sl.Mesh(data=2, seq=2):
        step = sl.jit(attend, in_specs="b@data h s@seq e")
        sl.check(step, Q, K, V)
        assert ("shardlib.attention" in step.plan(Q, K, V).listing()) == known


def test_memory_as_the_query() -> None:
    """Heads that were split from a row can be viewed as that row again, as on one device."""

    def attend(x: Tensor) -> Tensor:
        q = x.view(B, S, H, E).transpose(1, 2)
        return flex_attention(q, q, q, score_mod=causal).transpose(1, 2).view(B, S, H * E)

    x = torch.randn(B, S, H * E)
    with sl.Mesh(data=2, tensor=2):
        sl.check(attend, x, in_specs="b@data s he@tensor")
        found = attend(sl.shard(x, "b@data s he@tensor"))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.view(B, S, H, E).transpose(1, 2),) * 3, is_causal=True
    )
    torch.testing.assert_close(whole(found), expected.transpose(1, 2).reshape(B, S, H * E))


@pytest.mark.long
def test_block_mask_made_inside() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=create_block_mask(window, None, None, S, S, device="cpu"))

    with sl.Mesh(data=2, seq=4):
        found = sl.jit(attend, in_specs="b@data h s@seq e")(Q, K, V)
    close(found, by_torch("window")[0][0])


@pytest.mark.long
def test_compiled_inside() -> None:
    """torch.compile(flex_attention), as models have it, is flex_attention."""
    compiled = torch.compile(flex_attention, backend="eager")
    with sl.Mesh(data=2, seq=4):
        found = sl.jit(lambda q, k, v: compiled(q, k, v, score_mod=causal), in_specs="b@data h s@seq e")(Q, K, V)
    close(found, by_torch("causal")[0][0])


def test_numbers_among_the_places() -> None:
    table = torch.randn(3, H, S, dtype=torch.float64)

    def attend(q: Tensor, table: Tensor) -> Tensor:
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[1, h, j] + table[2][h][i] * j)

    with sl.Mesh(data=2, tensor=2):
        found = sl.jit(attend, in_specs=("b@data h@tensor _ _", None))(Q, table)
        eager = attend(sl.shard(Q, "b@data h@tensor _ _"), table)
    expected = plain(Q, table[1][:, None, :] + table[2][:, :, None] * torch.arange(S))
    close(found, expected)
    close(eager, expected)


@pytest.mark.long
def test_mapped() -> None:
    """Under vmap, too, which torch's operator does not know."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.vmap(lambda q, k, v: flex_attention(q[None], k[None], v[None], score_mod=alibi)[0])(q, k, v)

    with sl.Mesh(data=2, tensor=2):
        sl.check(attend, Q, K, V, in_specs="b@data h@tensor _ _")
        close(sl.jit(attend, in_specs="b@data h@tensor _ _")(Q, K, V), by_torch("alibi")[0][0])


@pytest.mark.parametrize("transform", ["grad", "vmap", "inference"])
def test_eager_under(transform: str) -> None:
    """torch.func outside jit, for which torch's operator has no rules."""

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + h * j

    def attend(q: Tensor) -> Tensor:
        return flex_attention(q, q, q, score_mod=biased)

    bias = torch.arange(H)[:, None, None] * torch.arange(S)
    with sl.Mesh(data=2, tensor=2):
        x = sl.shard(Q, "b@data h@tensor _ _")
        if transform == "grad":
            found = torch.func.grad(lambda q: attend(q).square().sum())(x)
            expected = torch.func.grad(lambda q: plain(q, bias).square().sum())(Q)
        elif transform == "vmap":
            found, expected = torch.vmap(lambda q: attend(q[None])[0])(x), plain(Q, bias)
        else:
            with torch.inference_mode():
                found, expected = flex_attention(x, x, x), plain(Q, 0 * bias)
    close(found, expected)


def plain(q: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ q.transpose(-2, -1) / E**0.5 + bias, -1) @ q


def test_autocast() -> None:
    """q, k and v are rounded; scores are not, but for what torch's kernel does: on some CPUs it is 5e-5 off."""

    def attend(q: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(q, q, q, score_mod=causal, return_aux=AuxRequest(lse=True))

    with sl.Mesh(data=2, tensor=2):
        out, aux = sl.jit(attend, in_specs="b@data h@tensor _ _")(Q.float())
    rounded = Q.bfloat16().float()
    scores = rounded @ rounded.transpose(-2, -1) / E**0.5
    scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
    assert (out.dtype, aux.lse.dtype) == (torch.bfloat16, torch.float32)
    low = Q.bfloat16()
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(low, low, low, 0.0, True)
    close(aux.lse, kernel[1])
    assert torch.equal(out.full_tensor(), kernel[0])
    torch.testing.assert_close(aux.lse.full_tensor(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_plain_calls_stay_torchs() -> None:
    """Beside sharded ones, in the same process: through dynamo, without gradients on the CPU."""
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(Q.clone().requires_grad_(), K, V)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = flex_attention(Q, K, V, score_mod=causal)
    with sl.global_random():
        close(flex_attention(Q, K, V, score_mod=causal), expected)
    assert not torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG


def test_the_switch_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    places = []

    def noted(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        places.append(torch._C._functorch.is_batchedtensor(i))  # real places, not those of dynamo
        return causal(score, b, h, i, j)

    close(flex_attention(Q, K, V, score_mod=noted), by_torch("causal")[0][0])
    assert places == [True]
    with sl.Mesh(data=2):
        close(sl.jit(flex_attention, in_specs="b@data h s e")(Q, K, V), by_torch("plain")[0][0])


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["alibi", "blind rows, alibi", "grouped", "relative bias"])
def test_plain_form_as_torch(name: str) -> None:
    """The form that a run on one device has, without any mesh."""
    values, gradients = by_torch(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        patch.setattr(torch_flex, "_validate_device", lambda *_: None)
        patch.setattr(torch_flex, "flex_attention_hop", functools.partial(plain_form, fused=False))
        args = tuple(x.clone().requires_grad_() for x in CASES[name].arguments())
        found = CASES[name](*args)
        CASES[name].loss(*args).backward()
    for x, y in zip((*found, *(x.grad for x in args)), (*values, *gradients), strict=True):
        if x is None:
            assert y is None
        else:
            close(x.detach(), y)


# --- refusals ---------------------------------------------------------------------------------------------------------


def conditional(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def repeated(x: Tensor) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.zeros((), dtype=torch.int64), x))


def scanned(x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, y: (c + y, c * y), torch.zeros(4), x)


@pytest.mark.parametrize(("fn", "name"), [(conditional, "cond"), (repeated, "while_loop"), (scanned, "scan")])
def test_other_operators_on_functions(fn: Callable[[Tensor], Any], name: str) -> None:
    with (
        sl.Mesh(data=2),
        pytest.raises(
            sl.ShardingError,
            match=rf"the traced function calls torch.ops.higher_order.{name}:\n  \* .*test_flex_attention.py:\d+ in "
            rf"{fn.__name__}: return .*\nRule: .*no sharding rule\n.*torch.where for cond",
        ),
    ):
        sl.jit(fn, in_specs="b@data _")(torch.ones(6, 4))


def test_autograd_functions_are_no_such_operators() -> None:
    """What torch.func makes an operator of, and calls at once, stays."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0].cos()

    with sl.Mesh(data=2):
        found = sl.jit(sl.grad(lambda x: Sine.apply(x).sum()), in_specs="b@data _")(torch.ones(6, 4))
    close(found, torch.ones(6, 4).cos())
