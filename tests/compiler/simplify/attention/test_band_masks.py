"""Masks that are bands, keys that are repeated: known for what they are, by brute force, and the same attention."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib.compiler.simplify import normalize
from shardlib.compiler.simplify.attention import band_masks
from shardlib.compiler.simplify.constants.evaluate import Constants
from shardlib.compiler.simplify.redundant_nodes import drop_dead_nodes
from shardlib.core.aten.schemas import get_arguments
from shardlib.frontend.trace import trace
from shardlib.ops.attention.op import OPS
from tests.compiler.simplify.constants.test_evaluate import compute_values, rows

S, T = 6, 9
INF = float("inf")
Mask = Callable[[int, int], Tensor]


def _packed(s: int, t: int) -> Tensor:
    """As models look for sequences that are packed into one."""
    places = torch.arange(max(s, t))[None].expand(2, -1)
    which = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    b = torch.arange(2)[:, None, None, None]
    q, k = torch.arange(s)[None, None, :, None], torch.arange(t)[None, None, None, :]
    same = which[b, q] == which[b, k]
    return q.new_ones((), dtype=torch.bool) & (places[b, k] <= places[b, q]) & same


# A mask -> causal, window, offset of the queries less that of the keys; None where it stays a mask.
MASKS: dict[str, tuple[Mask, tuple[bool, int, int] | None]] = {
    "all": (lambda s, t: torch.ones(s, t, dtype=torch.bool), (False, 0, 0)),
    "no bias": (lambda s, t: torch.zeros(s, t), (False, 0, 0)),
    "compared": (lambda s, t: torch.arange(t) <= rows(s), (True, 0, 0)),
    "compared the other way": (lambda s, t: rows(s) >= torch.arange(t), (True, 0, 0)),
    "before": (lambda s, t: torch.arange(t) - 1 < rows(s), (True, 0, 0)),
    "of differences": (lambda s, t: (rows(s) - torch.arange(t)) >= 0, (True, 0, 0)),
    "triangle": (lambda s, t: torch.ones(s, t, dtype=torch.bool).tril(), (True, 0, 0)),
    "not a triangle": (lambda s, t: ~torch.ones(s, t, dtype=torch.bool).triu(1), (True, 0, 0)),
    "ones as bool": (lambda s, t: torch.tril(torch.ones(s, t)).bool(), (True, 0, 0)),
    "compared to 0": (lambda s, t: torch.tril(torch.ones(s, t)) != 0, (True, 0, 0)),
    "to the last": (lambda s, t: torch.ones(s, t, dtype=torch.bool).tril(t - s), (True, 0, T - S)),
    "behind a cache": (lambda s, t: torch.arange(t) <= torch.arange(t - s, t)[:, None], (True, 0, T - S)),
    "part of a larger one": (lambda s, t: torch.ones(20, 20, dtype=torch.bool).tril()[t - s : t, :t], (True, 0, T - S)),
    "window": (lambda s, t: (torch.arange(t) <= rows(s)) & (torch.arange(t) > rows(s) - 3), (True, 3, 0)),
    "window on both sides": (lambda s, t: (rows(s) - torch.arange(t)).abs() < 4, (False, 4, 0)),
    "band": (lambda s, t: torch.ones(s, t, dtype=torch.bool).tril(2).triu(-1), (True, 4, 2)),
    "-inf": (lambda s, t: torch.full((s, t), -INF).triu(1), (True, 0, 0)),
    "-inf filled in": (lambda s, t: torch.zeros(s, t).masked_fill(torch.arange(t) > rows(s), -INF), (True, 0, 0)),
    "least": (lambda s, t: torch.where(torch.arange(t) <= rows(s), 0.0, torch.finfo(torch.float32).min), (True, 0, 0)),
    "with dims": (lambda s, t: (torch.arange(t) <= rows(s))[None, None].expand(2, 1, s, t), (True, 0, 0)),
    "packed": (_packed, (True, 0, 0)),
    "turned": (lambda s, t: (torch.triu(torch.ones(t, s)) == 1).transpose(0, 1), (True, 0, 0)),
    "int32": (lambda s, t: torch.arange(t, dtype=torch.int32) <= rows(s).int(), (True, 0, 0)),
    "float": (lambda s, t: torch.arange(t, dtype=torch.float32) <= rows(s), (True, 0, 0)),
    "literal": (lambda s, t: torch.where(torch.arange(t) > rows(s), torch.tensor(-INF), 0.0), (True, 0, 0)),
    "row beside": (lambda s, t: torch.ones(s, t, dtype=torch.bool).tril() | (torch.arange(t) < 0), (True, 0, 0)),
    "twice": (lambda s, t: (torch.arange(t) <= rows(s)) & (torch.arange(t) < rows(s) + 3), (True, 0, 0)),
    "turned by nothing": (lambda s, t: torch.ones(s, t, dtype=torch.bool).tril().permute(0, 1), (True, 0, 0)),
    "ahead, turned by nothing": (lambda s, t: torch.ones(s, t, dtype=torch.bool).triu().transpose(1, -1), None),
    "fractions": (lambda s, t: (torch.arange(0.3, s)[:, None] - torch.arange(t).float()) >= 0.3, None),
    "signs of 0": (lambda s, t: ~torch.signbit(torch.where(torch.arange(t) > rows(s), -0.0, 0.0)), (True, 0, 0)),
    "not a number": (lambda s, t: rows(s) >= torch.arange(t) * torch.full((t,), float("nan")), None),
    "neither ahead nor far": (
        lambda s, t: ~((torch.arange(t) > rows(s)) | (torch.arange(t) <= rows(s) - 3)),
        (True, 3, 0),
    ),
    "chosen": (lambda s, t: torch.where(torch.arange(t) > rows(s), False, torch.ones(s, 1).bool()), (True, 0, 0)),
    "filled": (lambda s, t: torch.ones(s, t).bool().masked_fill(torch.arange(t) > rows(s), False), (True, 0, 0)),
    "turned round": (lambda s, t: torch.ones(s, t, dtype=torch.bool).triu().flip(0, 1), (True, 0, T - S)),
    "beside a cache": (
        lambda s, t: torch.cat([torch.ones(s, t - s), torch.ones(s, s).tril()], 1).bool(),
        (True, 0, T - S),
    ),
    "padded": (lambda s, t: F.pad(torch.ones(s, s).tril(), (t - s, 0), value=1).bool(), (True, 0, T - S)),
    "some more than -inf": (lambda s, t: torch.full((s, t), -9.0).triu(1), None),
    "ahead": (lambda s, t: torch.arange(t) >= rows(s) - 1, None),
    "not in one piece": (lambda s, t: (rows(s) - torch.arange(t)) % 2 == 0, None),
    "prefix": (lambda s, t: (torch.arange(t) <= rows(s)) | (torch.arange(t) < 2), None),
    "by key": (lambda s, t: (torch.arange(t) % 3 != 1).expand(s, t), None),
    "one that sees nothing": (lambda s, t: torch.arange(t) < rows(s), None),
    "slopes": (lambda s, t: -(rows(s) - torch.arange(t)).abs().float(), None),
}


def _attend(mask: Mask) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = mask(q.shape[2], k.shape[2])
        if keep.is_floating_point():
            keep = keep.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep).square().sum()

    return attend


def _qkv(heads: int = 4, kv: int = 4, s: int = S, t: int = T, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, h, n, 8, dtype=dtype) for h, n in ((heads, s), (kv, t), (kv, t))]


def _said(fn: Callable[..., Any], *args: Tensor) -> list[dict[str, Any]]:
    """What the attention ops of a function are told."""
    nodes = normalize(trace(fn, args)).graph.graph.nodes
    return [get_arguments(n) for n in nodes if n.target in OPS]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_known(name: str) -> None:
    mask, known = MASKS[name]
    (how,) = _said(_attend(mask), *_qkv(dtype=torch.float32))
    if known is None:
        assert (how["mask"] is None) != (how["bias"] is None)
        assert (how["causal"], how["window"], how["q_offset"], how["k_offset"]) == (False, 0, 0, 0)
    else:
        assert how["mask"] is how["bias"] is None
        assert (how["causal"], how["window"], how["q_offset"] - how["k_offset"]) == known


@pytest.mark.parametrize(("axes", "spec"), [({"data": 2}, "b@data h s e"), ({"seq": 3}, "b h s@seq e")])
@pytest.mark.parametrize("name", MASKS)
def test_attention_is_the_same(name: str, axes: dict[str, int], spec: str) -> None:
    """Values and gradients, with other sizes of the same kinds too."""
    mask, _ = MASKS[name]
    if name in ("one that sees nothing", "not a number"):  # torch's kernel gives NaN there
        return
    for s, t in ((S, T), (6, 6), (3, 9)):
        with sl.Mesh(**axes):
            sl.check(sl.jit(_attend(mask), in_specs=(spec, None, None)), *_qkv(s=s, t=t))


def test_what_else_hides_keys_stays_a_mask_of_these() -> None:
    """A mask of a batch's keys beside a causal one is no square of them."""

    def attend(q: Tensor, k: Tensor, v: Tensor, there: Tensor) -> Tensor:
        keep = (torch.arange(T) <= rows(S) + T - S) & there[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep.expand(2, 1, S, T)).square().sum()

    there = torch.ones(2, T, dtype=torch.bool)
    there[0, -2:] = False
    (how,) = _said(attend, *_qkv(), there)
    assert tuple(how["mask"].meta["val"].shape) == (2, 1, 1, T)
    assert (how["causal"], how["q_offset"]) == (True, T - S)
    with sl.Mesh(data=2, seq=3):
        sl.check(sl.jit(attend, in_specs=("b@data h s@seq e", None, None, None)), *_qkv(), there)


@pytest.mark.parametrize(("least", "known"), [(-INF, True), (torch.finfo(torch.float64).min, False)])
def test_a_bias_beside_something_that_hides(least: float, known: bool) -> None:
    """What a mask leaves of a row may be hidden by the least number alone: then that is what is seen."""

    def attend(q: Tensor, k: Tensor, v: Tensor, there: Tensor) -> Any:
        bias = torch.full((S, S), least, dtype=q.dtype).triu(1)
        o, _ = torch.ops.shardlib.attention(q, k, v, there, bias, None, None, False, 1.0, 0, 0.0)
        return o

    (how,) = _said(attend, *_qkv(t=S), torch.ones(S, S, dtype=torch.bool))
    assert how["mask"] is not None
    assert (how["bias"] is None, how["causal"]) == (known, known)


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # causal, a bias -> what attention adds
    "one": lambda c, b: b + c,
    "one of another dtype": lambda c, b: c + b.bfloat16(),
    "numbers that run over": lambda c, b: c + (b * 40).to(torch.uint8) + (b * 40).to(torch.uint8),
    "two": lambda c, b: (b + c) + b / 3,
    "three, the first of which is added last": lambda c, b: b.sin() + c + ((b + 1e16).neg() + (b + 1e16)),
    "twice": lambda c, b: b + c + c,
    "rows and columns": lambda c, b: (b[:1] + c) + b[:, :1],
}


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_sums_add_up_as_torch_adds(name: str, learned: bool) -> None:
    """To the last bit, whatever is taken out of them."""

    def attend(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        bias = SUMS[name](torch.full((S, S), -INF, dtype=q.dtype).triu(1), b)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    b = (torch.rand(S, S, dtype=torch.float64) * 4).requires_grad_(learned)
    args = _qkv(t=S)
    want = attend(*args, b)
    with sl.Mesh(data=2):
        found = sl.jit(attend, in_specs=("b@data h s e", None, None, None))(*args, b)
        torch.testing.assert_close(found.full_tensor(), want, rtol=1e-12, atol=1e-13)
        if learned and want.requires_grad:
            grads = [torch.autograd.grad(x.square().sum(), b)[0] for x in (found, want)]
            torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("s", [S, T])
def test_dropout_draws_as_before(s: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.arange(T) <= torch.arange(T - s, T)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=0.5)

    (how,) = _said(attend, *_qkv(s=s))
    assert (how["mask"] is None) == (s == T)
    assert how["q_offset"] == how["k_offset"] == 0


@pytest.mark.parametrize(
    "mask",
    [
        lambda w: rows(S) - torch.arange(T) < w,
        lambda w: torch.full((S, T), w).triu(1) < 3,
        lambda w: torch.where(torch.arange(T) <= rows(S), 0.0, -2.0 * w),
    ],
)
def test_a_number_of_the_call_is_not_known(mask: Callable[[Any], Tensor]) -> None:
    """It is another one in the next call, by the same program."""

    def attend(q: Tensor, k: Tensor, v: Tensor, w: Any) -> Tensor:
        keep = mask(w)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep if keep.dtype == torch.bool else keep.to(q))

    with sl.Mesh(data=2):
        step = sl.jit(attend, in_specs=("b@data h s e", None, None, None))
        for w in (3, 5, 2):
            found = step(*_qkv(), w)
            torch.testing.assert_close(found.full_tensor(), attend(*_qkv(), w), rtol=1e-12, atol=1e-12)
        assert step.retraces == []


PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # causal, and which keys are there -> a mask of both
    "and": lambda c, there: c & there[:, None, None],
    "with dims behind": lambda c, there: (c[None] & there[:, None])[:, None],
    "viewed": lambda c, there: (c & there[:, None]).view(2, 1, S, T),
    "expanded": lambda c, there: (c & there[:, None, None]).expand(2, 4, S, T).clone(),
    "product": lambda c, there: c * there[:, None, None],
    "sliced": lambda c, there: (c & there[:, None, None].expand(2, 4, 1, T))[:, :1],
    "dims made one": lambda c, there: (c & there[:, None].expand(2, 4, T).reshape(8, 1, T)).view(2, 4, S, T),
    "some of a batch": lambda c, there: (c & torch.cat([there, there])[:, None, None])[1:3],
    "neither is hidden": lambda c, there: ~(~c | ~there[:, None, None]),
    "neither is hidden, in words": lambda c, there: (c.logical_not().logical_or(~there[:, None, None])).logical_not(),
    "none of a sum": lambda c, there: ~(~c + ~there[:, None, None]),
    "none of three": lambda c, there: ~(~c | (~there[:, None, None] | (torch.arange(T) > rows(S) + 3))),
    "chosen": lambda c, there: torch.where(there[:, None, None], c, False),
    "chosen the other way": lambda c, there: torch.where(~there[:, None, None], torch.zeros((), dtype=torch.bool), c),
    "not chosen": lambda c, there: ~torch.where(there[:, None, None], ~c, True),
    "filled": lambda c, there: c.expand(2, 1, S, T).masked_fill(~there[:, None, None], False),
    "not filled": lambda c, there: ~(~c).expand(2, 1, S, T).masked_fill(~there[:, None, None], True),
    "the least of both": lambda c, there: torch.minimum(c, there[:, None, None]),
    "viewed, none of it": lambda c, there: ~(~c | ~there[:, None]).view(2, 1, S, T),
}


BIASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # and a bias -> one with -inf
    "chosen": lambda c, there, b: torch.where(c & there[:, None, None], 0.0, -INF),
    "chosen, cast": lambda c, there, b: torch.where(~(c & there[:, None, None]), -INF, 0.0).to(b.dtype),
    "filled": lambda c, there, b: torch.zeros(2, 1, S, T).masked_fill(~c | ~there[:, None, None], -INF),
    "filled twice": lambda c, there, b: (
        torch.zeros(S, T).masked_fill(~c, -INF).masked_fill(~there[:, None, None], -INF)
    ),
    "filled where it is seen": lambda c, there, b: torch.full((2, 1, S, T), -INF).masked_fill(
        c & there[:, None, None], 0
    ),
    "a bias, chosen": lambda c, there, b: torch.where(c & there[:, None, None], b, -INF),
    "a bias, filled": lambda c, there, b: b.masked_fill(~c, -INF).masked_fill(~there[:, None, None], -INF),
    "a sum": lambda c, there, b: torch.where(there[:, None, None], b, -INF) + torch.where(c, 0.0, -INF).to(b.dtype),
    "a bias, viewed": lambda c, there, b: torch.where(c & there[:, None], b, -INF).view(2, 1, S, T),
    "viewed, and nothing else": lambda c, there, b: torch.where(c & there[:, None], 0.0, -INF).view(2, 1, S, T),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_mask_is_taken_apart(name: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, there: Tensor) -> Tensor:
        keep = PARTS[name](torch.arange(T) <= rows(S), there)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep).square().sum()

    there = torch.ones(2, T, dtype=torch.bool)
    there[0, 3:5] = False
    (how,) = _said(attend, *_qkv(), there)
    assert how["causal"]
    assert how["mask"].meta["val"].shape[-2] == 1
    with sl.Mesh(data=2, tensor=2):
        sl.check(sl.jit(attend, in_specs=("b@data h@tensor s e", None, None, None)), *_qkv(), there)


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_taken_apart(name: str) -> None:
    """What is -inf by it is a mask, of keys and of places."""

    def attend(q: Tensor, k: Tensor, v: Tensor, there: Tensor, b: Tensor) -> Tensor:
        bias = BIASES[name](torch.arange(T) <= rows(S), there, b).to(b.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).square().sum()

    there, b = torch.ones(2, T, dtype=torch.bool), torch.randn(S, T, dtype=torch.float64)
    there[0, 3:5] = False
    (how,) = _said(attend, *_qkv(), there, b)
    assert how["causal"]
    assert how["mask"].meta["val"].shape[-2] == 1
    assert (how["bias"] is None) == ("a bias" not in name and name != "a sum")
    with sl.Mesh(data=2, tensor=2):
        sl.check(sl.jit(attend, in_specs=("b@data h@tensor s e", *[None] * 4)), *_qkv(), there, b)


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_a_sum_that_is_known_to_be_undefined_stays(value: float) -> None:
    """torch makes NaN of NaN, or inf, and -inf, though a band hides the place."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = torch.full((S, S), -INF, dtype=q.dtype).triu(1) + torch.where(torch.arange(S) == S - 1, value, 0.5).to(
            q.dtype
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    (how,) = _said(attend, *_qkv(t=S))
    assert how["causal"] == (value == -INF)
    with sl.Mesh(data=2):
        found = sl.jit(attend, in_specs=("b@data h s e", None, None))(*_qkv(t=S)).full_tensor()
    torch.testing.assert_close(found, attend(*_qkv(t=S)), equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("keep", [True, False])
def test_a_causal_transformer_with_padding(keep: bool) -> None:
    """torch adds up what hides keys: a square of -inf, and a row of it for each sequence."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()

    def loss(model: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
        mask = torch.ones(S, S, dtype=torch.bool).triu(1) if keep else torch.full((S, S), -INF, dtype=x.dtype).triu(1)
        return model(x, mask=mask, src_key_padding_mask=hidden if keep else None).square().mean()

    x, hidden = torch.randn(4, S, 8, dtype=torch.float64), torch.zeros(4, S, dtype=torch.bool)
    hidden[:2, -2:] = True
    with sl.Mesh(data=2):
        step = sl.jit(loss, in_specs=(None, "b@data s d", "b@data s"))
        sl.check(step, model, x, hidden)
        plan = step.plan(model, x, hidden)
    listing = plan.listing()
    assert len(re.findall(r"shardlib\.attention\S*\(.*None, None, True, 0\.5", listing)) == 4
    assert f"2, {S}, {S}]" not in listing


@pytest.mark.long
def test_flex_takes_documents_apart() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    which = torch.tensor([0, 0, 1, 1, 1, 2])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = create_block_mask(lambda b, h, i, j: (i >= j) & (which[i] == which[j]), None, None, S, S, device="cpu")
        found: Any = flex_attention(q, k, v, block_mask=blocks)
        return found.square().sum()

    (how,) = _said(attend, *_qkv(t=S))
    assert how["causal"]
    assert how["mask"].meta["val"].shape[-2:] == (S, S)
    with sl.Mesh(data=2):
        sl.check(sl.jit(attend, in_specs=("b@data h s e", None, None)), *_qkv(t=S))


LARGE: dict[str, tuple[Mask, tuple[bool, int]]] = {  # causal, window
    "triangle and window": (
        lambda s, t: torch.ones(s, t, dtype=torch.bool).tril() & (rows(s) - torch.arange(t) < 4096),
        (True, 4096),
    ),
    "neither ahead nor far": (
        lambda s, t: ~((torch.arange(t) > rows(s)) | (rows(s) - torch.arange(t) >= 4096)),
        (True, 4096),
    ),
    "chosen": (
        lambda s, t: torch.where(torch.arange(t) > rows(s), False, torch.ones(s, t, dtype=torch.bool)),
        (True, 0),
    ),
    "filled": (
        lambda s, t: torch.ones(s, t, dtype=torch.bool).masked_fill(torch.arange(t) > rows(s), False),
        (True, 0),
    ),
    "turned round": (lambda s, t: torch.ones(s, t, dtype=torch.bool).triu().flip(0, 1), (True, 0)),
    "turned once, and again": (lambda s, t: torch.ones(s, t, dtype=torch.bool).triu().fliplr().flipud(), (True, 0)),
    "beside": (
        lambda s, t: torch.cat([torch.ones(s, 8).tril(), torch.ones(s, t).tril(-8)], 1).bool()[:, :t],
        (True, 0),
    ),
    "below": (
        lambda s, t: torch.cat([torch.ones(8, t).tril(), torch.ones(s - 8, t).tril(8)]).bool(),
        (True, 0),
    ),
    "padded": (lambda s, t: ~F.pad(torch.ones(s - 1, t - 1, dtype=torch.bool).triu(), (1, 0, 0, 1)), (True, 0)),
    "padded with 0": (lambda s, t: F.pad(torch.full((s - 1, t - 1), -INF).triu(), (1, 0, 0, 1)), (True, 0)),
}


@pytest.mark.parametrize("name", LARGE)
def test_no_square_is_made(name: str) -> None:
    """A causal mask of 128k places, and a window, are known by lines of numbers."""
    n, (mask, known) = 1 << 17, LARGE[name]

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask(n, n))

    (how,) = _said(attend, torch.empty(1, 1, n, 8, device="meta"))
    assert (how["mask"], how["bias"], how["causal"], how["window"]) == (None, None, *known)


# --- masks and biases of several parts -------------------------------------------------------------------------------


def _hiding(rng: random.Random, s: int, t: int) -> Callable[..., Tensor]:
    """A mask, or a bias, of what is known, keys that are there, pairs, and numbers."""

    def mask(there: Tensor, pairs: Tensor, depth: int) -> Tensor:
        kind = rng.randrange(9) if depth else rng.randrange(3)
        if kind == 0:
            return rng.choice([there, there[None, :], pairs, pairs[:, :1], there.expand(2, 1, s, t)])
        if kind < 3:
            q, k = rows(s), torch.arange(t)
            return rng.choice(
                [k <= q + rng.randint(0, 2), q - k < rng.randint(1, 4), k > q, q - k >= rng.randint(0, 3)]
            )
        x, y = (mask(there, pairs, depth - 1) for _ in range(2))
        if kind == 3:
            return ~x
        if kind < 7:
            joins = [torch.bitwise_and, torch.logical_or, torch.mul, torch.add, torch.minimum, torch.maximum]
            return rng.choice(joins)(x, y)
        if kind == 7:
            z = rng.choice([True, False, torch.full((1, 1), rng.random() < 0.5), mask(there, pairs, 0)])
            return torch.where(x, *rng.sample([y, z], 2))
        shape = torch.broadcast_shapes(x.shape, y.shape)
        return x.expand(shape).masked_fill(y, rng.random() < 0.5)

    def bias(there: Tensor, pairs: Tensor, b: Tensor, depth: int) -> Tensor:
        kind, keep = rng.randrange(4) if depth else rng.randrange(2), mask(there, pairs, 2).expand(2, 1, s, t)
        if kind == 0:
            return rng.choice([b, b[:1], torch.zeros(s, t, dtype=b.dtype), b * 2])
        if kind == 1:
            return torch.where(keep, *rng.sample([0.0, -INF], 2)).to(b.dtype)
        x = bias(there, pairs, b, depth - 1)
        if kind == 2:
            return x + bias(there, pairs, b, depth - 1)
        ways = [
            lambda: torch.where(keep, *rng.sample([x, -INF], 2)),
            lambda: x.expand(keep.shape).masked_fill(keep, -INF),
        ]
        return rng.choice(ways)()

    return lambda there, pairs, b: bias(there, pairs, b, 2) if rng.random() < 0.5 else mask(there, pairs, 4)


@pytest.mark.parametrize("seed", range(120))
def test_what_is_taken_apart_comes_to_the_same(seed: int) -> None:
    """The band, the mask and the bias that attention gets come to the numbers that it was to add."""
    s, t = random.Random(seed).choice([(5, 5), (4, 7), (7, 4)])
    torch.manual_seed(seed)
    args = torch.rand(t) < 0.7, torch.rand(s, t) < 0.8, torch.randn(s, t, dtype=torch.float64)
    gm = trace(lambda *x: _hiding(random.Random(seed), s, t)(*x), args).graph
    (node,) = gm.graph.output_node().all_input_nodes
    value = compute_values(gm, *args)[node]
    is_mask = value.dtype == torch.bool
    arguments = band_masks._replace_mask(
        gm, Constants(gm), *((node, None) if is_mask else (None, node)), s, t, drops=False
    )
    if arguments is None:
        return
    left = [x for x in (arguments["mask"], arguments["bias"]) if x is not None]
    gm.graph.output_node().args = (left,)
    drop_dead_nodes(gm)
    gm.recompile()
    values = compute_values(gm, *args)
    apart = torch.arange(s)[:, None] + arguments["q_offset"] - arguments["k_offset"] - torch.arange(t)
    seen = (apart >= 0) | (not arguments["causal"])
    seen = seen & ((apart.abs() < arguments["window"]) | (arguments["window"] == 0))
    if arguments["mask"] is not None:
        seen = seen & values[arguments["mask"]]
    bias = torch.zeros(s, t, dtype=args[2].dtype) if arguments["bias"] is None else values[arguments["bias"]]
    want = torch.where(value, 0.0, -INF) if is_mask else value
    found = torch.where(seen, bias, -INF)
    shape = torch.broadcast_shapes(found.shape, want.shape)
    torch.testing.assert_close(found.expand(shape), want.to(found.dtype).expand(shape), rtol=0, atol=0)


# --- heads that share keys --------------------------------------------------------------------------------------------


def _repeat(x: Tensor, n: int) -> Tensor:
    b, kv, t, e = x.shape
    return x[:, :, None].expand(b, kv, n, t, e).reshape(b, kv * n, t, e)


WAYS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "reshaped": _repeat,
    "unsqueezed": lambda x, n: x.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2),
    "expanded": lambda x, n: x.expand(-1, n, -1, -1) if x.shape[1] == 1 else _repeat(x, n),
}


@pytest.mark.parametrize("axes", [{"data": 2}, {"tensor": 4}, {"tensor": 2}, {"seq": 3}])
@pytest.mark.parametrize(("way", "kv"), list(itertools.product(WAYS, (1, 2))))
def test_keys_are_read_once(way: str, kv: int, axes: dict[str, int]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (WAYS[way](x, 4 // kv) for x in (k, v))
        return (
            F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, T, dtype=torch.bool).tril()).square().sum()
        )

    def gradients(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.func.grad(attend, (0, 1, 2))(q, k, v)

    args = _qkv(kv=kv)
    for how in _said(gradients, *args):
        assert how["k"].meta["val"].shape[1] == how["v"].meta["val"].shape[1] == kv
    spec = {"data": "b@data h s e", "tensor": "b h@tensor s e", "seq": "b h s@seq e"}[next(iter(axes))]
    with sl.Mesh(**axes):
        sl.check(sl.jit(attend, in_specs=(spec, None, None)), *args)


@pytest.mark.parametrize("axes", [{"tensor": 4}, {"seq": 3}, {"data": 2, "seq": 3}])
def test_repeated_keys_cost_what_shared_ones_cost(axes: dict[str, int]) -> None:
    """Messages, memory and arithmetic are those of a call that says which heads share keys, and what is causal."""

    def said(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).square().sum()

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.arange(S) <= rows(S)
        return F.scaled_dot_product_attention(q, _repeat(k, 2), _repeat(v, 2), attn_mask=keep).square().sum()

    args, at = _qkv(kv=2, t=S), {"tensor": "b h@tensor s e", "seq": "b h s@seq e"}[list(axes)[-1]]
    found = []
    with sl.Mesh(**axes):
        for fn in (said, repeated):
            step = sl.jit(lambda *x, fn=fn: torch.func.grad(fn, (0, 1, 2))(*x), in_specs=(at, None, None))
            plan = step.plan(*args)
            found.append(([(c.kind, c.bytes) for c in plan.collectives], plan.peak_memory, plan.flops))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "read",
    [lambda q, k, v: (k.sum(), v), lambda q, k, v: (k, v[:, :1].expand(-1, 4, -1, -1)), lambda q, k, v: (k * 2, v)],
)
def test_keys_that_somebody_else_reads(read: Callable[..., Any]) -> None:
    """Gradients of repeated keys that are more than a sum, and keys that are repeated otherwise than values."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = _repeat(k, 2), _repeat(v, 2)
        one, other = read(q, k, v)
        if one.dim():
            k, v = one, other
        return F.scaled_dot_product_attention(q, k, v).square().sum() + one.sin().sum()

    with sl.Mesh(data=2):
        sl.check(sl.jit(attend, in_specs=("b@data h s e", None, None)), *_qkv(kv=2))


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("padded", [False, True])
def test_a_language_model_makes_no_mask(padded: bool) -> None:
    """In training, without a cache, transformers makes a mask wherever it may not look at positions."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MistralConfig(num_hidden_layers=2, vocab_size=64, use_cache=False, sliding_window=4, **sizes)
    model, ids = transformers.MistralForCausalLM(config).double(), torch.arange(16).view(2, 8)
    mask = torch.ones_like(ids) if padded else None

    def loss(m: nn.Module, ids: Tensor, mask: Tensor | None) -> Tensor:
        value: Tensor = m(input_ids=ids, attention_mask=mask, labels=ids).loss
        return value

    with sl.Mesh(data=2):
        plan = sl.jit(loss).plan(model, ids, mask)
    calls = [step for step in plan.compiled.graph.ops if step.target in OPS]
    assert len(calls) == 4
    listing = plan.listing()
    assert len(re.findall(r"shardlib\.attention\S*\(.*True, 0\.3535533905932\d+, 4, 0\.0", listing)) == 4
    assert "2, 1, 8, 8]" not in listing  # no square
