"""Samples for `shardlib.rules.nn_ops.convolution`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.helpers.prover import Sample
from tests.rules.samples.make import f

aten = torch.ops.aten


def conv(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    output_padding: Any = 0,
    groups: int = 1,
    *,
    transposed: bool = False,
    bias: bool = False,
    mask: tuple[bool, bool, bool] = (True, True, True),
) -> Iterator[Sample]:
    """A convolution and its backward."""
    n = len(x) - 2
    s, p, d, o = ([v] * n if isinstance(v, int) else list(v) for v in (stride, padding, dilation, output_padding))
    given, w = f(*x), f(*weight)
    channels = weight[1] * groups if transposed else weight[0]
    settings = (s, p, d, transposed, o, groups)
    yield "convolution", (given, w, f(channels) if bias else None, *settings), {}
    grad = torch.randn_like(aten.convolution.default(given, w, None, *settings))
    yield "convolution_backward", (grad, given, w, [channels] if bias else None, *settings, list(mask)), {}


def convolution_1d() -> Iterator[Sample]:
    """Kernels of 1, 2, 3; stride 1 to 3, also beyond the kernel; dilated, padded; results of one element."""
    yield from conv((2, 3, 7), (2, 3, 1), bias=True)
    yield from conv((1, 1, 7), (1, 1, 3), padding=1)
    yield from conv((1, 2, 8), (1, 2, 2), 2)
    yield from conv((1, 1, 9), (1, 1, 2), 3, bias=True)
    yield from conv((1, 1, 11), (1, 1, 3), 2, padding=1)
    yield from conv((1, 1, 9), (2, 1, 3), padding=2, dilation=2)
    yield from conv((1, 1, 10), (1, 1, 3), 3, padding=2, dilation=2, bias=True)
    yield from conv((1, 1, 5), (1, 1, 5), padding=3)
    yield from conv((1, 1, 6), (1, 1, 6))
    yield from conv((1, 1, 3), (1, 1, 2), padding=4, bias=True)
    yield from conv((1, 1, 1), (1, 1, 3), padding=3)


def convolution_2d() -> Iterator[Sample]:
    yield from conv((2, 2, 6, 5), (2, 2, 3, 2), padding=(1, 0), bias=True)
    yield from conv((1, 1, 8, 6), (1, 1, 2, 2), 2)
    yield from conv((1, 1, 5, 7), (2, 1, 3, 3), (2, 1), (1, 2), (1, 2), mask=(True, True, False))


def convolution_3d() -> Iterator[Sample]:
    yield from conv((1, 1, 4, 3, 5), (1, 1, 2, 3, 2), (2, 1, 1), (0, 1, 0), bias=True)


def convolution_weights() -> Iterator[Sample]:
    """Gradients of the weight alone, and of the bias."""
    yield from conv((2, 2, 7), (2, 2, 3), padding=1, bias=True, mask=(False, True, True))
    yield from conv((1, 1, 11), (1, 1, 3), 2, padding=1, mask=(False, True, False))
    yield from conv((1, 1, 10), (2, 1, 3), 3, padding=2, dilation=2, bias=True, mask=(False, True, True))
    yield from conv((1, 1, 6, 5), (2, 1, 3, 2), padding=(2, 0), bias=True, mask=(False, False, True))


def convolution_channels() -> Iterator[Sample]:
    """Input channels are summed over, groups pass through; empty shards of all of them."""
    yield from conv((3, 5, 4), (4, 5, 2), bias=True)
    yield from conv((2, 3, 4), (6, 1, 3), padding=1, groups=3, bias=True)
    yield from conv((1, 6, 4), (4, 3, 2), groups=2, mask=(False, True, True))
    yield from conv((1, 6, 3), (6, 2, 3), padding=1, groups=3, bias=True, mask=(True, False, True))


def convolution_transposed() -> Iterator[Sample]:
    yield from conv((2, 3, 4), (3, 2, 2), 2, transposed=True, bias=True)
    yield from conv((1, 1, 5), (1, 1, 3), 2, padding=1, output_padding=1, transposed=True, bias=True)
    yield from conv((1, 1, 5), (1, 1, 3), padding=1, transposed=True)
    yield from conv((1, 1, 4), (1, 1, 2), 3, output_padding=2, transposed=True, bias=True)
    yield from conv((1, 1, 6), (1, 1, 1), 3, output_padding=1, transposed=True, bias=True)
    yield from conv((1, 1, 5), (1, 1, 3), 2, padding=3, dilation=2, transposed=True)
    yield from conv((1, 4, 3), (4, 1, 2), 1, groups=2, transposed=True, bias=True)
    yield from conv((1, 1, 3, 4), (1, 2, 2, 3), 2, (0, 1), 1, (1, 0), transposed=True, bias=True)
    yield from conv((1, 1, 1), (1, 1, 4), 2, transposed=True)


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (
    convolution_1d,
    convolution_2d,
    convolution_3d,
    convolution_weights,
    convolution_channels,
    convolution_transposed,
)
