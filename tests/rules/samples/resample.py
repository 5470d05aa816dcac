"""Samples for `shardlib.rules.nn_ops.interpolate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.helpers.prover import Sample

aten = torch.ops.aten


def _f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


_KINDS: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {"upsample_nearest1d": (), "_upsample_nearest_exact1d": (), "upsample_linear1d": (True,)},
    2: {
        "upsample_nearest2d": (), "_upsample_nearest_exact2d": (), "upsample_bilinear2d": (False,),
        "upsample_bicubic2d": (True,), "_upsample_bilinear2d_aa": (False,), "_upsample_bicubic2d_aa": (True,),
        "_upsample_lanczos2d_aa": (False,),
    },
    3: {"upsample_nearest3d": (), "_upsample_nearest_exact3d": (), "upsample_trilinear3d": (False,)},
}  # fmt: skip


def upsample() -> Iterator[Sample]:
    for dims, kinds in _KINDS.items():
        small, large = [2, 3, 2][:dims], [4, 3, 5][:dims]
        for name, rest in kinds.items():
            if hasattr(aten, name):
                for n, c in ((3, 2), (1, 4)):
                    yield name, (_f(n, c, *small), large, *rest), {}
                    yield f"{name}_backward", (_f(n, c, *large), large, [n, c, *small], *rest), {}


def blocks() -> Iterator[Sample]:
    """Sizes that grow by a whole number; one is given its scale, one is 1. 41 rounds otherwise."""
    for name in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
        for small, large, scales in (
            ([5, 3], [10, 12], ()),
            ([3, 1], [6, 2], (2.0, 2.0)),
            ([3, 2], [6, 4], (2.1, None)),
            ([5, 3], [15, 123], ()),
            ([2, 4], [10, 12], (5.0, 3.0)),
        ):
            yield name, (_f(2, 3, *small), large, *scales), {}
            yield f"{name}_backward", (_f(2, 3, *large), large, [2, 3, *small], *scales), {}


def blends() -> Iterator[Sample]:
    """Sizes that grow by a whole number, by blocks that read those around them."""
    for name, dims in (
        ("upsample_linear1d", 1), ("upsample_bilinear2d", 2), ("upsample_bicubic2d", 2), ("upsample_trilinear3d", 3),
        ("_upsample_bilinear2d_aa", 2), ("_upsample_bicubic2d_aa", 2),
    ):  # fmt: skip
        for small, times, scales in (([7, 3, 2], [2, 3, 2], ()), ([5, 1, 3], [4, 2, 1], (4.0, 2.0, 1.0))):
            low, high = small[:dims], [a * b for a, b in zip(small, times, strict=True)][:dims]
            yield name, (_f(2, 3, *low), high, False, *scales[:dims]), {}
            yield f"{name}_backward", (_f(2, 3, *high), high, [2, 3, *low], False, *scales[:dims]), {}


def shrunk() -> Iterator[Sample]:
    """Sizes that shrink by a whole number: elements read around the middle of their blocks, or all of several."""
    for name, dims in (
        ("upsample_linear1d", 1), ("upsample_bilinear2d", 2), ("upsample_bicubic2d", 2), ("upsample_trilinear3d", 3),
        ("_upsample_bilinear2d_aa", 2), ("_upsample_bicubic2d_aa", 2), ("_upsample_lanczos2d_aa", 2),
        ("upsample_nearest2d", 2), ("_upsample_nearest_exact2d", 2),
    ):  # fmt: skip
        for made, over, scales in (([7, 3, 2], [2, 3, 2], ()), ([3, 5, 1], [4, 1, 2], (0.25, 1.0, 0.5))):
            x = [a * b for a, b in zip(made, over, strict=True)][:dims]
            how = (*([] if "nearest" in name else [False]), *scales[:dims])
            if hasattr(aten, name):
                yield name, (_f(2, 3, *x), made[:dims], *how), {}
                yield f"{name}_backward", (_f(2, 3, *made[:dims]), made[:dims], [2, 3, *x], *how), {}
    how = [4, 6], False  # one dim grows
    yield "upsample_bilinear2d", (_f(2, 3, 8, 3), *how), {}
    yield "upsample_bilinear2d_backward", (_f(2, 3, 4, 6), how[0], [2, 3, 8, 3], how[1]), {}


def grid() -> Iterator[Sample]:
    for dims in (2, 3):
        space, points = [3, 4, 2][:dims], [2, 3, 2][:dims]
        for how in ((0, 0, False), (1, 1, True), (0, 2, False)):
            x, at, grad = _f(3, 2, *space), _f(3, *points, dims), _f(3, 2, *points)
            yield f"grid_sampler_{dims}d", (x, at, *how), {}
            for mask in ([True, True], [False, True]):
                yield f"grid_sampler_{dims}d_backward", (grad, x, at, *how, mask), {}
    yield "affine_grid_generator", (_f(3, 2, 3), [3, 2, 4, 5], True), {}
    yield "affine_grid_generator", (_f(5, 3, 4), [5, 1, 2, 3, 4], False), {}


def windows() -> Iterator[Sample]:
    how = ([2, 3], [1, 1], [1, 0], [2, 1])
    for outer in ((3, 2), (2, 5)):
        x = _f(*outer, 4, 5)
        yield "im2col", (x, *how), {}
        yield "im2col", (x[0], *how), {}
        columns = aten.im2col(x, *how)
        yield "col2im", (columns, [4, 5], *how), {}
        yield "col2im", (columns[0], [4, 5], *how), {}


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (upsample, blocks, blends, shrunk, grid, windows)
