"""What people train and serve: encoders with decoders, mixtures with shared experts, agents, packed weights, caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, bf16, exchanged, f32, gathered, ints, reduced

X = {"x": 8}
B, S, D, H, FF = 4, 1024, 1024, 16, 4096
E = D // H
ACT = B * S * D * 4


def _of_sines(program: Any, *which: int) -> Any:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, E)).transpose(1, 2)


def _attended(x: Tensor, other: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *, causal: bool = False) -> Tensor:
    x, other = F.rms_norm(x, (D,)), F.rms_norm(other, (D,))
    y = F.scaled_dot_product_attention(_heads(x @ q), _heads(other @ k), _heads(other @ v), is_causal=causal)
    return y.transpose(1, 2).flatten(2) @ o


def _translated(x: Tensor, y: Tensor, layers: Sequence[Sequence[Tensor]]) -> Tensor:
    """A layer of an encoder, and one of a decoder."""
    mine, (up, down), own, across, (up_too, down_too) = layers
    x = x + _attended(x, x, *mine)
    x = x + F.gelu(F.rms_norm(x, (D,)) @ up) @ down
    y = y + _attended(y, y, *own, causal=True)
    y = y + _attended(y, x, *across)
    return (y + F.gelu(F.rms_norm(y, (D,)) @ up_too) @ down_too).sin().sum()


ATTENTION, MLP = [f32(D, D)] * 4, [f32(D, FF), f32(FF, D)]
BY_HEADS, BY_HIDDEN = ["d h@x"] * 3 + ["h@x d"], ["d f@x", "f@x d"]


def _shared_expert(x: Tensor, r: Tensor, u: Tensor, d: Tensor, su: Tensor, sd: Tensor) -> Tensor:
    p = (x @ r).softmax(-1)
    best, which = p.topk(2, -1)
    gate = torch.zeros_like(p).scatter(-1, which, best)
    h = F.silu(torch.einsum("nd,edf->enf", x, u))
    return x + torch.einsum("enf,efd,ne->nd", h, d, gate) + F.silu(x @ su) @ sd


MIXTURE = f32(4096, D), f32(D, 16), f32(16, D, D), f32(16, D, D), f32(D, FF), f32(FF, D)
MIXED = "n d", "...", "e@x d f", "e@x f d", "d f@x", "f@x d"


def _local_and_global(q: Tensor, k: Tensor, v: Tensor, width: int = 64, few: int = 16) -> Tensor:
    """Blocks attend to themselves, to the one before, and to a few tokens at the beginning."""
    first, shown = k[:, :, :few], v[:, :, :few]
    q, k, v = (x.unflatten(2, (-1, width)) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x[:, :, :-1], (0, 0, 0, 0, 1, 0)), x], 3) for x in (k, v))
    near, far = torch.einsum("bhnqe,bhnke->bhnqk", q, k), torch.einsum("bhnqe,bhge->bhnqg", q, first)
    a = torch.cat([near, far], -1).softmax(-1)
    y = torch.einsum("bhnqk,bhnke->bhnqe", a[..., : 2 * width], v)
    return (y + torch.einsum("bhnqg,bhge->bhnqe", a[..., 2 * width :], shown)).flatten(2, 3)


def _gated_linear(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, size: int = 64) -> Tensor:
    q, k, v, gates = (x.unflatten(2, (-1, size)) for x in (q, k, v, gates))
    g = F.logsigmoid(gates).cumsum(3)
    y = ((q * g.exp()) @ (k * (-g).exp()).mT).tril() @ v
    made, decay = (k * (g[..., -1:, :] - g).exp()).mT @ v, g[..., -1, :].exp()
    state, before = torch.zeros_like(made[:, :, 0]), []
    for i in range(made.shape[2]):
        before.append(state)
        state = state * decay[:, :, i, :, None] + made[:, :, i]
    return (y + (q * g.exp()) @ torch.stack(before, 2)).flatten(2, 3)


STATE = B * H * 16 * E * 4


def _net(x: Tensor, w: Sequence[Tensor]) -> Tensor:
    return F.relu(x @ w[0]) @ w[1]


def _soft_actor_critic(
    o: Tensor, a: Tensor, r: Tensor, later: Tensor, noise: Tensor, policy: Any, q1: Any, q2: Any, t1: Any, t2: Any
) -> Tensor:
    def act(o: Tensor) -> tuple[Tensor, Tensor]:
        mean, s = _net(o, policy).chunk(2, -1)
        a = (mean + s.clamp(-5, 2).exp() * noise).tanh()
        return a, (-0.5 * noise.square() - s).sum(-1) - torch.log(1 - a.square() + 1e-6).sum(-1)

    b, logp = act(later)
    seen = torch.cat([later, b], -1)
    y = (r + 0.99 * (torch.minimum(_net(seen, t1), _net(seen, t2))[:, 0] - 0.2 * logp)).detach()
    given = torch.cat([o, a], -1)
    critics = F.mse_loss(_net(given, q1)[:, 0], y) + F.mse_loss(_net(given, q2)[:, 0], y)
    b, logp = act(o)
    seen, frozen = torch.cat([o, b], -1), [[w.detach() for w in q] for q in (q1, q2)]
    return critics + (0.2 * logp - torch.minimum(*(_net(seen, q) for q in frozen))[:, 0]).mean()


def _step(*args: Any) -> Any:
    """One of the actor and its critics, and of what these are compared with."""
    grads = sl.grad(_soft_actor_critic, (5, 6, 7))(*args)
    new = [[w - 0.1 * g for w, g in zip(*of, strict=True)] for of in zip(args[5:8], grads, strict=True)]
    return new, [[0.99 * t + 0.01 * w for t, w in zip(*of, strict=True)] for of in zip(args[8:], new[1:], strict=True)]


def _of_sizes(i: int, o: int) -> list[Tensor]:
    return [f32(i, 256), f32(256, o)]


AGENT = (*(f32(4096, n) for n in (32, 8)), f32(4096), *(f32(4096, n) for n in (32, 8)))
NETS = _of_sizes(32, 16), *[_of_sizes(40, 1)] * 4
WEIGHTS = 32 * 256 + 256 * 16 + 2 * (40 * 256 + 256)


def _four_bits(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    w = torch.stack([(packed & 15).to(x.dtype) - 8, (packed >> 4).to(x.dtype) - 8], 1).flatten(0, 1)
    return x @ (w.unflatten(0, (-1, 32)) * scales[:, None]).flatten(0, 1)


PACKED = torch.empty(D // 2, D, device="meta", dtype=torch.uint8)


def _tree_of_drafts(q: Tensor, k: Tensor, v: Tensor, past: Tensor, known: Tensor, parents: Tensor) -> Tensor:
    places = torch.arange(q.shape[2])
    mine = torch.eye(q.shape[2]).bool() | (parents == places[:, None])
    mask = torch.cat([torch.ones(q.shape[2], past.shape[2]).bool(), mine], 1)
    return F.scaled_dot_product_attention(q, torch.cat([past, k], 2), torch.cat([known, v], 2), attn_mask=mask)


def _scaled(x: Tensor, y: Tensor, w1: Tensor, w2: Tensor, scale: Tensor) -> Any:
    """A step of mixed precision, left out where a gradient is not finite."""
    loss = lambda ws: F.cross_entropy(F.relu(x @ ws[0]) @ ws[1], y) * scale
    grads = [g / scale for g in torch.func.grad(loss)((w1, w2))]
    fine = torch.stack([g.isfinite().all() for g in grads]).all()
    return [torch.where(fine, w - 0.1 * g, w) for w, g in zip((w1, w2), grads, strict=True)]


def _by_rows(ws: Sequence[Tensor], gs: Sequence[Tensor]) -> list[Tensor]:
    """Adaptive gradient clipping (Brock et al. 2021)."""
    pairs = list(zip(ws, gs, strict=True))
    norms = [(w.norm(dim=1, keepdim=True).clamp(min=1e-3), g.norm(dim=1, keepdim=True)) for w, g in pairs]
    return [torch.where(n > w / 100, g * (w / 100 / n.clamp(min=1e-6)), g) for g, (w, n) in zip(gs, norms, strict=True)]


ROWS = [
    Row("gradients of an encoder and a decoder, Megatron", sl.grad(_translated, 2),
        (f32(B, S, D), f32(B, S, D), [ATTENTION, MLP, ATTENTION, ATTENTION, MLP]),
        ("b s d", "b s d", [BY_HEADS, BY_HIDDEN, BY_HEADS, BY_HEADS, BY_HIDDEN]), X, 9 * reduced(ACT, 8), 9),
    Row("mixture with a shared expert", _shared_expert, MIXTURE, MIXED, X, reduced(ACT, 8), 1, out_specs="n d"),
    Row("gradients of a mixture with a shared expert", _of_sines(_shared_expert, 1, 2, 3, 4, 5), MIXTURE, MIXED, X,
        reduced(ACT, 8) + reduced(4096 * 2 * 4, 8), 2),
    Row("local and global tokens, sequence cut", _local_and_global, (f32(B, H, 2 * S, E),) * 3, ("b h s@x e",) * 3, X,
        2 * 64 * B * D * 4 + 2 * reduced(B * 16 * D * 4, 8), 4),
    Row("gradients of gated linear attention, heads cut", _of_sines(_gated_linear, 0, 1, 2, 3), (f32(B, H, S, E),) * 4,
        ("b h@x s e",) * 4, X),
    Row("gated linear attention, sequence cut", _gated_linear, (f32(B, H, S, E),) * 4, ("b h s@x e",) * 4, X,
        2 * exchanged(STATE * E, 8) + exchanged(STATE, 8), 3),
    Row("step of SAC with its targets, data parallel", _step, (*AGENT, *NETS),
        ("b@x o", "b@x a", "b@x", "b@x o", "b@x a", *["..."] * 5), X, reduced(WEIGHTS * 4, 8), 6),
    Row("packed weights of four bits, rows cut", _four_bits, (f32(64, D), PACKED, f32(D // 32, D)),
        ("n d@x", "d@x f", "g@x f"), X, reduced(64 * D * 4, 8), 1, out_specs="n f"),
    Row("packed weights of four bits, columns cut", _four_bits, (f32(64, D), PACKED, f32(D // 32, D)),
        ("n d", "d f@x", "g f@x"), X),
    Row("tree of drafts, heads cut", _tree_of_drafts,
        (*[bf16(B, H, 16, E)] * 3, *[bf16(B, H, 4096, E)] * 2, ints(16)), (*["b h@x s e"] * 5, "..."), X),
    Row("step that may be left out, FSDP", _scaled, (f32(4096, 256), ints(4096), f32(256, 512), f32(512, 64), f32()),
        ("n@x d", "n@x", "d@x f", "f@x d", ""), X, 2 * gathered((256 * 512 + 512 * 64) * 4, 8) + 3 * 7, 7),
    Row("gradients clipped row by row, columns cut", _by_rows, ([f32(D, D)] * 3,) * 2, (["d f@x"] * 3,) * 2, X,
        6 * reduced(D * 4, 8), 6),
]  # fmt: skip
