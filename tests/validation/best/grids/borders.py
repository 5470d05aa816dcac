"""Pads, windows, stencils and pieces of a cut dim: what is sent is what crosses the borders, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, reduced

N, W = 512, 256
LINE, COLUMN = W * 4, N // 4 * 4  # bytes of one line, and of a column's piece where lines are cut four ways
ROWS_CUT, BOTH_CUT = {"h": 8}, {"h": 4, "w": 2}
B, C, H = 4, 32, 64
IMAGE, KERNEL = (B, C, 8 * H, H), (C, C, 3, 3)  # eight rows for each of 64 devices
BORDER = 2 * B * C * (H + 2) * 4
D = 64
T = 8 * H


def _grad(program: object) -> object:
    return sl.grad(lambda *args: program(*args).sin().sum())


def _reflected(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), w)


def _around(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), w)


def _windows(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1).sin().amax(-1)


def _pool(x: Tensor) -> Tensor:
    return F.avg_pool1d(F.pad(x.mT, (3, 0)), 4, 1).mT


def _local_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1) for x in (k, v))
    return torch.einsum("bsw,bsdw->bsd", torch.einsum("bsd,bsdw->bsw", q, k).softmax(-1), v)


def _spectra(x: Tensor) -> Tensor:
    return torch.stft(x, 64, 16, window=torch.hann_window(64), return_complex=True).abs().square().sum((1, 2))


def _blended(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def _areas(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="area")


def _around_each(u: Tensor) -> Tensor:
    return (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4


def _joined(u: Tensor) -> Tensor:
    for _ in range(3):
        u = torch.cat([u[:1], torch.cat([u[1:-1, :1], _around_each(u), u[1:-1, -1:]], 1), u[-1:]], 0)
    return u


def _written(u: Tensor) -> Tensor:
    for _ in range(3):
        v = u.clone()
        v[1:-1, 1:-1] = _around_each(u)
        u = v
    return u


def _padded(u: Tensor) -> Tensor:
    for _ in range(3):
        u = u + 0.1 * (_around_each(F.pad(u, (1, 1, 1, 1))) - u)
    return u


def _periodic(u: Tensor) -> Tensor:
    for _ in range(3):
        u = _around_each(F.pad(u[None, None], (1, 1, 1, 1), mode="circular")[0, 0])
    return u


def _nine(x: Tensor) -> Tensor:
    p = F.pad(x, (1, 1, 1, 1))
    return sum((1 + i + 3 * j) * p[i : i + N, j : j + W] for i in range(3) for j in range(3))


def _turned(x: Tensor) -> Tensor:
    return sum((1 + i + 3 * j) * x.roll((i - 1, j - 1), (0, 1)) for i in range(3) for j in range(3))


def _fourth(x: Tensor) -> Tensor:
    return x.roll(2, 0) - 8 * x.roll(1, 0) + 8 * x.roll(-1, 0) - x.roll(-2, 0)


def _upwind(u: Tensor) -> Tensor:
    for _ in range(3):
        back, ahead = u[1:-1] - u[:-2], u[2:] - u[1:-1]
        u = u.slice_scatter(u[1:-1] - 0.1 * torch.where(u[1:-1] > 0, back, ahead), 0, 1, -1)
    return u


def _heat(u: Tensor) -> Tensor:
    for _ in range(3):
        u = u.slice_scatter(u[1:-1] + 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2]), 0, 1, -1)
    return u


def _variation(u: Tensor) -> Tensor:
    return (u[1:] - u[:-1]).abs().sum() + (u[:, 1:] - u[:, :-1]).abs().sum()


# Single elements of a cut dim ----------------------------------------------------------------------------------------

LAYERS, WIDE, BATCH = 8, 1024, 65536
STACK = LAYERS * WIDE * WIDE * 4
EIGHT = {"x": 8}
STATE, TOTAL = 2 * 8 * 16 * 32 * 16 * 4, 2 * 8 * 16 * 4


def _layers(x: Tensor, w: Tensor) -> Tensor:
    for k in range(LAYERS):
        x = torch.tanh(x @ w[k])
    return x


def _walsh_hadamard(x: Tensor) -> Tensor:
    for s in (2**k for k in range(10)):
        v = x.view(-1, 2, s, x.shape[1])
        x = torch.stack([v[:, 0] + v[:, 1], v[:, 0] - v[:, 1]], 1).reshape(x.shape)
    return x


def _blocks(x: Tensor) -> Tensor:
    return x.unflatten(0, (16, -1)).softmax(1).sin().sum()


def _chunks(x: Tensor, a: Tensor, b: Tensor, c: Tensor, size: int = 64) -> Tensor:
    """Mamba-2: chunks of a sequence, and a state that goes from each to the next."""
    x, a, b, c = (v.unflatten(1, (-1, size)) for v in (x, a, b, c))
    sums = a.cumsum(2)
    later = torch.ones(size, size).triu(1).bool()[..., None]
    decay = torch.exp((sums[:, :, :, None] - sums[:, :, None]).masked_fill(later, -torch.inf))
    y = torch.einsum("bcln,bcsn,bclsh,bcshp->bclhp", c, b, decay, x)
    states = torch.einsum("bcsn,bcsh,bcshp->bchpn", b, torch.exp(sums[:, :, -1:] - sums), x)
    total, state, before = torch.exp(sums[:, :, -1]), torch.zeros_like(states[:, 0]), []
    for k in range(x.shape[1]):
        before.append(state)
        state = state * total[:, k, :, None, None] + states[:, k]
    return (y + torch.einsum("bcln,bchpn,bclh->bclhp", c, torch.stack(before, 1), torch.exp(sums))).flatten(1, 2)


def _row(name: str, program: object, nbytes: float, collectives: int, **more: object) -> Row:
    return Row(name, program, (f32(N, W),), ("h@h w",), ROWS_CUT, nbytes, collectives, **more)


def _plane(name: str, program: object, nbytes: float, collectives: int, **more: object) -> Row:
    return Row(name, program, (f32(N, W),), ("h@h w@w",), BOTH_CUT, nbytes, collectives, **more)


STEP, CROSS = 2 * LINE, 2 * LINE / 2 + 2 * COLUMN
CORNERS = "three rows of windows fetch columns, each for itself: nothing holds its borders for all of them"
ROWS = [
    Row("reflected pad, then 3 x 3", _reflected, (f32(*IMAGE), f32(*KERNEL)), ("b c h@x w", "..."), {"x": 64},
        BORDER, 2),
    Row("gradient of an image, reflected, by 3 x 3", _grad(_reflected), (f32(*IMAGE), f32(*KERNEL)),
        ("b c h@x w", "..."), {"x": 64}, 2 * BORDER, 4, work=1.06),  # those at the ends have what is reflected, too
    Row("periodic pad, then 3 x 3", _around, (f32(*IMAGE), f32(*KERNEL)), ("b c h@x w", "..."), {"x": 64},
        BORDER, 2),
    Row("pad, then windows", _windows, (f32(2, T, D),), ("b s@x d",), {"x": 64}, 2 * 3 * D * 4, 1),
    Row("gradient of a pad, then windows", _grad(_windows), (f32(2, T, D),), ("b s@x d",), {"x": 64},
        2 * 2 * 3 * D * 4, 2),
    Row("pad, then a pool", _pool, (f32(2, T, D),), ("b s@x d",), {"x": 64}, 2 * 3 * D * 4, 1),
    Row("attention in windows by unfold", _local_attention, (f32(2, T, D),) * 3, ("b s@x d",) * 3, {"x": 64},
        2 * 2 * 3 * D * 4, 2),
    Row("spectra of windows, time cut", _spectra, (f32(4, 1 << 16),), ("b t@x",), EIGHT,
        4 * 48 * 4 + reduced(4 * 4, 8), 3),
    Row("bilinear, twice as large", _blended, (f32(4, 32, 256, 64),), ("b c h@x w",), EIGHT, 2 * 4 * 32 * 64 * 4, 2),
    Row("gradient of bilinear", _grad(_blended), (f32(4, 32, 256, 64),), ("b c h@x w",), EIGHT,
        4 * 4 * 32 * 64 * 4, 4),
    Row("areas, twice as large", _areas, (f32(4, 32, 256, 64),), ("b c h@x w",), EIGHT, 0, 0),
    Row("gradient of areas, twice as large", _grad(_areas), (f32(4, 32, 256, 64),), ("b c h@x w",), EIGHT, 0, 0),
    Row("gradient of an image made twice as large by a transposed convolution",
        _grad(lambda x: F.conv_transpose2d(x, torch.ones(16, 16, 2, 2), stride=2)), (f32(8, 16, 64, 64),),
        ("b c h@x w",), EIGHT, 0, 0, out_specs="b c h@x w"),
    _row("Jacobi by slices, joined", _joined, 3 * STEP, 6),
    _plane("Jacobi by slices, joined, both dims", _joined, 3 * CROSS, 12),
    _row("Jacobi by slices, written", _written, 3 * STEP, 6),
    _plane("Jacobi by slices, written, both dims", _written, 3 * CROSS, 12),
    _row("gradient of Jacobi by slices", _grad(_joined), 6 * STEP, 12),
    _plane("gradient of Jacobi by slices, both dims", _grad(_joined), 6 * CROSS, 24),
    _row("Laplace by a pad", _padded, 3 * STEP, 6),
    _row("gradient of Laplace by a pad", _grad(_padded), 6 * STEP, 12),
    _row("Jacobi by a periodic pad", _periodic, 3 * STEP, 6),
    _row("nine points of a pad", _nine, STEP, 2),
    _plane("nine points of a pad, both dims", _nine, CROSS, 4, short={"bytes": 1.8, "collectives": 1.8}, why=CORNERS),
    _row("nine points by rolls", _turned, STEP, 2),
    _row("fourth order by rolls", _fourth, 2 * STEP, 2),
    _row("gradient of fourth order by rolls", _grad(_fourth), 4 * STEP, 4),
    _row("upwind differences", _upwind, 3 * STEP, 6),
    _row("heat by second differences", _heat, 3 * STEP, 6),
    _row("gradient of heat by second differences", _grad(_heat), 6 * STEP, 12),
    _row("gradient of total variation", sl.grad(_variation), STEP, 2),
    # Of 293 rows a device has none in its blocks, and of their 384, none at home.
    Row("gradient of blocks that seven devices have other rows of", sl.grad(_blocks), (f32(2048, 64),), ("n@x d",),
        {"x": 7}, (293 + 384) * 64 * 4, 2, work=1.32),
    Row("layers of a stack that is cut over them", _layers, (f32(BATCH, WIDE), f32(LAYERS, WIDE, WIDE)),
        ("n@x d", "l@x d e"), EIGHT, gathered(STACK, 8), 8),
    Row("Walsh-Hadamard over a cut dim", _walsh_hadamard, (f32(1 << 10, 1024),), ("n@x d",), EIGHT,
        2 * exchanged((1 << 20) * 4, 8), 2, out_specs="n@x d"),
    Row("chunks of a sequence, one after the other", _chunks,
        (f32(2, 512, 16, 32), f32(2, 512, 16), f32(2, 512, 16), f32(2, 512, 16)),
        ("b l@x h p", "b l@x h", "b l@x n", "b l@x n"), EIGHT, 2 * exchanged(STATE, 8) + exchanged(TOTAL, 8), 3),
]  # fmt: skip
