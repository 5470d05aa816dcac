"""Samples for `shardlib.rules.tensor_ops.cumulative`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from tests.helpers.prover import Sample
from tests.rules.samples.make import f, i, s


def both(*names: str) -> Iterator[str]:
    """Ops, and the same from behind."""
    for name in names:
        yield from (name, f"shardlib::{name}_behind")


def scans() -> Iterator[Sample]:
    for name in both("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        yield s(name, f(3, 5), 1)
        yield s(name, f(2, 3, 4), -2)
        yield s(name, f(12, 2), 0)
        yield s(name, f(1, 5), 0)
        yield s(name, f(), 0)
        yield s(name, f(2, 6).float(), 1)
        yield s(name, f(2, 6).bfloat16(), 1)
        x = f(4, 8)
        x[0, 2], x[1, 5], x[2, 0], x[2, 6] = math.nan, math.inf, -math.inf, math.nan
        x[3] = -math.inf
        yield s(name, x, 1)
    yield s("_logcumsumexp", f(3, 5) * 300, 1)
    for name in both("cumsum", "cumprod"):
        yield s(name, i(3, 4, 5), 1)
        yield s(name, i(3, 4, 5), 0, dtype=torch.float64)
        yield s(name, f(4, 5) > 0, 1)
        yield s(name, f(4, 5), 1, dtype=torch.float32)
        yield s(name, torch.complex(f(3, 5), f(3, 5)), 1)
    for name in both("cummax", "cummin"):
        yield s(name, i(3, 4, 12), 1)
        yield s(name, i(3, 6).to(torch.uint8), 0)
        yield s(name, f(7) > 0, 0)
        yield s(name, torch.full((2, 5), math.inf), 1)
        yield s(name, torch.full((2, 5), math.nan), 1)


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (scans,)
