"""Weights cut flat that are several in one, or heads that an axis does not divide: their pieces change hands once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, bf16, f32, gathered, reduced

B, S, D = 4, 2048, 4096
ACT = B * S * D * 2  # bytes of the activations
X = {"tensor": 8}
BOTH = {"data": 4, "tensor": 8}


def _attend(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, heads: int) -> Tensor:
    b, s, _ = x.shape
    q, k, v = (t.view(b, s, heads, -1).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1) @ out


def fused_attention(x: Tensor, w: Tensor, out: Tensor, heads: int = 32) -> Tensor:
    """Queries, keys and values from one weight."""
    return _attend(x, *(x @ w).chunk(3, -1), out, heads=heads)


def gated(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Two halves, one of which gates the other."""
    gate, value = (x @ up).chunk(2, -1)
    return (F.silu(gate) * value) @ down


def lstm(x: Tensor, wx: Tensor, wh: Tensor) -> Tensor:
    """Four gates in one, as torch has them."""
    h = c = torch.zeros(x.shape[0], wh.shape[0], dtype=x.dtype)
    for t in range(x.shape[1]):
        i, f, g, o = (x[:, t] @ wx + h @ wh).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


def heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, n: int = 12) -> Tensor:
    """Twelve heads, from weights that say nothing of them."""
    return _attend(x, x @ q, x @ k, x @ v, out, heads=n)


def _moved(nbytes: float, parts: int, devices: int = 8) -> float:
    """Bytes sent by the device that sends most, where a dim of equal `parts`, cut flat, is to be cut in each part."""
    pieces = [(i / devices, (i + 1) / devices) for i in range(devices)]

    def kept(i: int) -> float:
        low, high = pieces[i]
        return sum(max(0.0, min(high, (j + high) / parts) - max(low, (j + low) / parts)) for j in range(parts))

    return nbytes * max(1 / devices - kept(i) for i in range(devices))


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).float().sin().sum(), which)


def _step(x: Tensor, w: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    grads = sl.grad(lambda w, out: fused_attention(x, w, out).float().sin().sum(), (0, 1))(w, out)
    return tuple(p - 0.1 * g for p, g in zip((w, out), grads, strict=True))


FLAT = ("b s d", "d f@tensor", "f@tensor d")
FUSED = (bf16(B, S, D), bf16(D, 3 * D), bf16(D, D))
WIDE = (bf16(4 * B, S, D), *FUSED[1:])
QKV = D * 3 * D * 2
N, T = 512, 24
TWELVE = (f32(4, 1024, 768), *[f32(768, 768)] * 4)
SPECS = ("b s d", *["d h@tensor"] * 3, "h@tensor d")
# Of 12 heads, six devices have two; the last that has none sends its piece whole.
PIECES = 4 * 768 * 768 * 4 / 8
ROWS = [
    Row("fused queries, keys and values, cut flat", fused_attention, FUSED, FLAT, X,
        reduced(ACT, 8) + _moved(QKV, 3), 2, out_specs="b s d"),
    Row("gradients of fused queries, keys and values", _of_loss(fused_attention, 0, 1, 2), WIDE,
        ("b@data s d", *FLAT[1:]), BOTH, 2 * reduced(ACT, 8) + 2 * _moved(QKV, 3) + reduced(4 * D * D * 2 / 8, 4), 6),
    Row("SGD step of fused queries, keys and values", _step, WIDE, ("b@data s d", *FLAT[1:]), BOTH,
        reduced(ACT, 8) + 2 * _moved(QKV, 3) + reduced(4 * D * D * 2 / 8, 4), 5, out_specs=FLAT[1:]),
    Row("gated MLP of one weight, cut flat", gated, (f32(4096, 1024), f32(1024, 8192), f32(4096, 1024)),
        ("n d", "d f@tensor", "f@tensor d"), X, reduced(4096 * 1024 * 4, 8) + _moved(1024 * 8192 * 4, 2), 2,
        out_specs="n d"),
    Row("LSTM, gates cut flat", lstm, (f32(256, T, N), f32(N, 4 * N), f32(N, 4 * N)),
        ("b t d", "d g@tensor", "h g@tensor"), X, 2 * gathered(N * 4 * N * 4, 8), 2,
        short={"bytes": 1.6, "collectives": 12.5}, why="an axis is not offered elsewhere in place of a requested dim"),
    Row("twelve heads on eight devices", heads, TWELVE, SPECS, X, reduced(TWELVE[0].nbytes, 8) + PIECES, 5,
        work=2 * 8 / 12, out_specs="b s d"),
    Row("gradients of twelve heads on eight devices", _of_loss(heads, 1, 2, 3, 4), TWELVE, SPECS, X,
        reduced(TWELVE[0].nbytes, 8) + 2 * PIECES, 9, work=2 * 8 / 12),
]  # fmt: skip
