"""Samples for `shardlib.rules.nn_ops.fft`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.helpers.prover import Sample


def transforms() -> Iterator[Sample]:
    real = torch.randn(2, 5, 4, dtype=torch.float64)
    pairs = torch.randn(5, 3, 3, dtype=torch.complex128)
    for norm in (0, 1):
        for dims in ([0], [1, 2], [2, 0]):
            yield "_fft_r2c", (real, dims, norm, True), {}
            yield "_fft_c2c", (pairs, dims, norm, norm == 0), {}
        yield "_fft_r2c", (real, [1], norm, False), {}
        yield "_fft_c2r", (pairs, [1], norm, 4), {}
        yield "_fft_c2r", (pairs, [0, 2], norm, 5), {}
    yield "_fft_c2c", (pairs.to(torch.complex64), [1], 0, True), {}


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (transforms,)
