"""Images and what makes them: blocks of diffusion, convolutions over a cut height or time, windows of video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, reduced

X = {"x": 8}


def _of_loss(program: Callable[..., Tensor], *which: int) -> Callable[..., Any]:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


DT = {"data": 4, "tensor": 4}
B, S, D, H, FF = 8, 1024, 1024, 16, 4096
E = D // H
ACT = B * S * D * 4


def _dit(
    x: Tensor, c: Tensor, ada: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, up: Tensor, down: Tensor
) -> Any:
    sa, ba, ga, sm, bm, gm = (F.silu(c) @ ada)[:, None].chunk(6, -1)
    h = F.layer_norm(x, (D,)) * (1 + sa) + ba
    qq, kk, vv = ((h @ w).unflatten(-1, (H, E)).transpose(1, 2) for w in (q, k, v))
    x = x + ga * (F.scaled_dot_product_attention(qq, kk, vv).transpose(1, 2).flatten(2) @ o)
    h = F.layer_norm(x, (D,)) * (1 + sm) + bm
    return x + gm * (F.gelu(h @ up, approximate="tanh") @ down)


DIT = (f32(B, S, D), f32(B, D), f32(D, 6 * D), *[f32(D, D)] * 4, f32(D, FF), f32(FF, D))
MEG = "b s d", "b d", "...", *["d h@x"] * 3, "h@x d", "d f@x", "f@x d"


def _res(x: Tensor, t: Tensor, a: Tensor, b: Tensor, w: Tensor) -> Any:
    h = F.conv2d(F.silu(F.group_norm(x, 8)), a, padding=1) + (F.silu(t) @ w)[:, :, None, None]
    return x + F.conv2d(F.silu(F.group_norm(h, 8)), b, padding=1)


C = 64
IM = (f32(4, C, 64, 64), f32(4, 128), f32(C, C, 3, 3), f32(C, C, 3, 3), f32(128, C))
LINE = 4 * C * 64 * 4


def _guided(x: Tensor, c: Tensor, n: Tensor, w: Tensor, u: Tensor) -> Any:
    net = lambda x, c: F.gelu(torch.cat([x, c], -1) @ w) @ u
    both = net(torch.cat([x, x]), torch.cat([c, n.expand_as(c)]))
    a, b = both.chunk(2)
    return b + 7.5 * (a - b)


def _convnext(x: Tensor, dw: Tensor, g: Tensor, up: Tensor, down: Tensor) -> Any:
    h = F.conv2d(x, dw, padding=3, groups=C).permute(0, 2, 3, 1)
    h = F.gelu(F.layer_norm(h, (C,)) @ up) @ down * g
    return x + h.permute(0, 3, 1, 2)


def _squeeze(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    h = F.conv2d(x, w)
    s = torch.sigmoid(F.relu(h.mean((2, 3)) @ a) @ b)
    return h * s[:, :, None, None]


def _wavenet(x: Tensor, *ws: Tensor) -> Any:
    for k, w in enumerate(ws):
        h = F.conv1d(F.pad(x, (2**k, 0)), w, dilation=2**k)
        a, b = h.chunk(2, 1)
        x = x + a.tanh() * b.sigmoid()
    return x


def _sobel(x: Tensor) -> Any:
    k = torch.tensor([[1.0, 2, 1], [0, 0, 0], [-1, -2, -1]])
    g = F.conv2d(x, torch.stack([k, k.t()])[:, None], padding=1)
    return (g.square().sum(1) + 1e-6).sqrt()


def _video(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    def att(z: Any) -> Any:
        qq, kk, vv = ((z @ w).unflatten(-1, (4, -1)).transpose(-2, -3) for w in (q, k, v))
        return z + F.scaled_dot_product_attention(qq, kk, vv).transpose(-2, -3).flatten(-2)

    x = att(x)
    return att(x.transpose(1, 2)).transpose(1, 2)


def _ssim(x: Tensor, y: Tensor) -> Any:
    """Wang et al. 2004; borders of squares and products are made of those of the images."""
    window = torch.exp(-((torch.arange(11) - 5.0) ** 2) / 4.5)
    window = window / window.sum()
    mx, my, xx, yy, xy = (
        F.conv2d(F.conv2d(z, window.view(1, 1, 11, 1)), window.view(1, 1, 1, 11)) for z in (x, y, x * x, y * y, x * y)
    )
    top = (2 * mx * my + 1e-4) * (2 * (xy - mx * my) + 9e-4)
    return (top / ((mx * mx + my * my + 1e-4) * (xx - mx * mx + yy - my * my + 9e-4))).mean()


def _pyramid(x: Tensor, y: Tensor, how: str = "bilinear", **more: Any) -> Tensor:
    """Two images as large as they are, and at two smaller sizes."""
    total = F.mse_loss(x, y)
    for _ in range(2):
        x, y = (F.interpolate(z, scale_factor=0.5, mode=how, **more) for z in (x, y))
        total = total + F.mse_loss(x, y)
    return total


VID = (f32(2, 16, 256, 256), *[f32(256, 256)] * 3)
VB = 2 * 16 * 256 * 256 * 4


def _vit(x: Tensor, w: Tensor, cls: Tensor, pos: Tensor) -> Any:
    x = F.conv2d(x, w, stride=16).flatten(2).mT
    return torch.cat([cls.expand(len(x), 1, -1), x], 1) + pos


def _disc(x: Tensor, w: Tensor, u: Tensor) -> Any:
    return F.leaky_relu(x @ w, 0.2) @ u


def _wgan(w: Tensor, u: Tensor, x: Tensor, z: Tensor, eps: Tensor) -> Any:
    y = eps * x + (1 - eps) * z
    g = torch.func.grad(lambda y: _disc(y, w, u).sum())(y)
    return _disc(z, w, u).mean() - _disc(x, w, u).mean() + 10 * ((g.norm(dim=1) - 1) ** 2).mean()


def _coupling(x: Tensor, w: Tensor, u: Tensor) -> Any:
    a, b = x.chunk(2, -1)
    s, t = (F.relu(a @ w) @ u).chunk(2, -1)
    return (torch.cat([a, b * s.tanh().exp() + t], -1), s.tanh().sum(-1))


def _flow(w: Tensor, u: Tensor, x: Tensor) -> Any:
    total = 0
    for k in range(2):
        x, l = _coupling(x, w[k], u[k])
        x = x.flip(-1)
        total = total + l
    return (0.5 * x.square().sum(-1) - total).mean()


ROWS = [
    Row("DiT block, Megatron", _dit, DIT, MEG, X, 2 * reduced(ACT, 8), 2, out_specs="b s d"),
    Row("gradients of a DiT block, Megatron", _of_loss(_dit, *range(9)), DIT, MEG, X, 4 * reduced(ACT, 8), 4),
    Row("gradients of a DiT block, data and tensor", _of_loss(_dit, *range(2, 9)), DIT,
        ("b@data s d", "b@data d", "...", *["d h@tensor"] * 3, "h@tensor d", "d f@tensor", "f@tensor d"), DT,
        3 * reduced(ACT / 4, 4) + reduced((4 * D * D + 2 * D * FF) * 4 / 4, 4) + reduced(6 * D * D * 4, 4),
        3 + 6 + 1 + 2),
    Row("residual block of diffusion, height cut", _res, IM, ("b c h@x w", *["..."] * 4), X,
        2 * 2 * LINE + 2 * 2 * reduced(4 * 8 * 4, 8), 8),
    Row("gradients of a residual block of diffusion, height cut", _of_loss(_res, 2, 3, 4), IM,
        ("b c h@x w", *["..."] * 4), X,
        3 * 2 * LINE + 6 * reduced(4 * 8 * 4, 8) + reduced((2 * 9 * C * C + 4 * C) * 4, 8), 15),
    Row("gradients of a residual block, batch cut", _of_loss(_res, 2, 3, 4),
        (f32(16, C, 64, 64), f32(16, 128), *IM[2:]), ("b@x c h w", "b@x t", *["..."] * 3), X,
        reduced((2 * 9 * C * C + 128 * C) * 4, 8), 3),
    Row("classifier-free guidance, batch cut", _guided,
        (f32(4096, D), f32(4096, 64), f32(64), f32(D + 64, D), f32(D, D)), ("b@x d", "b@x c", "...", "...", "..."),
        X),
    Row("ConvNeXt block, height cut", _convnext,
        (f32(4, C, 128, 128), f32(C, 1, 7, 7), f32(C), f32(C, 4 * C), f32(4 * C, C)), ("b c h@x w", *["..."] * 4), X,
        2 * 3 * 4 * C * 128 * 4, 2),
    Row("gradients of a ConvNeXt block, height cut", _of_loss(_convnext, 0, 1),
        (f32(4, C, 128, 128), f32(C, 1, 7, 7), f32(C), f32(C, 4 * C), f32(4 * C, C)), ("b c h@x w", *["..."] * 4), X,
        4 * 3 * 4 * C * 128 * 4 + reduced(C * 49 * 4, 8), 5),
    Row("squeeze and excitation, height cut", _squeeze,
        (f32(8, C, 64, 64), f32(4 * C, C, 1, 1), f32(4 * C, 16), f32(16, 4 * C)), ("b c h@x w", *["..."] * 3), X,
        reduced(8 * 16 * 4, 8), 1),
    Row("squeeze and excitation, channels cut", _squeeze,
        (f32(8, C, 64, 64), f32(4 * C, C, 1, 1), f32(4 * C, 16), f32(16, 4 * C)),
        ("b c h w", "o@x i k l", "o@x m", "m o@x"), X, reduced(8 * 16 * 4, 8), 1),
    Row("dilated causal convolutions, time cut", _wavenet, (f32(2, 64, 8192), *[f32(128, 64, 2)] * 5),
        ("b c t@x", *["..."] * 5), X, 2 * 64 * 31 * 4, 5),
    Row("gradients of dilated causal convolutions, time cut", _of_loss(_wavenet, 1, 2, 3, 4, 5),
        (f32(2, 64, 8192), *[f32(128, 64, 2)] * 5), ("b c t@x", *["..."] * 5), X,
        2 * 64 * 31 * 4 + 2 * 64 * 30 * 4 + 5 * reduced(128 * 64 * 2 * 4, 8), 14),
    Row("pixels shuffled, height cut", lambda x, w: F.pixel_shuffle(F.conv2d(x, w), 2),
        (f32(4, C, 64, 64), f32(4 * C, C, 1, 1)), ("b c h@x w", "..."), X),
    Row("gradients of shuffled pixels, height cut", _of_loss(lambda x, w: F.pixel_shuffle(F.conv2d(x, w), 2), 0),
        (f32(4, C, 64, 64), f32(4 * C, C, 1, 1)), ("b c h@x w", "..."), X),
    Row("edges by Sobel, height cut", _sobel, (f32(16, 1, 512, 512),), ("b c h@x w",), X, 2 * 16 * 512 * 4, 2),
    Row("SSIM of two images, height cut", _ssim, (f32(8, 1, 512, 512),) * 2, ("b c h@x w",) * 2, X,
        2 * 8 * 10 * 512 * 4 + reduced(4, 8), 3),
    Row("gradient of a pyramid of two images, height cut", sl.grad(_pyramid), (f32(8, 1, 512, 512),) * 2,
        ("b c h@x w",) * 2, X),
    # Of twice as many rows as become one, half are those of a neighbor; what they get of the gradient comes back.
    Row("gradient of a smooth pyramid of two images, height cut",
        sl.grad(lambda x, y: _pyramid(x, y, "bicubic", antialias=True)), (f32(8, 1, 512, 512),) * 2,
        ("b c h@x w",) * 2, X, 6 * 3 * 8 * (512 + 256) * 4, 6 * 2),
    Row("attention over space, then time; time cut", _video, VID, ("b t@x s d", *["..."] * 3), X,
        2 * exchanged(VB, 8), 2, out_specs="b t@x s d"),
    Row("gradient of attention over space, then time", _of_loss(_video, 0), VID, ("b t@x s d", *["..."] * 3), X,
        2 * exchanged(VB, 8), 2),
    Row("mixup with the batch turned", lambda x, l: l * x + (1 - l) * x.flip(0), (f32(1024, D), f32(1024, 1)),
        ("b@x d", "b@x _"), X, 1024 * D * 4 / 8, 1),
    Row("gradients of a ViT's tokens, batch cut", _of_loss(_vit, 1, 2, 3),
        (f32(64, 3, 224, 224), f32(768, 3, 16, 16), f32(1, 1, 768), f32(197, 768)),
        ("b@x c h w", "...", "...", "..."), X, reduced((768 * 768 + 768 + 197 * 768) * 4, 8), 3),
    Row("gradients of a critic with a penalty on its gradient", sl.grad(_wgan, (0, 1)),
        (f32(256, 512), f32(512, 1), *[f32(4096, 256)] * 2, f32(4096, 1)), ("...", "...", "n@x d", "n@x d", "n@x _"),
        X, reduced((256 * 512 + 512) * 4, 8), 2),
    Row("gradients of a coupling flow, data parallel", sl.grad(_flow, (0, 1)),
        (f32(2, 128, 256), f32(2, 256, 256), f32(4096, 256)), ("...", "...", "n@x d"), X,
        reduced(2 * (128 * 256 + 256 * 256) * 4, 8), 2),
]  # fmt: skip
