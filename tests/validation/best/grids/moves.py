"""Moves along a dim that is cut: what is sent is what crosses the borders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from tests.validation.best import Row, exchanged, f32, gathered, reduced

N, D = 1024, 64
ROW = D * 4
SEQ = {"seq": 8}


def _row(
    name: str, program: object, nbytes: float, collectives: int = 1, shape: tuple[int, ...] = (N, D), **more: object
) -> Row:
    spec = " ".join(["s@seq", *"_" * (len(shape) - 1)])
    return Row(name, program, (f32(*shape),), (spec,), SEQ, nbytes, collectives, **more)


def _before(x: Tensor) -> Tensor:
    return torch.cat([x[:1], x[:-1]])


def _shift(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 0))[:-1]


def _differences(x: Tensor) -> Tensor:
    return x - F.pad(x, (0, 0, 1, 0))[:-1]


def _blocks(x: Tensor) -> Tensor:
    """Beltagy et al. 2020, arXiv:2004.05150: of every sequence blocks that overlap by half, of its memory."""
    (b, t, d), w = x.shape, 8
    return x.as_strided((b, t // w - 1, 2 * w, d), (t * d, w * d, d, 1))


def _slots(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, D), x[:-1]])


def _windows(x: Tensor) -> Tensor:
    return x.unfold(0, 4, 1).mean(-1)


def _causal(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (3, 0)), w, groups=D)


def _sliced(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x, w, padding=3, groups=D)[..., :N]


def _rotated(x: Tensor) -> Tensor:
    return torch.cat([-x[N // 2 :], x[: N // 2]])


def _spatial(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def _halved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1, stride=2)


CONV = (f32(4, D, N), f32(D, 1, 4))
IMAGE = (f32(4, 3, 64, 64), f32(8, 3, 3, 3))
ROWS = [
    _row("roll by one", lambda x: x.roll(1, 0), ROW),
    _row("roll by three the other way", lambda x: x.roll(-3, 0), 3 * ROW),
    _row("the row before, the first twice", _before, ROW),
    _row("shift by a pad", _shift, ROW),
    _row("differences of rows by a pad", _differences, ROW),
    _row("differences of rows by slices", lambda x: x[1:] - x[:-1], ROW),
    _row("diff", lambda x: x.diff(dim=0), ROW),
    _row("slots that move on, one each", _slots, ROW, shape=(8, D)),
    _row("slots that move on, some each", _slots, ROW),
    _row("gradient of a shift by a pad", sl.grad(lambda x: (_shift(x) * x).sum()), 2 * ROW, 2),
    _row("windows of four rows", _windows, 3 * ROW),
    _row("blocks of memory that overlap", _blocks, 0, 0, shape=(16, N, D)),
    _row("gradient of blocks of memory that overlap", sl.grad(lambda x: (_blocks(x) ** 2).sum()), 0, 0,
         shape=(16, N, D)),
    _row("every second row", lambda x: x[::2], 0, 0),
    _row("flip", lambda x: x.flip(0), N * ROW / 8),
    _row("halves changed, one with another sign", _rotated, N * ROW / 8),
    _row("gradient of halves changed", sl.grad(lambda x: (_rotated(x) * x).sum()), 2 * N * ROW / 8, 2),
    _row("a row of the other end around", lambda x: F.pad(x.t()[None], (1, 0), mode="circular")[..., :-1], ROW),
    _row("upsampled by three", lambda x: F.interpolate(x.t()[None], scale_factor=3), 0, 0),
    Row("roll of two cut dims", lambda x: x.roll((1, 1), (0, 1)), (f32(N, D),), ("s@a d@b",), {"a": 4, "b": 2},
        ROW / 2 + N * 4 / 4, 2),
    Row("causal convolution", _causal, CONV, ("_ _ s@seq", "..."), SEQ, 4 * 3 * ROW, 1),
    Row("causal convolution by a slice", _sliced, CONV, ("_ _ s@seq", "..."), SEQ, 4 * 3 * ROW, 1),
    Row("gradients of a causal convolution", sl.grad(lambda x, w: _causal(x, w).sin().sum(), (0, 1)), CONV,
        ("_ _ s@seq", "..."), SEQ, 2 * 4 * 3 * ROW + reduced(D * 4 * 4, 8), 3),
    Row("image cut in height, 3 x 3", _spatial, IMAGE, ("_ _ h@seq _", "..."), SEQ, 2 * 4 * 3 * 64 * 4, 2),
    Row("gradient of an image's kernel", sl.grad(lambda x, w: _spatial(x, w).sin().sum(), 1), IMAGE,
        ("_ _ h@seq _", "..."), SEQ, 2 * 4 * 3 * 64 * 4 + reduced(8 * 27 * 4, 8), 3),
    Row("gradient of an image's kernel, halved", sl.grad(lambda x, w: _halved(x, w).sin().sum(), 1), IMAGE,
        ("_ _ h@seq _", "..."), SEQ, 4 * 3 * 64 * 4 + reduced(8 * 27 * 4, 8), 2),
    Row("two convolutions of an image", lambda x, w: (_spatial(x, w), _spatial(x.sin() * 0 + x, w), _spatial(x, -w)),
        IMAGE, ("_ _ h@seq _", "..."), SEQ, 4 * 4 * 3 * 64 * 4, 4),
    _row("mirrored at the border", lambda x: F.pad(x.t()[None], (1, 0), mode="reflect")[..., :-1], ROW),
    _row("every third row", lambda x: x[::3], 2 * ROW, shape=(1024, D)),
    _row("maximum pool without overlap", lambda x: F.max_pool1d(x.t(), 4).t(), 0, 0),
    _row("running sum", lambda x: x.cumsum(0), gathered(8 * ROW, 8), 1),
    _row("running sum from behind", lambda x: x.flip(0).cumsum(0).flip(0), gathered(8 * ROW, 8), 1),
    _row("gradient of a running sum", sl.grad(lambda x: x.cumsum(0).sin().sum()), 2 * gathered(8 * ROW, 8), 2),
    _row("gradient of a running sum from behind", sl.grad(lambda x: x.flip(0).cumsum(0).flip(0).sin().sum()),
         2 * gathered(8 * ROW, 8), 2),
    _row("gradient of running sums of exponentials", sl.grad(lambda x: x.logcumsumexp(0).sin().sum()),
         3 * gathered(8 * ROW, 8), 3),
    _row("gradient of a running product", sl.grad(lambda x: x.sigmoid().cumprod(0).sin().sum()),
         2 * gathered(8 * ROW, 8), 2, short={"bytes": 3.04, "collectives": 4},
         why="torch's formula is for factors of 0, too: it looks for the first, and multiplies again behind it"),
    _row("sum of all rows", lambda x: x.sum(0), reduced(ROW, 8), 1),
    _row("transposed: rows to columns", lambda x: sl.shard(x, "_ d@seq"), exchanged(N * ROW, 8), 1),
]  # fmt: skip
