"""Samples for `shardlib.rules.nn_ops.pooling`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.helpers.prover import Sample, target_of
from tests.rules.samples.make import f


def average(*shape: int, kernel: Any, **how: Any) -> Iterator[Sample]:
    """An average pool and its backward."""
    given = {"stride": [], "padding": 0, "ceil_mode": False, "count_include_pad": True, "divisor_override": None, **how}
    dims, x = len(kernel), f(*shape)
    yield f"avg_pool{dims}d", (x, kernel, *given.values()), {}
    grad = torch.randn_like(target_of(f"avg_pool{dims}d")(x, kernel, *given.values()))
    given["stride"] = given["stride"] or kernel
    yield f"avg_pool{dims}d_backward", (grad, x, kernel, *given.values()), {}


def maximum(*shape: int, kernel: Any, **how: Any) -> Iterator[Sample]:
    given = {"stride": [], "padding": 0, "dilation": 1, "ceil_mode": False, **how}
    name, x = f"max_pool{len(kernel)}d_with_indices", f(*shape)
    yield name, (x, kernel, *given.values()), {}
    out, indices = target_of(name)(x, kernel, *given.values())
    given["stride"] = given["stride"] or kernel
    yield f"{name}_backward", (torch.randn_like(out), x, kernel, *given.values(), indices), {}


def adaptive(*shape: int, size: Any) -> Iterator[Sample]:
    dims, x = len(size), f(*shape)
    name = f"_adaptive_avg_pool{dims}d"
    yield name, (x, size), {}
    yield f"{name}_backward", (torch.randn_like(target_of(name)(x, size)), x), {}
    name = f"adaptive_max_pool{dims}d"
    yield name, (x, size), {}
    out, indices = target_of(name)(x, size)
    yield f"{name}_backward", (torch.randn_like(out), x, indices), {}


def fractional(*shape: int, kernel: Any, size: Any) -> Iterator[Sample]:
    dims, x = len(size), f(*shape)
    name = f"fractional_max_pool{dims}d"
    lead = shape[:-dims] if len(shape) > dims + 1 else (1, shape[0])
    places = torch.rand(*lead, dims, dtype=torch.float64)
    yield name, (x, kernel, size, places), {}
    out, indices = target_of(name)(x, kernel, size, places)
    yield f"{name}_backward", (torch.randn_like(out), x, kernel, size, indices), {}


def average_pools() -> Iterator[Sample]:
    yield from average(2, 3, 8, 6, kernel=[2, 2])
    yield from average(1, 1, 9, 1, kernel=[3, 1], stride=[2, 1], padding=[1, 0])
    yield from average(1, 1, 9, 4, kernel=[3, 2], stride=[1, 1], padding=[1, 0], count_include_pad=False)
    yield from average(1, 1, 8, 5, kernel=[3, 2], stride=[2, 3], padding=[1, 1], ceil_mode=True)
    yield from average(3, 7, 5, kernel=[2, 3], stride=[3, 1], divisor_override=5)
    yield from average(1, 1, 4, 4, kernel=[4, 2])
    yield from average(1, 2, 4, 5, 3, kernel=[2, 2, 1], stride=[1, 2, 1], padding=[1, 0, 0])


def max_pools() -> Iterator[Sample]:
    yield from maximum(2, 3, 8, 6, kernel=[2, 2])
    yield from maximum(1, 1, 9, 4, kernel=[3, 2], stride=[2, 1], padding=[1, 1])
    yield from maximum(1, 1, 9, 5, kernel=[2, 3], stride=[1, 1], padding=[0, 1], dilation=[2, 1])
    yield from maximum(1, 1, 8, 7, kernel=[3, 2], stride=[2, 3], padding=[1, 1], ceil_mode=True)
    yield from maximum(3, 7, 5, kernel=[2, 3], stride=[3, 1])
    yield from maximum(1, 2, 4, 5, 3, kernel=[2, 2, 2], stride=[1, 2, 1], padding=[1, 0, 0])
    name, args, how = next(maximum(1, 1, 6, 4, kernel=[3, 3], stride=[1, 1], padding=[1, 1]))
    yield name, (torch.full_like(args[0], -torch.inf), *args[1:]), how


def adaptive_pools() -> Iterator[Sample]:
    yield from adaptive(2, 3, 8, 6, size=[4, 3])
    yield from adaptive(1, 1, 7, 6, size=[3, 6])
    yield from adaptive(3, 6, 5, size=[1, 5])
    yield from adaptive(1, 2, 4, 5, 6, size=[2, 3, 3])
    yield from adaptive(1, 1, 3, 3, size=[6, 3])
    yield from adaptive(2, 3, 3, 4, size=[6, 12])
    yield from adaptive(3, 5, 2, size=[5, 4])
    yield from adaptive(1, 1, 3, size=[3, 9])
    yield from adaptive(1, 2, 3, 2, 4, size=[6, 2, 8])
    yield from adaptive(2, 2, 4, 3, size=[2, 6])


def fractional_pools() -> Iterator[Sample]:
    yield from fractional(2, 3, 6, 5, kernel=[2, 2], size=[3, 2])
    yield from fractional(3, 6, 5, kernel=[2, 2], size=[3, 2])
    yield from fractional(2, 3, 4, 5, 4, kernel=[2, 2, 2], size=[2, 2, 2])


def unpools() -> Iterator[Sample]:
    for shape in ((2, 3, 4, 6), (3, 4, 6)):
        x, indices = torch.nn.functional.max_pool2d(f(*shape), 2, return_indices=True)
        yield "max_unpool2d", (x, indices, [4, 6]), {}
    x, indices = torch.nn.functional.max_pool3d(f(2, 3, 4, 2, 6), 2, return_indices=True)
    yield "max_unpool3d", (x, indices, [4, 2, 6], [2, 2, 2], [0, 0, 0]), {}


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (
    average_pools,
    max_pools,
    adaptive_pools,
    fractional_pools,
    unpools,
)
