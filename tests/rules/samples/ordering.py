"""Samples for `shardlib.rules.tensor_ops.sort_topk`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.helpers.prover import Sample
from tests.rules.samples.make import f, i, s


def awkward(*shape: int) -> Tensor:
    """Many equal values, infinities, NaNs, and rows of nothing but the worst value."""
    x = i(3, *shape).double()
    x = x.masked_fill(f(*shape) > 1.2, math.nan).masked_fill(f(*shape) > 1.2, math.inf)
    return torch.cat([x, torch.full_like(x, -math.inf), torch.full_like(x, math.inf), torch.full_like(x, math.nan)])


def sorting() -> Iterator[Sample]:
    yield s("sort", f(3, 5))
    yield s("sort", f(3, 5), 0, True)
    yield s("sort", f())
    yield s("sort.stable", f(3, 5), stable=True)
    yield s("sort.stable", i(3, 4, 5), stable=True, dim=0, descending=True)
    for name in ("kthvalue", "mode", "median.dim", "nanmedian.dim"):
        k = (2,) if name == "kthvalue" else ()
        yield s(name, f(3, 5), *k, 1)
        yield s(name, f(2, 3, 4), *k, -2, True)
        yield s(name, f(), *(1 for _ in k), 0)
    yield s("kthvalue", f(4, 5), 3)
    yield s("mode", f(4, 5))
    yield s("nanmedian.dim", awkward(1, 5), 1)
    for name in ("median", "nanmedian"):
        yield s(name, f(3, 5))
        yield s(name, f())


def topk() -> Iterator[Sample]:
    yield s("topk", f(3, 5), 2)
    yield s("topk", f(3, 7), 1, -1, False)
    yield s("topk", f(12, 2), 3, 0)
    yield s("topk", f(2, 9, 3), 2, -2, False, True)
    yield s("topk", f(3, 5), 2, 1, True, False)
    yield s("topk", f(3, 5), 4)
    yield s("topk", f(3, 5), 0)
    yield s("topk", f(6).float(), 2)
    yield s("topk", torch.randperm(8), 2)
    yield s("topk", f(), 1)
    x = f(3, 8)
    x[0, 3] = x[1, 7] = math.nan
    x[2, 2] = -math.inf
    yield s("topk", x, 2)
    yield s("topk", x, 2, 1, False)


def extremes() -> Iterator[Sample]:
    for name in ("max.dim", "min.dim", "argmax", "argmin"):
        yield s(name, f(3, 5), 1)
        yield s(name, f(3, 5), -2, True)
        yield s(name, f(2, 3, 6), 2)
        yield s(name, i(3, 4, 12) - 1, 1)
        yield s(name, awkward(2, 6), 1)
        yield s(name, awkward(1, 6).t(), 0, True)
        yield s(name, f(1, 4), 0)
        yield s(name, f(), 0)
        yield s(name, f(5).float(), 0)
        yield s(name, i(4, 6).to(torch.uint8), 0)
    yield s("max.dim", f(3, 5) > 0, 1)
    yield s("min.dim", f(3, 5) > 0, 1)
    for name in ("argmax", "argmin"):
        yield s(name, f(3, 5))
        yield s(name, f(3, 5), None, True)
        yield s(name, i(3, 4, 6))
        yield s(name, i(2, 3, 2, 5))
        yield s(name, awkward(1, 3))
        yield s(name, torch.full((3, 4), -math.inf))
        yield s(name, torch.full((5,), math.inf))
        yield s(name, f())


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (sorting, topk, extremes)
