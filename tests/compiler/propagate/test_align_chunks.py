"""Pieces beside those of what they are read from: padded dims, slices and windows of a cut dim, in plans and values."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.sharding.chunks import (
    AlignedSize,
    ShardSizes,
    is_even,
    is_nested,
    largest_shard,
    restrict_size,
    shard_range,
    shard_sizes,
)
from shardlib.sharding.mesh.axis import Axis

A, B = Axis("a", 4), Axis("b", 2)
SIZES = [
    AlignedSize(13, 10, shift=1),
    AlignedSize(6, 10, shift=-2),
    AlignedSize(5, 10, scale=1, shift=-7),
    AlignedSize(4, 10, scale=1, shift=3),
    AlignedSize(21, 10, scale=2, shift=1),
    AlignedSize(9, ShardSizes((0, 5, 5, 0), (A,)), shift=-1),
    AlignedSize(12, AlignedSize(11, 10, shift=1), shift=1),
    AlignedSize(1, 10),
    AlignedSize(7, 1, shift=2),
]


@pytest.mark.parametrize("size", SIZES, ids=repr)
@pytest.mark.parametrize("axes", [(A,), (A, B), (B, A), (B,)], ids=lambda axes: "".join(a.name for a in axes))
def test_pieces_cover_the_size_in_order_and_nest(size: AlignedSize, axes: tuple[Axis, ...]) -> None:
    lengths = shard_sizes(size, axes)
    assert sum(lengths) == int(size)
    assert min(lengths) >= 0
    assert largest_shard(size, axes) == max(lengths)
    assert is_even(size, axes) == (len({*lengths}) == 1)
    told = restrict_size(size, axes)
    assert told + 0 == size + 0
    assert shard_sizes(told, axes) == lengths
    primes = tuple(p for a in axes for p in a.primes())
    for k in range(1, len(primes)):
        if is_nested(size, primes, k):
            inner = len(lengths) // len(shard_sizes(size, Axis.merge(primes[:k])))
            outer = [sum(lengths[i : i + inner]) for i in range(0, len(lengths), inner)]
            assert tuple(outer) == shard_sizes(size, Axis.merge(primes[:k]))


def test_elements_lie_with_those_beside_them() -> None:
    for i, shift in itertools.product(range(4), (-3, 0, 2)):
        low, high = shard_range(10, (A,), {"a": i})
        mine = shard_range(AlignedSize(14, 10, shift=shift), (A,), {"a": i})
        assert all(mine[0] <= s + shift < mine[1] for s in range(low, high) if 0 <= s + shift < 14)


def test_is_no_plain_number() -> None:
    assert AlignedSize(8, 8, shift=1) != 8
    assert AlignedSize(8, 8, shift=1) != AlignedSize(8, 8) == AlignedSize(8, 8)
    assert restrict_size(AlignedSize(8, 8), (A,)) == 8, "where pieces are chunks, nothing is said"


# Programs -------------------------------------------------------------------------------------------------------------


def _padded_windows(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 3, 0)).unfold(0, 4, 1).amax(-1)


def _pooled(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(x[None], (2, 1, 1, 2)), 4, 1)[0]


def _strided(x: Tensor) -> Tensor:
    return F.conv2d(F.pad(x[None, None], (1, 1, 1, 1), mode="replicate").sin(), x.new_ones(1, 1, 3, 3), stride=2)[0, 0]


def _reflected(x: Tensor) -> Tensor:
    return F.conv2d(F.pad(x[None, None], (1, 1, 1, 1), mode="reflect"), x.new_ones(1, 1, 3, 3))[0, 0]


def _periodic(x: Tensor) -> Tensor:
    p = F.pad(x[None, None], (1, 1, 1, 1), mode="circular")[0, 0]
    return p[:-2, 1:-1] + 2 * p[2:, 1:-1] + p[1:-1, :-2] - p[1:-1, 2:]


def _dirichlet(x: Tensor) -> Tensor:
    for _ in range(2):
        c = x[:-2, 1:-1] + 2 * x[2:, 1:-1] + x[1:-1, :-2] - x[1:-1, 2:]
        x = torch.cat([x[:1], torch.cat([x[1:-1, :1], c, x[1:-1, -1:]], 1), x[-1:]], 0)
    return x


def _written(x: Tensor) -> Tensor:
    v = x.clone()
    v[1:-1, 1:-1] = x[:-2, 1:-1] + 2 * x[2:, 1:-1] + x[1:-1, :-2] - x[1:-1, 2:]
    return v


def _nine_points(x: Tensor) -> Tensor:
    p, (n, m) = F.pad(x, (1, 1, 1, 1)), x.shape
    return sum((1 + i + 3 * j) * p[i : i + n, j : j + m] for i in range(3) for j in range(3))


def _upwind(x: Tensor) -> Tensor:
    d = x[2:] - x[:-2]
    return torch.where(x[1:-1] > 0, x[1:-1] - x[:-2], d) * d


def _second_order(x: Tensor) -> Tensor:
    return (x[2:] - 2 * x[1:-1] + x[:-2]).cos()[1:] * 2


def _wide(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 5, 4))[9:] + F.pad(x, (0, 0, 5, 4))[:-9] * x


def _far(x: Tensor) -> Tensor:
    return torch.cat([x[-3:], x, x[:2]]).sin()[1:] * 2


PROGRAMS = [
    _padded_windows, _pooled, _strided, _reflected, _periodic, _dirichlet, _written, _nine_points, _upwind,
    _second_order, _wide, _far,
]  # fmt: skip
LEAST = {_reflected: 2, _dirichlet: 3, _upwind: 3, _second_order: 4, _written: 3, _far: 3}
SHAPES = [(13, 7), (5, 3), (4, 9), (1, 4)]
CASES = [(program, shape) for program in PROGRAMS for shape in SHAPES if min(shape) >= LEAST.get(program, 1)]


@pytest.mark.sampled(23)
@pytest.mark.parametrize(
    ("mesh", "spec"), [({"a": 4}, "h@a w"), ({"a": 2, "b": 2}, "h@a w@b"), ({"a": 2, "b": 2}, "h@(a b) w")], ids=str
)
@pytest.mark.parametrize(("program", "shape"), CASES, ids=lambda x: x.__name__[1:] if callable(x) else str(x))
def test_values_and_gradients_are_those_of_one_device(
    program: Callable[[Tensor], Tensor], shape: tuple[int, int], mesh: dict[str, int], spec: str
) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor) -> Tensor:
            y = program(x)
            return (y * torch.arange(1, y.numel() + 1).view(y.shape)).sin().sum()

        return program(x), sl.grad(loss)(x)

    with sl.no_mesh():
        want = both(x)
    with sl.Mesh(mesh):
        for got, there in zip(sl.jit(both, in_specs=(spec,))(x), want, strict=True):
            torch.testing.assert_close(got.full_tensor(), there)
