"""Ways to train: data, tensor, sequence and sharded-data parallelism, and loops of more than one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, reduced

B, S, D, H, FF = 16, 128, 256, 8, 4096
N = B * S  # tokens
W = 2 * D * FF * 4  # bytes of an MLP
ACT = N * D * 4  # bytes of the activations
DATA, TENSOR, BOTH = {"data": 8}, {"tensor": 8}, {"data": 2, "tensor": 4}


# One MLP, with its gradients -----------------------------------------------------------------------------------------


def _mlp(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ a) @ b


def _block(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x + _mlp(F.layer_norm(x, x.shape[-1:]), a, b)


def _loss(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _mlp(x, a, b).sin().sum()


def _step(x: Tensor, a: Tensor, b: Tensor) -> Any:
    grads = sl.grad(_loss, (1, 2))(x, a, b)
    return tuple(w - 0.1 * g for w, g in zip((a, b), grads, strict=True))


def _adam(x: Tensor, a: Tensor, m: Tensor, v: Tensor) -> Any:
    grad = sl.grad(lambda a: (x @ a).sin().sum())(a)
    m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad * grad
    return a - 0.1 * m / (v.sqrt() + 1e-8), m, v


def _residual(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _block(x, a, b).sin().sum()


ROWS3 = (f32(N, D), f32(D, FF), f32(FF, D))
MLP = [
    Row("MLP forward, Megatron", _mlp, ROWS3, ("n d", "d ff@tensor", "ff@tensor d"), TENSOR, reduced(ACT, 8), 1,
        out_specs="n d"),
    Row("MLP forward, Megatron with sequence", _block, ROWS3, ("n@tensor d", "d ff@tensor", "ff@tensor d"), TENSOR,
        2 * gathered(ACT, 8), 2),
    Row("MLP gradients, Megatron", sl.grad(_residual, (0, 1, 2)), ROWS3, ("n d", "d ff@tensor", "ff@tensor d"),
        TENSOR, 2 * reduced(ACT, 8), 2),
    Row("MLP gradients, Megatron with sequence", sl.grad(_residual, (0, 1, 2)), ROWS3,
        ("n@tensor d", "d ff@tensor", "ff@tensor d"), TENSOR, 4 * gathered(ACT, 8), 4),
    Row("MLP gradients, data and tensor", sl.grad(_residual, (1, 2)), ROWS3,
        ("n@data d", "d ff@tensor", "ff@tensor d"), BOTH, reduced(ACT / 2, 4) + reduced(W / 4, 2), 3),
    Row("SGD step, data parallel", _step, ROWS3, ("n@data d", "_ _", "_ _"), DATA, reduced(W, 8), 2),
    Row("SGD step, FSDP", _step, (f32(16 * N, D), *ROWS3[1:]), ("n@data d", "d@data _", "ff@data _"), DATA,
        2 * gathered(W, 8), 4),
    Row("SGD step, FSDP with tensor", _step, ROWS3, ("n@data d", "d@data ff@tensor", "ff@tensor d@data"), BOTH,
        reduced(ACT / 2, 4) + 2 * gathered(W / 4, 2), 5),
    Row("Adam step, ZeRO-1", _adam, (f32(N, D), f32(D, FF), f32(D, FF), f32(D, FF)),
        ("n@data d", "_ _", "d@data _", "d@data _"), DATA, 2 * gathered(W / 2, 8), 2,
        out_specs=("_ _", "d@data _", "d@data _")),
]  # fmt: skip


# Attention ------------------------------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    q, k, v = ((x @ w).reshape(B, S, H, D // H).transpose(1, 2) for w in (q, k, v))
    return x + _causal(q, k, v).transpose(1, 2).reshape(B, S, D) @ out


def _decode(x: Tensor, keys: Tensor, values: Tensor, q: Tensor, out: Tensor) -> Tensor:
    rows = (x @ q).reshape(B, H, 1, D // H)
    return _attend(rows, keys, values).reshape(B, D) @ out


QKV = (f32(B, H, S, D // H),) * 3
CACHE = (f32(B, D), f32(B, H, 2048, D // H), f32(B, H, 2048, D // H), f32(D, D), f32(D, D))
ATTENTION = [
    Row("attention over heads", _causal, QKV, ("b h@tensor s d",) * 3, TENSOR),
    Row("attention over batch", _causal, QKV, ("b@data h s d",) * 3, DATA),
    Row("attention over a cut sequence (ring or Ulysses)", _attend, QKV, ("b h s@tensor d",) * 3, TENSOR,
        4 * exchanged(ACT, 8), 4, out_specs="b h s@tensor d"),
    Row("attention with its projections, Megatron", _heads, (f32(B, S, D), *[f32(D, D)] * 4),
        ("b s d", *["d h@tensor"] * 3, "h@tensor d"), TENSOR, reduced(ACT, 8), 1, out_specs="b s d"),
    Row("decoding with cached keys, heads over tensor", _decode, CACHE,
        ("b d", "b h@tensor t k", "b h@tensor t k", "d h@tensor", "h@tensor d"), TENSOR, reduced(B * D * 4, 8), 1,
        out_specs="b d"),
    Row("decoding with cached keys, batch over data", _decode, CACHE,
        ("b@data d", "b@data h t k", "b@data h t k", "_ _", "_ _"), DATA),
    Row("decoding, the cache cut in time", _attend, (f32(B, H, 1, D // H), *CACHE[1:3]),
        ("...", "b h t@tensor k", "b h t@tensor k"), TENSOR, reduced(B * D * 4, 8) + 2 * reduced(B * H * 4, 8), 3,
        out_specs="..."),
    Row("gradients of few queries, keys cut", sl.grad(lambda *x: _attend(*x).sin().sum(), (0, 1, 2)),
        (f32(B, H, 16, D // H), *CACHE[1:3]), ("...", "b h t@tensor k", "b h t@tensor k"), TENSOR,
        2 * reduced(16 * B * D * 4, 8) + 2 * reduced(16 * B * H * 4, 8), 4),
]  # fmt: skip


# Heads and losses -----------------------------------------------------------------------------------------------------

V = 8192


def _loss_of_vocabulary(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, y, reduction="sum")


def _tied(i: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.embedding(i, w) @ w.t(), y, reduction="sum")


def _by_parts(w: Tensor, x: Tensor, y: Tensor) -> Any:
    return sum(F.cross_entropy(x[:, i] @ w, y[:, i], reduction="sum") for i in range(3))


TOKENS = torch.empty(N, dtype=torch.int64, device="meta")
LOSSES = [
    Row("cross entropy over a cut vocabulary", _loss_of_vocabulary, (f32(N, D), f32(D, V), TOKENS),
        ("n d", "d v@tensor", "n"), TENSOR, 2 * reduced(N * 4, 8) + reduced(8, 8), 3, out_specs=""),
    Row("gradients of cross entropy over a cut vocabulary",
        sl.grad(lambda x, w, y: F.cross_entropy(x @ w, y), (0, 1)), (f32(N, D), f32(D, V), TOKENS),
        ("n d", "d v@tensor", "n"), TENSOR, 2 * reduced(N * 4, 8) + reduced(N * D * 4, 8), 3),
    Row("gradient of a loss in three parts", sl.grad(_by_parts),
        (f32(D, 512), f32(96, 3, D), torch.empty(96, 3, dtype=torch.int64, device="meta")),
        ("_ _", "b@data s d", "b@data s"), DATA, reduced(D * 512 * 4, 8), 1),
    Row("contrastive loss, data parallel", lambda a, b: F.cross_entropy(a @ b.t(), torch.arange(N), reduction="sum"),
        (f32(N, D), f32(N, D)), ("n@data d", "m@data d"), DATA, gathered(ACT, 8) + reduced(4, 8), 2),
    Row("pairwise distances, rows over data", lambda a, b: torch.cdist(a, b), (f32(N, 8), f32(N, 8)),
        ("n@data d", "m d"), DATA),
    Row("mean and variance of a batch", lambda x: (x - x.mean(0)) / x.var(0).sqrt(), (f32(N, D),), ("n@data d",),
        DATA, 2 * reduced(D * 4, 8), 2),
]  # fmt: skip


# More than one model --------------------------------------------------------------------------------------------------


def _lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    return sl.grad(lambda a, b: (x @ w + x @ a @ b).sin().sum(), (0, 1))(a, b)


def _distill(x: Tensor, teacher: Tensor, student: Tensor) -> Tensor:
    target = (x @ teacher).softmax(-1).detach()
    return sl.grad(lambda w: -(target * (x @ w).log_softmax(-1)).sum())(student)


def _divergence(x: Tensor, teacher: Tensor, student: Tensor) -> Tensor:
    return F.kl_div((x @ student).log_softmax(-1), (x @ teacher).softmax(-1), reduction="sum")


def _gan(x: Tensor, z: Tensor, g: Tensor, d: Tensor) -> Any:
    fake = z @ g
    to_d = sl.grad(lambda d: F.softplus(-(x @ d)).sum() + F.softplus(fake.detach() @ d).sum())(d)
    to_g = sl.grad(lambda g: F.softplus(-(z @ g @ d)).sum())(g)
    return to_d, to_g


def _ppo(x: Tensor, policy: Tensor, old: Tensor, critic: Tensor, reference: Tensor, a: Tensor) -> Any:
    def loss(policy: Tensor, critic: Tensor) -> Tensor:
        chosen = [(x @ w).log_softmax(-1).gather(1, a[:, None])[:, 0] for w in (policy, old, reference)]
        ratio = (chosen[0] - chosen[1]).exp()
        return (ratio * (x @ critic)[:, 0] + 0.1 * (chosen[0] - chosen[2])).sum()

    return sl.grad(loss, (0, 1))(policy, critic)


def _accumulated(x: Tensor, a: Tensor, b: Tensor) -> Any:
    total: Any = 0
    for part in x:
        total = total + _loss(part, a, b)
    return total


def _viewed(x: Tensor, a: Tensor, b: Tensor) -> Any:
    return _accumulated(x.view(4, -1, D), a, b)


def _rnn(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], D)
    for t in range(4):
        h = torch.tanh(x[:, t] @ w + h @ u)
    return h.sum()


R = 8
SMALL = (f32(N, D), f32(D, FF))
MODELS = [
    Row("LoRA, data parallel", _lora, (*SMALL, f32(D, R), f32(R, FF)), ("n@data d", "_ _", "_ _", "_ _"), DATA,
        reduced(R * (D + FF) * 4, 8), 2),
    Row("LoRA, frozen weights over tensor", _lora, (*SMALL, f32(D, R), f32(R, FF)),
        ("n d", "d ff@tensor", "_ _", "r ff@tensor"), TENSOR, reduced(D * R * 4, 8), 1, work=1.05),
    Row("distillation of two models", _distill, (*SMALL, f32(D, FF)), ("n@data d", "_ _", "_ _"), DATA,
        reduced(W / 2, 8), 1),
    Row("GAN, both gradients", _gan, (f32(N, D), f32(N, 64), f32(64, D), f32(D, 1)),
        ("n@data d", "n@data z", "_ _", "_ _"), DATA, reduced(64 * D * 4, 8) + reduced(D * 4, 8), 2),
    Row("PPO with four models", _ppo, (f32(N, D), *[f32(D, 64)] * 2, f32(D, 1), f32(D, 64), TOKENS),
        ("n@data d", *["_ _"] * 4, "n@data"), DATA, reduced(64 * D * 4, 8) + reduced(D * 4, 8), 2),
    Row("four micro-batches, accumulated", sl.grad(_accumulated, (1, 2)), (f32(4, N, D), *ROWS3[1:]),
        ("_ n@data d", "_ _", "_ _"), DATA, reduced(W, 8), 2),
    Row("four micro-batches by a view, accumulated", sl.grad(_viewed, (1, 2)), (f32(16 * N, D), *ROWS3[1:]),
        ("n@data d", "_ _", "_ _"), DATA, 16 * ACT / 8 * 3 / 4 + reduced(W, 8), 3,
        short={"bytes": 1.06}, why="the whole axis moves, where a part of it would do"),
    Row("recurrent network, data parallel", sl.grad(_rnn, (1, 2)), (f32(N, 4, D), f32(D, D), f32(D, D)),
        ("n@data t d", "_ _", "_ _"), DATA, reduced(2 * D * D * 4, 8), 2),
]  # fmt: skip


# Fields, graphs, particles --------------------------------------------------------------------------------------------


def _unet(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    low = F.avg_pool2d(F.relu(F.conv2d(x, down, padding=1)), 2)
    return x + F.conv2d(F.interpolate(low, scale_factor=2.0), up, padding=1)


def _mixing(x: Tensor) -> Tensor:
    return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=0).real


def _spectral(x: Tensor, w: Tensor) -> Tensor:
    return torch.fft.irfft2(torch.fft.rfft2(x) * w, s=x.shape[-2:])


def _messages(x: Tensor, source: Tensor, target: Tensor, w: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, target, x[source] @ w)


def _forces(x: Tensor, y: Tensor) -> Tensor:
    away = x[:, None] - y[None]
    return (away / (away.square().sum(-1, keepdim=True) + 1e-3) ** 1.5).sum(1)


EDGES = torch.empty(16 * N, dtype=torch.int64, device="meta")
FIELDS = [
    Row("U-Net in space", _unet, (f32(4, 8, 64, 64), f32(16, 8, 3, 3), f32(8, 16, 3, 3)),
        ("n c h@tensor w", "...", "..."), TENSOR, 2 * 4 * 8 * 64 * 4 + 2 * 4 * 16 * 32 * 4, 4),
    Row("FFT mixing, rows cut", _mixing, (torch.empty(N, D, dtype=torch.complex64, device="meta"),), ("n@tensor d",),
        TENSOR, exchanged(N * D * 8, 8), 1),
    Row("two-dim transform, rows cut", torch.fft.fft2, (torch.empty(N, D, dtype=torch.complex64, device="meta"),),
        ("n@tensor d",), TENSOR, exchanged(N * D * 8, 8), 1),
    Row("Fourier layer, height cut", _spectral,
        (f32(4, 8, 64, 128), torch.empty(8, 64, 65, dtype=torch.complex64, device="meta")),
        ("b c h@tensor w", "..."), TENSOR, 2 * exchanged(4 * 8 * 64 * 65 * 8, 8), 2, out_specs="b c h@tensor w"),
    Row("normalized along a cut dim", lambda x: F.normalize(x, dim=-1), (f32(N, V),), ("n v@tensor",), TENSOR,
        reduced(N * 4, 8), 1),
    Row("cosines along a cut dim", lambda x, y: F.cosine_similarity(x, y), (f32(N, V), f32(N, V)),
        ("n v@tensor", "n v@tensor"), TENSOR, 3 * reduced(N * 4, 8), 3, out_specs="n"),
    Row("batch norm, data parallel", lambda x: F.batch_norm(x, None, None, training=True), (f32(64, 32, 16, 16),),
        ("n@data c h w",), DATA, 2 * reduced(32 * 4, 8), 2),
    Row("divergence of two models over a cut vocabulary", _divergence, (f32(N, D), f32(D, V), f32(D, V)),
        ("n d", "d v@tensor", "d v@tensor"), TENSOR, 4 * reduced(N * 4, 8) + reduced(4, 8), 5, out_specs=""),
    Row("graph messages, edges over data", _messages, (f32(N, D), EDGES, EDGES, f32(D, D)),
        ("n d", "e@data", "e@data", "_ _"), DATA, reduced(ACT, 8), 1, out_specs="n d"),
    Row("forces between all bodies", _forces, (f32(N, 3), f32(N, 3)), ("n@data d", "m d"), DATA),
    Row("softmax over a cut dim", lambda x: x.softmax(-1), (f32(N, V),), ("n v@tensor",), TENSOR,
        2 * reduced(N * 4, 8), 2),
    Row("layer norm over a cut dim", lambda x: F.layer_norm(x, (D,)), (f32(N, D),), ("n d@tensor",), TENSOR,
        2 * reduced(N * 4, 8), 2),
    Row("top of a cut dim", lambda x: x.amax(-1), (f32(N, V),), ("n v@tensor",), TENSOR, reduced(N * 4, 8), 1,
        out_specs="n"),
]  # fmt: skip

ROWS: Sequence[Row] = [*MLP, *ATTENTION, *LOSSES, *MODELS, *FIELDS]
