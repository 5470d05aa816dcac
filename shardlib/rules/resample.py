"""Interpolation, sampling on grids, and sliding windows.

Batch and channels pass. Space stays whole, except that of a grid, whose points are looked up each for itself, and where
every element becomes a block of equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from shardlib.rules.nonempty import nonempty
from shardlib.rules.notation import gradient
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Rule, RuleFn
from shardlib.rules.space import Dim, path, result_shape

aten = torch.ops.aten


def _plain(text: str, *local: str, **ints: Any) -> Callable[[Call], Rule]:
    """A row whose factors `local` may not be empty."""
    notes = " ".join(f"{f}:local" for f in local)
    return pattern(f"{text} {notes}" if "|" in text else f"{text} | {notes}", local=nonempty, **ints)


def _space(dims: int) -> str:
    """Dims that stay whole."""
    return " ".join(["_"] * dims)


def _upsample(dims: int, taps: int, *, backward: bool = False) -> RuleFn:
    """Every element of the result (of a gradient: of the operand) is so many of each dim, weighted and added up."""
    text = f"n c {_space(dims)} -> n c {_space(dims)} | {{0}}"
    flops = lambda call, _: 2 * taps**dims * math.prod(max(call.operands[0].shape, result_shape(call), key=math.prod))
    return _plain(f"{gradient(text)} {_SIZES}" if backward else text, "n", "c", flops=flops)


def _nearest(dims: int, *, backward: bool = False) -> RuleFn:
    """Where a size grows by a whole number, an element is a block: `h -> (h r)`, unless rounding decides otherwise."""

    def rule(call: Call) -> Rule:
        small, large = (m.shape for m in (*call.operands, *call.results) if m is not None)
        small, large = (large, small) if backward else (small, large)
        scales = call.args[3 if backward else 2 :]
        space = range(dims)
        times = [b // a if a and b % a == 0 else 0 for a, b in zip(small[2:], large[2:], strict=True)]
        said = [len(scales) <= i or scales[i] in (None, times[i]) for i in space]
        kept = [i for i in space if said[i] and _blocks(times[i], large[i + 2])]
        others = [i for i in space if i not in kept]  # torch has kernels that round otherwise, and chooses by shapes
        if not all((len(scales) <= i or scales[i] is None) and _certain(small[i + 2], large[i + 2]) for i in others):
            kept = []
        x = " ".join(f"h{i}" if i in kept else "_" for i in space)
        y = " ".join(f"(h{i} r{i})" if i in kept else "_" for i in space)
        blocks = " ".join(f"r{i}:whole" for i in kept)
        text = f"n c {x} -> n c {y} | {blocks} {{0}}"
        text = f"{gradient(text)} {_SIZES}" if backward else text
        found = _plain(text, "n", "c", *(f"h{i}" for i in kept))(call)
        ints = {(*path(call, 1, "output_size"), i): (times[i], _dim(call, small, i)) for i in kept}
        if backward:
            ints |= {(*path(call, 2, "input_size"), i + 2): (1, _dim(call, small, i)) for i in kept}
        return replace(found, ints={**found.ints, **ints})

    return rule


_SIZES = "n:size(input_size.0) c:size(input_size.1)"  # of a gradient: those of its input, the batch and channels too


@cache
def _blocks(times: int, size: int) -> bool:
    """Whether torch, which multiplies and rounds down, finds equal elements in blocks of so many."""
    if not times:
        return False
    for dtype in (np.float32, np.float64):
        places: Any = np.arange(size).astype(dtype)
        found = (np.floor(x * dtype(1 / times)) for x in (places, places + dtype(0.5)))
        if not all(np.array_equal(x, np.arange(size) // times) for x in found):
            return False
    return True


@cache
def _certain(small: int, large: int) -> bool:
    """Whether the same elements are found in single and in double precision."""
    steps: Any = np.arange(large)
    places = [steps.astype(dtype) * dtype(small / large) for dtype in (np.float32, np.float64)]
    return all(np.array_equal(*(np.floor(x + half * small / large) for x in places)) for half in (0.0, 0.5))


def _dim(call: Call, small: Sequence[int], i: int) -> Dim:
    return (f"h{i}",) if small[i + 2] > 1 else ()


def _grid(dims: int, *, backward: bool = False) -> RuleFn:
    points = " ".join(f"p{i}" for i in range(dims))
    text = f"n c {_space(dims)}, n {points} _ -> n c {points} | {{0}}"
    text = gradient(text, "0 1", of="0 1") if backward else text
    # Of a gradient: for the image, and for the grid.
    shape = (lambda call: call.operands[0].shape) if backward else result_shape
    flops = lambda call, _: (1 + backward) * 2 * 2**dims * math.prod(shape(call))
    return _plain(text, "n", "c", *points.split(), flops=flops)


def _im2col(call: Call) -> Rule:
    n = "n " if len(call.operands[0].shape) == 4 else ""
    return _plain(f"{n}c _ _ -> {n}(c k) _ | k:whole {{0}}", *n.split(), "c")(call)


def _col2im(call: Call) -> Rule:
    n = "n " if len(call.operands[0].shape) == 3 else ""
    return _plain(f"{n}(c k) _ -> {n}c _ _ | k:whole {{0}}", *n.split(), "c")(call)


def _affine_grid(call: Call) -> Rule:
    space = _space(len(call.args[1]) - 2)
    return _plain(f"n _ _ -> n {space} _ | n:size(size.0) {{0}}", "n")(call)


_FAMILIES: dict[Callable[..., RuleFn], dict[str, tuple[int, ...]]] = {
    _nearest: {f"{name}{d}d": (d,) for d in (1, 2, 3) for name in ("upsample_nearest", "_upsample_nearest_exact")},
    _upsample: {  # and how many elements of a dim one is made of
        "upsample_linear1d": (1, 2),
        "upsample_trilinear3d": (3, 2),
        "upsample_bilinear2d": (2, 2),
        "upsample_bicubic2d": (2, 4),
        **{f"_upsample_{kind}2d_aa": (2, taps) for kind, taps in (("bilinear", 2), ("bicubic", 4), ("lanczos", 6))},
    },
    _grid: {"grid_sampler_2d": (2,), "grid_sampler_3d": (3,), "_grid_sampler_2d_cpu_fallback": (2,)},
}

ROWS: dict[str, RuleFn | str] = {
    **{
        f"{name}{end}": rule(*sizes, backward=bool(end))
        for rule, family in _FAMILIES.items()
        for name, sizes in family.items()
        for end in ("", "_backward")
    },
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
