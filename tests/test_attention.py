"""`ops/attention.py` against its definition in float64, for every backend, and how it composes with torch.func."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from shardlib.capture import AttentionCapture
from shardlib.errors import ShardingError
from shardlib.ops import attention as op
from shardlib.ops.attention import Where, attention, choose, reference

SIZES = [  # heads, key heads, queries, keys
    pytest.param(4, 4, 5, 5, id="square"),
    pytest.param(4, 2, 5, 7, id="grouped"),
    pytest.param(6, 1, 7, 3, id="one-key-head"),
    pytest.param(2, 2, 0, 3, id="no-query"),
    pytest.param(2, 1, 3, 0, id="no-key"),
    pytest.param(0, 0, 3, 3, id="no-head"),
]
OFFSETS = [(0, 0), (4, 0), (0, 3), (2, 5), (0, 20), (20, 0)]
MASKS = {
    "none": lambda s, t: None,
    "bias": lambda s, t: torch.randn(1, s, t, dtype=torch.float64),
    "keep": lambda s, t: torch.rand(2, 1, s, t) > 0.4,
    "keys": lambda s, t: torch.rand(2, 1, 1, t) > 0.4,
    "nothing": lambda s, t: torch.zeros(s, 1, dtype=torch.bool),
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def operands(h, kv, s, t, d=8, dtype=torch.float64):
    torch.manual_seed(h + 10 * s + t)
    return tuple(torch.randn(2, n, m, d, dtype=dtype) for n, m in ((h, s), (kv, t), (kv, t), (h, s)))


def close(got, want, dtype):
    torch.testing.assert_close(got.double(), want.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("h", "kv", "s", "t"), SIZES)
@pytest.mark.parametrize("backend", ["torch", "math"])
def test_backends_agree_with_the_reference(backend, h, kv, s, t, mask):
    q, k, v, grad_o = operands(h, kv, s, t)
    for (q_offset, k_offset), causal in itertools.product(OFFSETS, (False, True)):
        where = Where(MASKS[mask](s, t), causal, 0.3, q_offset, k_offset)
        if backend == "torch" and choose(q, k, where).backend != "torch":
            continue
        for dtype in TOLERANCE:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o, lse = reference(*leaves, where)
            grads = torch.autograd.grad(o, leaves, grad_o, allow_unused=True)
            cast = [x.to(dtype) for x in (q, k, v, grad_o)]
            got, got_lse = op.FORWARD[backend](*cast[:3], where)
            close(got, o, dtype)
            close(got_lse, lse, dtype)
            assert got.dtype == dtype
            assert got_lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            for mine, want in zip(op.BACKWARD[backend](cast[3], *cast[:3], got, got_lse, where), grads, strict=True):
                close(mine, torch.zeros_like(mine) if want is None else want, dtype)


def test_a_row_that_sees_nothing_is_zero_and_says_so():
    q, k, v, _ = operands(2, 2, 4, 4)
    o, lse = attention(q, k, v, causal=True, k_offset=2)
    assert lse[:, :, :2].isneginf().all()
    assert o[:, :, :2].eq(0).all()
    assert lse[:, :, 2:].isfinite().all()
    zero = torch.zeros(1, 1, 1, 8)  # one key, logit 0: lse is 0, which is also what torch's kernel says of dead rows
    assert attention(zero, zero, zero, torch.ones(1, 1, dtype=torch.bool))[1].item() == 0


def test_parts_of_a_sequence_make_the_whole():
    """Offsets place a part; the log-sum-exp merges parts."""
    q, k, v, _ = operands(4, 2, 12, 12)
    whole, whole_lse = attention(q, k, v, causal=True)
    for start in (0, 4, 8):
        part, _ = attention(q[:, :, start : start + 4], k, v, causal=True, q_offset=start)
        close(part, whole[:, :, start : start + 4], torch.float64)
    cuts = [(attention(q, k[:, :, i : i + 5], v[:, :, i : i + 5], causal=True, k_offset=i)) for i in (0, 5, 10)]
    lses = torch.stack([lse for _, lse in cuts])
    close(lses.logsumexp(0), whole_lse, torch.float64)
    weights = (lses - whole_lse).exp()[..., None]
    close(sum(o * w for (o, _), w in zip(cuts, weights, strict=True)), whole, torch.float64)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("backend", ["torch", "math"])
def test_results_are_laid_out_as_the_fake_says(backend, layout, monkeypatch):
    monkeypatch.setattr(op, "choose", lambda *_: op.Choice(backend, "test"))
    q, k, v, grad_o = operands(4, 2, 5, 7)
    if layout == "BSHD":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    for causal, mask in itertools.product((True, False), (None, torch.ones(5, 7, dtype=torch.bool))):
        arguments = (mask, causal, 0.3)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.shardlib.attention.default, (q, k, v, *arguments), test_utils=checks)
        o, lse = torch.ops.shardlib.attention(q, k, v, *arguments)
        gradients = (grad_o, q, k, v, o, lse, *arguments, 1, 3)
        torch.library.opcheck(torch.ops.shardlib.attention_backward.default, gradients, test_utils=checks)


def score(q, k, v):
    return attention(q, k, v, causal=True)[0].sin().sum()


def test_autograd_torch_func_and_vmap_agree():
    q, k, v, _ = operands(4, 2, 5, 7)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(reference(*leaves, Where(None, True, 8**-0.5))[0].sin().sum(), leaves)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for got in (torch.autograd.grad(score(*leaves), leaves), grad(score, (0, 1, 2))(q, k, v)):
        for mine, gradient in zip(got, want, strict=True):
            close(mine, gradient, torch.float64)
    batched = [torch.stack([x, 2 * x, -x], dim) for dim, x in enumerate((q, k, v))]
    got = vmap(grad(score, (0, 1, 2)), (0, 1, 2))(*batched)
    each = [grad(score, (0, 1, 2))(*(b.select(d, i) for d, b in enumerate(batched))) for i in range(3)]
    for mine, gradients in zip(got, zip(*each, strict=True), strict=True):
        close(mine, torch.stack(gradients), torch.float64)


@pytest.mark.parametrize("mask_dim", [None, 0, 1])
@pytest.mark.parametrize("shape", [(5, 7), (4, 5, 7), (1, 4, 1, 7), (2, 1, 5, 7)])
def test_vmap_of_masks(shape, mask_dim):
    q, k, v, _ = operands(4, 2, 5, 7)
    qs = torch.stack([q, q + 1, -q])
    mask = torch.randn(shape, dtype=torch.float64)
    masks = mask if mask_dim is None else torch.stack([mask, mask * 2, -mask], mask_dim)
    got = vmap(lambda q, m: attention(q, k, v, m)[0], (0, mask_dim))(qs, masks)
    for i in range(3):
        close(got[i], attention(qs[i], k, v, mask if mask_dim is None else masks.select(mask_dim, i))[0], torch.float64)


def test_a_graph_has_one_node_forward_and_one_backward():
    q, k, v, _ = operands(4, 2, 5, 7)
    names = [str(n.target) for n in make_fx(grad(score, (0, 1, 2)))(q, k, v).graph.nodes]
    assert [n for n in names if "attention" in n or "scaled" in n] == [
        "shardlib.attention.default",
        "shardlib.attention_backward.default",
    ]
    assert not [n for n in names if "zeros" in n]  # nothing is made for the gradient of lse


def captured(fn, *args):
    with AttentionCapture():
        return make_fx(fn)(*args)


SDPA = {
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    "causal-rectangle": lambda q, k, v: F.scaled_dot_product_attention(q[:, :2], k, v, is_causal=True),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q[:, :2], k, v, scale=1.0),
    "keep": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], k.new_ones(5, 7).tril() > 0),
    "bias": lambda q, k, v: F.scaled_dot_product_attention(q[:, :2], k, v, attn_mask=k.new_ones(2, 1, 1, 7)),
    "three-dims": lambda q, k, v: F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0]),
    "five-dims": lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None, :, :1], v[None, :, :1], k.new_ones(7)),
    "broadcast": lambda q, k, v: F.scaled_dot_product_attention(q[:, :2], k[:1], v[:1]),
}


@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention_is_captured(name):
    q, k, v, _ = operands(4, 2, 5, 7)
    gm = captured(SDPA[name], q, k, v)
    assert sum(str(n.target) == "shardlib.attention.default" for n in gm.graph.nodes) == 1
    torch.testing.assert_close(gm(q, k, v), SDPA[name](q, k, v))


def test_attention_inside_torch_modules_is_captured():
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    params, x = dict(layer.named_parameters()), torch.randn(2, 5, 16)
    run = lambda p, x: functional_call(layer, p, (x, x, x), {"need_weights": False})[0]
    gm = captured(run, params, x)
    assert sum(str(n.target) == "shardlib.attention.default" for n in gm.graph.nodes) == 1
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_a_learned_bias_keeps_its_gradient():
    q, k, v, _ = operands(2, 2, 5, 7)
    loss = lambda bias: F.scaled_dot_product_attention(q, k, v, bias).sin().sum()
    bias = torch.randn(2, 5, 7, dtype=torch.float64)
    gm = captured(grad(loss), bias)
    assert not [n for n in gm.graph.nodes if "shardlib" in str(n.target)]
    torch.testing.assert_close(gm(bias), grad(loss)(bias))


def test_reasons_are_printable():
    q, k, *_ = operands(2, 2, 5, 7)
    where = Where(None, False, 1.0)
    assert choose(q, k, where) == ("torch", "torch's flash attention for CPU")
    assert choose(q[:0], k[:0], where) == ("math", "a size is 0")
    assert choose(q.to("meta"), k.to("meta"), where).reason == "no kernel for meta here"


def test_errors():
    q, k, v, _ = operands(4, 2, 5, 7)
    with pytest.raises(ShardingError) as caught:
        attention(q, k[:, :, :, :4], v[:, :, :, :4])
    assert str(caught.value).splitlines() == [
        "attention(q [2, 4, 5, 8], k [2, 2, 7, 4], v [2, 2, 7, 4]) does not fit:",
        "  * q has head size 8, k has 4",
    ]
    with pytest.raises(ShardingError, match="4 query heads are no multiple of 3 key heads"):
        attention(q, torch.zeros(2, 3, 7, 8), torch.zeros(2, 3, 7, 8))
    with pytest.raises(ShardingError, match=r"a mask \[5, 6\] does not broadcast to \[2, 4, 5, 7\]"):
        attention(q, k, v, torch.zeros(5, 6))
    with pytest.raises(ShardingError, match=r"q must be \[B, H, S, D\], k and v \[B, KV, T, D\]"):
        attention(q[0], k, v)
    with pytest.raises(ShardingError, match="attention was differentiated twice"):
        grad(lambda q: grad(score)(q, k, v).sum())(q)
    with pytest.raises(ShardingError, match="asked for the gradient of its mask"):
        grad(lambda m: attention(q, k, v, m)[0].sum())(torch.zeros(5, 7, dtype=torch.float64))
    with AttentionCapture(), pytest.raises(ShardingError) as caught:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert str(caught.value) == "attention dropout is not supported yet\nRemedy: set dropout to 0"
