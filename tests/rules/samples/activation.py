"""Samples for `shardlib.rules.nn_ops.activation`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.helpers.prover import Sample


def _f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def halved() -> Iterator[Sample]:
    for shape, half, dim in (((3, 8), (3, 4), -1), ((6, 5), (3, 5), 0), ((2, 2, 3), (2, 1, 3), 1)):
        x, h = (lambda: _f(*shape)), (lambda: _f(*half))  # noqa: B023
        yield "glu", (x(), dim), {}
        yield "glu_backward", (h(), x(), dim), {}
        yield "glu_jvp", (h(), x(), x(), dim), {}
        yield "glu_backward_jvp", (x(), h(), x(), h(), x(), dim), {}
    yield "glu", (_f(3, 6),), {}


def untagged() -> Iterator[Sample]:
    yield "hardswish", (_f(3, 5),), {}
    yield "hardshrink_backward", (_f(3, 5), _f(3, 5), 0.5), {}
    yield "softshrink_backward", (_f(3, 5), _f(3, 5), 0.5), {}
    yield "rrelu_with_noise_backward", (_f(3, 5), _f(3, 5), _f(3, 5), 0.1, 0.3, False, False), {}
    yield "rrelu_with_noise_backward", (_f(3, 5), _f(3, 5), _f(3, 5), 0.1, 0.3, True, False), {}
    for weight in (_f(3, 1), _f(1, 1)):
        yield "_prelu_kernel", (_f(2, 3, 5), weight), {}
        yield "_prelu_kernel_backward", (_f(2, 3, 5), _f(2, 3, 5), weight), {}
    yield "_add_relu.Tensor", (_f(3, 5).float(), _f(3, 5).float()), {"alpha": 2}
    yield "_add_relu.Scalar", (_f(3, 5).float(), 0.5), {}


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (halved, untagged)
