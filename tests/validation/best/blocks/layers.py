"""Layers of large models beside plain transformers: mixers over a cut sequence, windows, caches, adapters, images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, ints, reduced

X = {"x": 8}
B, S, D, H, FF = 4, 2048, 1024, 16, 4096
E, N = D // H, B * S
ACT = N * D * 4  # bytes of the activations
STATE = B * H * E * E * 4  # of a matrix per head


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which)


# Over a sequence ------------------------------------------------------------------------------------------------------


def _sliding(q: Tensor, k: Tensor, v: Tensor, w: int = 128) -> Tensor:
    """Blocks that attend to themselves and the one before."""
    q, k, v = (t.unflatten(1, (-1, w)) for t in (q, k, v))
    k, v = (torch.cat([F.pad(t[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), t], 2) for t in (k, v))
    scores = torch.einsum("bnqhe,bnkhe->bnhqk", q, k)
    i, j = torch.arange(w)[:, None] + w, torch.arange(2 * w)
    p = scores.masked_fill((j > i) | (j <= i - w), -1e9).softmax(-1)
    return torch.einsum("bnhqk,bnkhe->bnqhe", p, v).flatten(1, 2)


def _seen(q: Tensor, k: Tensor, v: Tensor, w: int = 128) -> Tensor:
    """Each query sees the keys up to itself that are less than w away."""
    away = torch.arange(S)[:, None] - torch.arange(S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(away >= 0) & (away < w))


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Katharopoulos et al. 2020, arXiv:2006.16236."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state, total = torch.einsum("bshd,bshe->bhde", k, v), k.sum(1)
    return torch.einsum("bshd,bhde->bshe", q, state) / torch.einsum("bshd,bhd->bsh", q, total)[..., None]


def _causal_linear(q: Tensor, k: Tensor, v: Tensor, c: int = 64) -> Tensor:
    q, k, v = (t.unflatten(1, (-1, c)) for t in (q, k, v))
    states = torch.einsum("bnchd,bnche->bnhde", k, v)
    before = torch.einsum("bnchd,bnhde->bnche", q, states.cumsum(1) - states)
    within = torch.einsum("bnchd,bnkhd->bnhck", q, k).tril()
    return (before + torch.einsum("bnhck,bnkhe->bnche", within, v)).flatten(1, 2)


def _token_shift(x: Tensor, mu: Tensor, r: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RWKV: each token mixed with the one before."""
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    r, k, v = ((x * m + before * (1 - m)) @ w for m, w in zip(mu, (r, k, v), strict=True))
    return torch.sigmoid(r) * (k.relu().square() * v)


def _selective(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba's scan, step by step."""
    h, out = torch.zeros(*x[:, 0].shape, a.shape[1]), []
    for t in range(x.shape[1]):
        h = (dt[:, t, :, None] * a).exp() * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        out.append((h * c[:, t, None]).sum(-1))
    return torch.stack(out, 1)


def _long_convolution(x: Tensor, k: Tensor) -> Tensor:
    n = 2 * S
    return torch.fft.irfft(torch.fft.rfft(x, n, dim=1) * torch.fft.rfft(k, n, dim=0), n, dim=1)[:, :S]


def _rotary(q: Tensor, k: Tensor) -> Any:
    angles = torch.arange(S)[:, None] * 10000.0 ** (-torch.arange(0, E, 2) / E)
    cos, sin = (torch.cat([t, t], -1)[:, None] for t in (angles.cos(), angles.sin()))
    return [x * cos + torch.cat([-x[..., E // 2 :], x[..., : E // 2]], -1) * sin for x in (q, k)]


def _latents(z: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
    """A few latents attend to a long input."""
    q, k, v = (t @ w for t, w in zip((z, x, x), weights, strict=True))
    q, k, v = (t.unflatten(-1, (H, E)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


HEADS = (f32(B, S, H, E),) * 3
SEQUENCE = ("b s@x h e",) * 3
SCAN = (f32(B, 12, D), f32(B, 12, D), f32(D, 16), f32(B, 12, 16), f32(B, 12, 16))
CHANNELS = ("b t d@x", "b t d@x", "d@x n", "b t n", "b t n")
WINDOW = B * 128 * D * 4
MIXERS = [
    Row("sliding windows by blocks, sequence cut", _sliding, HEADS, SEQUENCE, X, 2 * WINDOW, 2),
    Row("gradients of sliding windows", _of_loss(_sliding, 0, 1, 2), HEADS, SEQUENCE, X, 4 * WINDOW, 4),
    Row("sliding windows by a mask, sequence cut", _seen, (f32(B, H, S, E),) * 3, ("b h s@x e",) * 3, X,
        2 * WINDOW * 127 / 128, 2),
    Row("gradients of sliding windows by a mask", _of_loss(_seen, 0, 1, 2), (f32(B, H, S, E),) * 3,
        ("b h s@x e",) * 3, X, 4 * WINDOW * 127 / 128, 4),
    Row("sliding windows by a mask, sequence and heads cut", _seen, (f32(B, H, S, E),) * 3,
        ("b h@tensor s@data e",) * 3, {"data": 2, "tensor": 4}, 2 * WINDOW * 127 / 128 / 4, 2),
    Row("linear attention, sequence cut", _linear, HEADS, SEQUENCE, X, reduced(STATE + STATE / E, 8), 2),
    Row("gradients of linear attention", _of_loss(_linear, 0, 1, 2), HEADS, SEQUENCE, X,
        2 * reduced(STATE + STATE / E, 8), 4),
    Row("causal linear attention by chunks", _causal_linear, HEADS, SEQUENCE, X, gathered(8 * STATE, 8), 1),
    Row("gradients of causal linear attention", _of_loss(_causal_linear, 0, 1, 2), HEADS, SEQUENCE, X,
        2 * gathered(8 * STATE, 8), 2),
    Row("RWKV token shift, sequence cut", _token_shift, (f32(B, S, D), f32(3, D), *[f32(D, D)] * 3),
        ("b s@x d", *["..."] * 4), X, B * D * 4, 1),
    Row("selective scan, channels cut", _selective, SCAN, CHANNELS, X),
    Row("gradients of a selective scan", _of_loss(_selective, 0, 1, 2, 3, 4), SCAN, CHANNELS, X,
        2 * reduced(B * 12 * 16 * 4, 8), 2),
    Row("long convolution by transforms, sequence cut", _long_convolution, (f32(B, S, 256), f32(S, 256)),
        ("b s@x d", "..."), X, 2 * exchanged(B * S * 256 * 4, 8), 2, out_specs="b s@x d"),
    Row("rotary embeddings, sequence cut", _rotary, HEADS[:2], SEQUENCE[:2], X),
    Row("latents that attend to a cut sequence", _latents, (f32(B, 64, D), f32(B, 16384, D), *[f32(D, D)] * 3),
        ("b l d", "b s@x d", *["..."] * 3), X, reduced(B * 64 * D * 4, 8) + 2 * reduced(B * 64 * H * 4, 8), 3),
    Row("mean with a mask, sequence cut", _masked_mean, (f32(B, S, D), f32(B, S)), ("b s@x d", "b s@x"), X,
        reduced(B * D * 4 + B * 4, 8), 2),
    Row("last token by lengths, sequence cut", lambda x, i: x.gather(1, i[:, None, None].expand(-1, 1, D))[:, 0],
        (f32(B, S, D), ints(B)), ("b s@x d", "b"), X, reduced(B * D * 4, 8), 1),
]  # fmt: skip


# Blocks and adapters --------------------------------------------------------------------------------------------------


def _gated(x: Tensor, g: Tensor, u: Tensor, d: Tensor) -> Tensor:
    return (F.silu(x @ g) * (x @ u)) @ d


def _normed(x: Tensor, g: Tensor) -> Tensor:
    return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * g


def _blocks(x: Tensor, blocks: Any) -> Tensor:
    for g, u, d in blocks:
        x = x + F.silu(_normed(x, g) @ u) @ d
    return x


def _normed_heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor, gq: Tensor, gk: Tensor, out: Tensor) -> Tensor:
    q, k, v = ((x @ w).unflatten(-1, (H, E)).transpose(1, 2) for w in (q, k, v))
    y = F.scaled_dot_product_attention(_normed(q, gq), _normed(k, gk), v, is_causal=True)
    return y.transpose(1, 2).flatten(2) @ out


def _cross(x: Tensor, c: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    q, k, v = ((t @ w).unflatten(-1, (H, E)).transpose(1, 2) for t, w in ((x, q), (c, k), (c, v)))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ out


def _depths(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Mixture of depths: an eighth of the tokens goes through the MLP."""
    weight, i = (x @ router)[..., 0].topk(S // 8, 1)
    i = i[..., None].expand(-1, -1, D)
    return x.scatter_add(1, i, F.gelu(x.gather(1, i) @ up) @ down * weight.sigmoid()[..., None])


def _soft_experts(x: Tensor, slots: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Puigcerver et al. 2023, arXiv:2308.00951."""
    scores = torch.einsum("bsd,dep->bsep", x, slots)
    to, back = scores.flatten(2).softmax(1).view_as(scores), scores.flatten(2).softmax(-1).view_as(scores)
    y = F.gelu(torch.einsum("bepd,edf->bepf", torch.einsum("bsd,bsep->bepd", x, to), up))
    return torch.einsum("bepd,bsep->bsd", torch.einsum("bepf,efd->bepd", y, down), back)


def _merged(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.relu(x @ (w + a @ b))


def _dora(x: Tensor, w: Tensor, a: Tensor, b: Tensor, m: Tensor) -> Tensor:
    """Liu et al. 2024, arXiv:2402.09353."""
    v = w + a @ b
    return x @ (v * (m / v.norm(dim=0)))


def _by_groups(x: Tensor, q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    groups = q.float().unflatten(0, (len(scale), -1))
    return x @ ((groups - zero[:, None]) * scale[:, None]).view(q.shape)


R = 8
MLP = (f32(N, D), f32(D, FF), f32(D, FF), f32(FF, D))
BLOCK = (f32(D), f32(D, FF), f32(FF, D))
LORA = (f32(N, D), f32(D, FF), f32(D, R), f32(R, FF), f32(FF))
CROSS = (f32(B, S, D), f32(B, 77, 768), f32(D, D), f32(768, D), f32(768, D), f32(D, D))
INT8 = (f32(N, D), torch.empty(D, FF, dtype=torch.int8, device="meta"), f32(8, FF), f32(8, FF))
SLOTS = 8 * 8 * 16 * D * 4
BLOCKS = [
    Row("gradients of a gated MLP, Megatron", _of_loss(_gated, 0, 1, 2, 3), MLP, ("n d", "d f@x", "d f@x", "f@x d"), X,
        2 * reduced(ACT, 8), 2),
    Row("gradients of two blocks with RMS norms, Megatron", _of_loss(_blocks, 0, 1), (f32(N, D), [BLOCK] * 2),
        ("n d", [("d", "d f@x", "f@x d")] * 2), X, 4 * reduced(ACT, 8), 4),
    Row("gradients of normed queries and keys", _of_loss(_normed_heads, 0, 1, 2, 3, 4, 5, 6),
        (f32(B, S, D), *[f32(D, D)] * 3, f32(E), f32(E), f32(D, D)),
        ("b s d", *["d h@x"] * 3, "e", "e", "h@x d"), X, 2 * reduced(ACT, 8) + 2 * reduced(E * 4, 8), 4),
    Row("cross attention to 77 tokens, Megatron", _cross, CROSS, ("b s d", "b t c", *["d h@x"] * 3, "h@x d"), X,
        reduced(ACT, 8), 1, out_specs="b s d"),
    Row("mixture of depths, Megatron", _depths, (f32(8, S, D), f32(D, 1), f32(D, FF), f32(FF, D)),
        ("b s d", "...", "d f@x", "f@x d"), X, reduced(8 * S // 8 * D * 4, 8), 1, out_specs="b s d"),
    Row("soft mixture of experts, batch and experts cut", _soft_experts,
        (f32(8, 512, D), f32(D, 8, 16), f32(8, D, FF), f32(8, FF, D)), ("b@x s d", "...", "e@x d f", "e@x f d"), X,
        2 * exchanged(SLOTS, 8), 2, out_specs="b@x s d"),
    Row("gradients of a merged adapter, data parallel", _of_loss(_merged, 2, 3), LORA[:4], ("n@x d", *["..."] * 3), X,
        reduced(R * (D + FF) * 4, 8), 2),
    Row("gradients of a merged adapter, FSDP", _of_loss(_merged, 2, 3), LORA[:4], ("n@x d", "d@x f", "...", "..."), X,
        gathered(D * FF * 4, 8) + reduced(R * (D + FF) * 4, 8), 3),
    Row("gradients of DoRA, data parallel", _of_loss(_dora, 2, 3, 4), LORA, ("n@x d", *["..."] * 4), X,
        reduced((R * (D + FF) + FF) * 4, 8), 3),
    Row("gradients of DoRA, columns cut", _of_loss(_dora, 2, 3, 4), LORA, ("n d", "d f@x", "d r", "r f@x", "f@x"), X,
        reduced(D * R * 4, 8), 1),
    Row("weights of eight bits by groups, rows cut", _by_groups, INT8, ("n d@x", "d@x f", "g@x f", "g@x f"), X,
        reduced(N * FF * 4, 8), 1, out_specs="n f"),
    Row("weights of eight bits by groups, gathered", _by_groups, INT8, ("n@x d", "d@x f", "g@x f", "g@x f"), X,
        gathered(D * FF + 2 * 8 * FF * 4, 8), 3),
]  # fmt: skip


# Images, audio, graphs ------------------------------------------------------------------------------------------------


def _front_end(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Whisper's, of two convolutions."""
    return F.gelu(F.conv1d(F.gelu(F.conv1d(x, a, padding=1)), b, stride=2, padding=1))


def _patches(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, stride=16).flatten(2).mT


def _shifted_windows(x: Tensor, w: Tensor, shift: int = 4, k: int = 8) -> Tensor:
    """Swin."""
    b, h, n, c = x.shape
    x = x.roll((-shift, -shift), (1, 2)).view(b, h // k, k, n // k, k, c).permute(0, 1, 3, 2, 4, 5)
    y = F.scaled_dot_product_attention(*(x.reshape(-1, k * k, c) @ w).chunk(3, -1))
    y = y.view(b, h // k, n // k, k, k, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, n, c)
    return y.roll((shift, shift), (1, 2))


def _axial(x: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(x, x, x).transpose(1, 2)
    return F.scaled_dot_product_attention(y, y, y).transpose(1, 2)


def _graph_attention(x: Tensor, i: Tensor, j: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = x @ w
    e = F.leaky_relu((h @ a)[i] + (h @ b)[j]).exp()
    total = torch.zeros(len(x)).index_add(0, j, e)
    return torch.zeros_like(h).index_add(0, j, e[:, None] * h[i]) / total[:, None]


NODES = 8192
FIELDS = [
    # A row of 80 channels from either side, then one of 512: a stride of two looks back alone.
    Row("audio front end of two convolutions, time cut", _front_end,
        (f32(4, 80, 4096), f32(512, 80, 3), f32(512, 512, 3)), ("b c t@x", "...", "..."), X,
        4 * (2 * 80 + 512) * 4, 3),
    Row("patches of an image, height cut", _patches, (f32(8, 3, 256, 256), f32(D, 3, 16, 16)), ("b c h@x w", "..."), X),
    Row("shifted windows, height cut", _shifted_windows, (f32(2, 128, 128, 96), f32(96, 288)), ("b h@x w c", "..."), X,
        2 * 2 * 4 * 128 * 96 * 4, 2),
    Row("axial attention, rows cut", _axial, (f32(4, 256, 256, 64),), ("b h@x w c",), X,
        2 * exchanged(4 * 256 * 256 * 64 * 4, 8), 2, out_specs="b h@x w c"),
    Row("group norm of an image, height cut", lambda x: F.silu(F.group_norm(x, 32)), (f32(2, 256, 256, 256),),
        ("b c h@x w",), X, 2 * reduced(2 * 32 * 4, 8), 2),
    # Everybody projects all nodes, which takes less time than to gather what each projected of some.
    Row("graph attention, edges cut", _graph_attention,
        (f32(NODES, D), ints(1 << 17), ints(1 << 17), f32(D, 64), f32(64), f32(64)),
        ("...", "e@x", "e@x", "...", "...", "..."), X, reduced(NODES * 65 * 4, 8), 2, work=8, out_specs="..."),
]  # fmt: skip

ROWS = [*MIXERS, *BLOCKS, *FIELDS]
