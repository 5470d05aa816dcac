"""Interpolation, padding by reflection and replication, sampling on grids, and sliding windows.

Batch and channels pass. Space stays whole, except that of a grid, whose points are looked up each for itself, and where
every element becomes a block of equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardlib.rules.nonempty import nonempty
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Rule, RuleFn
from shardlib.rules.space import Dim, path

aten = torch.ops.aten


def _plain(text: str, *local: str, **ints: Any) -> Callable[[Call], Rule]:
    """A row whose factors `local` may not be empty."""
    notes = " ".join(f"{f}:local" for f in local)
    return pattern(f"{text} {notes}" if "|" in text else f"{text} | {notes}", local=nonempty, **ints)


def _space(dims: int) -> str:
    """Dims that stay whole."""
    return " ".join(["_"] * dims)


def _upsample(dims: int) -> RuleFn:
    return _plain(f"n c {_space(dims)} -> n c {_space(dims)} | {{0}}", "n", "c")


def _upsample_backward(dims: int) -> RuleFn:
    """`(grad, output size, input size, ...)`: the input's size has the batch and the channels, too."""
    return _plain(
        f"n c {_space(dims)} -> n c {_space(dims)} | n:size(input_size.0) c:size(input_size.1) {{0}}", "n", "c"
    )


def _nearest(dims: int, *, backward: bool = False) -> RuleFn:
    """Where a size grows by a power of two, an element is a block: `h -> (h r)`. Of other ratios rounding decides."""

    def rule(call: Call) -> Rule:
        small, large = (m.shape for m in (*call.operands, *call.results) if m is not None)
        small, large = (large, small) if backward else (small, large)
        scales = call.args[3 if backward else 2 :]
        space = range(dims)
        times = [b // a if a and b % a == 0 else 0 for a, b in zip(small[2:], large[2:], strict=True)]
        kept = [i for i in space if times[i] in _BLOCKS and (len(scales) <= i or scales[i] in (None, times[i]))]
        x = " ".join(f"h{i}" if i in kept else "_" for i in space)
        y = " ".join(f"(h{i} r{i})" if i in kept else "_" for i in space)
        blocks = " ".join(f"r{i}:whole" for i in kept)
        batch = "n:size(input_size.0) c:size(input_size.1) " if backward else ""
        text = f"n c {y} -> n c {x}" if backward else f"n c {x} -> n c {y}"
        found = _plain(f"{text} | {batch}{blocks} {{0}}", "n", "c", *(f"h{i}" for i in kept))(call)
        ints = {(*path(call, 1, "output_size"), i): (times[i], _dim(call, small, i)) for i in kept}
        if backward:
            ints |= {(*path(call, 2, "input_size"), i + 2): (1, _dim(call, small, i)) for i in kept}
        return replace(found, ints={**found.ints, **ints})

    return rule


_BLOCKS = (1, 2, 4, 8, 16)


def _dim(call: Call, small: Sequence[int], i: int) -> Dim:
    return (f"h{i}",) if small[i + 2] > 1 else ()


def _pad(dims: int) -> RuleFn:
    return _plain(f"... {_space(dims)} -> ... {_space(dims)} | {{0}}", "...")


def _pad_backward(dims: int) -> RuleFn:
    return _plain(f"... {_space(dims)}, ... {_space(dims)} -> ... {_space(dims)} | {{0}}", "...")


def _grid(dims: int) -> RuleFn:
    points = " ".join(f"p{i}" for i in range(dims))
    return _plain(f"n c {_space(dims)}, n {points} _ -> n c {points} | {{0}}", "n", "c", *points.split())


def _grid_backward(dims: int) -> RuleFn:
    """What several points read adds up; a point moves all channels."""
    points = " ".join(f"p{i}" for i in range(dims))
    sums = " ".join(f"{f}:sum" for f in ("c", *points.split()))
    text = f"n c {points}, n c {_space(dims)}, n {points} _ -> n c {_space(dims)}, n {points} _ | {sums} {{0}}"
    return _plain(text, "n", "c", *points.split())


def _im2col(call: Call) -> Rule:
    n = "n " if len(call.operands[0].shape) == 4 else ""
    return _plain(f"{n}c _ _ -> {n}(c k) _ | k:whole {{0}}", *n.split(), "c")(call)


def _col2im(call: Call) -> Rule:
    n = "n " if len(call.operands[0].shape) == 3 else ""
    return _plain(f"{n}(c k) _ -> {n}c _ _ | k:whole {{0}}", *n.split(), "c")(call)


def _affine_grid(call: Call) -> Rule:
    space = _space(len(call.args[1]) - 2)
    return _plain(f"n _ _ -> n {space} _ | n:size(size.0) {{0}}", "n")(call)


_UPSAMPLE = {
    1: ("upsample_linear1d",),
    2: (
        *("upsample_bilinear2d", "upsample_bicubic2d"),
        *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
    ),
    3: ("upsample_trilinear3d",),
}

_NEAREST = {f"{name}{d}d": d for d in (1, 2, 3) for name in ("upsample_nearest", "_upsample_nearest_exact")}

ROWS: dict[str, RuleFn | str] = {
    **{name: _nearest(d) for name, d in _NEAREST.items()},
    **{f"{name}_backward": _nearest(d, backward=True) for name, d in _NEAREST.items()},
    **{name: _upsample(d) for d, names in _UPSAMPLE.items() for name in names},
    **{f"{name}_backward": _upsample_backward(d) for d, names in _UPSAMPLE.items() for name in names},
    **{f"{kind}_pad{d}d": _pad(d) for kind in ("reflection", "replication") for d in (1, 2, 3)},
    **{f"{kind}_pad{d}d_backward": _pad_backward(d) for kind in ("reflection", "replication") for d in (1, 2, 3)},
    **{f"grid_sampler_{d}d": _grid(d) for d in (2, 3)},
    **{f"grid_sampler_{d}d_backward": _grid_backward(d) for d in (2, 3)},
    "_grid_sampler_2d_cpu_fallback": _grid(2),
    "_grid_sampler_2d_cpu_fallback_backward": _grid_backward(2),
    "im2col": _im2col,
    "col2im": _col2im,
    "affine_grid_generator": _affine_grid,
}

# Kernels for one kind of device only: the op that is there on all.
DECOMPOSED: dict[str, Callable[..., Any]] = {
    "cudnn_grid_sampler": lambda x, grid: aten.grid_sampler_2d(x, grid, 0, 0, True),
    "cudnn_grid_sampler_backward": lambda x, grid, grad: aten.grid_sampler_2d_backward(
        grad, x, grid, 0, 0, True, [True, True]
    ),
    "cudnn_affine_grid_generator": lambda theta, *size: aten.affine_grid_generator(theta, list(size), True),
    "cudnn_affine_grid_generator_backward": lambda grad, *size: aten.affine_grid_generator_backward(
        grad, list(size), True
    ),
}
