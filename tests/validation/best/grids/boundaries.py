"""What happens at the ends of cut dims: one-sided differences, ghost cells, pads that go round, and what is sorted or
solved along a cut dim."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, reduced

N, C = 512, 64
ROW = C * 4
X = {"x": 8}


def _of_sines(program: Any, *which: int) -> Any:
    return sl.grad(lambda *args: program(*args).sin().sum(), which or 0)


def _gradient(u: Tensor) -> Tensor:
    return torch.gradient(u)[0]


def _one_sided(u: Tensor) -> Tensor:
    d = torch.zeros_like(u)
    d[1:-1] = (u[2:] - u[:-2]) / 2
    d[0], d[-1] = u[1] - u[0], u[-1] - u[-2]
    return d


def _copied(u: Tensor) -> Tensor:
    v = u.clone()
    v[1:-1] = u[1:-1] + 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2])
    v[0], v[-1] = v[1], v[-2]
    return v


def _ghosts(u: Tensor) -> Tensor:
    p = torch.empty(u.shape[0] + 2, u.shape[1])
    p[1:-1], p[0], p[-1] = u, u[-1], u[0]
    return u + 0.1 * (p[2:] - 2 * u + p[:-2])


def _mirrored(u: Tensor) -> Tensor:
    p = torch.zeros(u.shape[0] + 2, u.shape[1])
    p[1:-1], p[:1], p[-1:] = u, u[:1], u[-1:]
    return u + 0.1 * (p[2:] - 2 * u + p[:-2])


def _around(u: Tensor) -> Tensor:
    p = F.pad(u[None], (0, 0, 2, 2), mode="circular")[0]
    return p[4:] - 8 * p[3:-1] + 8 * p[1:-3] - p[:-4]


def _signal(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (3, 3), mode="circular"), w)


def _sliced(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sort(0).values - (y @ w).sort(0).values).square().mean()


def _solution(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.lstsq(a, b).solution


def _residuals(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.lstsq(a, b, driver="gels").residuals


def _row(name: str, program: Any, messages: int, rows: int = 1, **more: Any) -> Row:
    return Row(name, program, (f32(N, C),), ("n@x c",), X, messages * rows * ROW, messages, **more)


SIGNAL, KERNEL = f32(4, 16, 1024), f32(16, 16, 7)
POINTS, SAMPLES = 8192, 65536
WRITTEN = "a single row by its index (`u[0]`) is sent by itself; the range `u[:1]` moves with the borders"
AROUND = "gradients of what goes round are sent home, and added there, after those of the stencil were"
ROWS = [
    _row("torch.gradient along a cut dim", _gradient, 2),
    _row("gradient of torch.gradient along a cut dim", _of_sines(_gradient), 4),
    _row("one-sided differences at both ends", _one_sided, 2),
    _row("gradient of one-sided differences at both ends", _of_sines(_one_sided), 4,
         short={"bytes": 1.44, "collectives": 1.25}, why=WRITTEN),
    _row("ends that copy what is beside them", _copied, 2),
    _row("ghost cells that go round, written", _ghosts, 2, short={"bytes": 2.75, "collectives": 2.0}, why=WRITTEN),
    _row("ghost cells that mirror, written", _mirrored, 2),
    _row("fourth order by a pad of one dim that goes round", _around, 2, rows=2),
    Row("convolution of a signal that goes round", _signal, (SIGNAL, KERNEL), ("b c t@x", "..."), X,
        2 * 3 * 4 * 16 * 4, 2),
    Row("gradients of a convolution of a signal that goes round", _of_sines(_signal, 0, 1), (SIGNAL, KERNEL),
        ("b c t@x", "..."), X, 4 * 3 * 4 * 16 * 4 + reduced(16 * 16 * 7 * 4, 8), 5,
        short={"bytes": 1.1, "collectives": 1.4}, why=AROUND),
    Row("gradient of a sliced Wasserstein distance, samples cut", sl.grad(_sliced),
        (f32(POINTS, 64), f32(POINTS, 64), f32(64, 64)), ("n@x d", "n@x d", "..."), X,
        3 * exchanged(POINTS * 64 * 4, 8), 3),
    Row("least squares, samples cut", _solution, (f32(SAMPLES, 16), f32(SAMPLES, 4)), ("n@x d", "n@x e"), X,
        gathered(8 * 16 * 20 * 4, 8), 1),
    Row("what least squares leave, samples cut", _residuals, (f32(SAMPLES, 16), f32(SAMPLES, 4)),
        ("n@x d", "n@x e"), X, gathered(8 * 17 * 20 * 4, 8), 1),
]  # fmt: skip
