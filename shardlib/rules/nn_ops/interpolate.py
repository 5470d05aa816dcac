"""Interpolation, sampling on grids, and sliding windows.

Batch and channels may be sharded. Space may be sharded for grids, whose points are looked up independently, and where
sizes change by a whole number: then an element becomes a block, or a block becomes an element. Otherwise it stays
whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.rules.iteration_space import arg, is_backward, result_shape
from shardlib.rules.local_forms.stencil import Reach, Stencil, nonempty
from shardlib.rules.local_forms.window import Window
from shardlib.rules.notation import gradient_pattern
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Rule, RuleFn

aten = torch.ops.aten
Shape = Sequence[int]


def _upsample(dims: int, taps: int, *, smooth: bool = False) -> RuleFn:
    """Returns the rule of an interpolation whose results are weighted sums of `taps` elements along each dim.

    With `smooth`, a shrinking op sums that many blocks. Where a size grows by a whole number, the block of an element
    reads the elements around it; where it shrinks by one, an element reads around the middle of its block.
    """

    def window(n: int) -> Window:
        half = taps // 2
        return Window(taps * n, n, half * n - (n + 1) // 2) if smooth else Window(taps, n, half - (n + 1) // 2)

    def rule(call: Call) -> Rule:
        change = _change(call, dims)
        corners = arg(call, "align_corners")
        grown = [i for i in change.kept if change.times[i] and not corners]
        shrunk = {i: window(change.over[i]) for i in change.kept if not change.times[i] and not corners}
        work = 2 * taps**dims * max(math.prod(change.source), math.prod(change.target))
        return _in_blocks(call, change, grown, taps // 2, shrunk, flops=lambda *_: work)

    return rule


def _nearest(dims: int) -> RuleFn:
    """Returns the rule where an element becomes a block of equal elements, `h -> (h r)`, unaffected by rounding."""

    def rule(call: Call) -> Rule:
        change = _change(call, dims)
        source, target, times, over = change.source, change.target, change.times, change.over
        grown = [i for i in change.kept if _has_equal_blocks(times[i], target[i + 2])]
        shrunk = {i: Window(over[i], over[i]) for i in change.kept if not times[i]}
        # Along other dims, torch chooses by shapes between kernels that round differently.
        others = [i for i in range(dims) if i not in grown]
        if not all(i in change.exact and _is_rounding_stable(source[i + 2], target[i + 2]) for i in others):
            grown, shrunk = [], {}
        return _in_blocks(call, change, grown, 0, shrunk)

    return rule


def repeated(call: Call) -> Sequence[int]:
    """Returns the number of repeats of each element along each dim, if the call only repeats elements; else empty."""
    dims = _NEAREST.get(schema_of(call.target).name.partition("::")[2], 0)
    if not dims or len(call.operands) != 1:
        return ()
    change = _change(call, dims)
    repeats = len(change.exact) == dims and all(map(_has_equal_blocks, change.times, change.target[2:]))
    return (1, 1, *change.times) if repeats else ()


class _Change(NamedTuple):
    """The shapes before and after an interpolation (of a gradient: of its forward op).

    A spatial dim grows `times`, or is divided by `over`; 0 if this is no whole number. In the dims `exact` the scale
    that the op uses is the ratio of the sizes.
    """

    source: Shape
    target: Shape
    times: list[int]
    over: list[int]
    exact: list[int]

    @property
    def kept(self) -> list[int]:
        """The dims that change by a whole number."""
        return [i for i in self.exact if self.times[i] or self.over[i]]


def _change(call: Call, dims: int) -> _Change:
    source, target = (m.shape for m in (*call.operands, *call.results) if m is not None)
    source, target = (target, source) if is_backward(call) else (source, target)
    sizes = [*zip(source[2:], target[2:], strict=True)]
    times, over = [[b // a if a and b % a == 0 else 0 for a, b in way] for way in (sizes, [x[::-1] for x in sizes])]
    names = [a.name for a in schema_of(call.target).arguments if a.name.startswith("scale")]
    # Torch divides by a scale.
    scales = [times[i] or (1 / over[i] if over[i] and 1 / (1 / over[i]) == over[i] else None) for i in range(dims)]
    exact = [i for i in range(dims) if arg(call, names[i]) in (None, scales[i])]
    return _Change(source, target, times, over, exact)


def _in_blocks(
    call: Call,
    change: _Change,
    grown: Sequence[int],
    reach: int,
    shrunk: Mapping[int, Window],
    flops: Any = None,
) -> Rule:
    """Returns the rule where spatial dims change by whole numbers.

    Along the dims `grown`, an element and `reach` elements around it become a block; along those in `shrunk`, a window
    becomes an element.
    """
    source, target, backward = change.source[2:], change.target[2:], is_backward(call)
    shrunk = {i: window for i, window in shrunk.items() if 1 not in (source[i], target[i])}
    words = [("_", "_")] * len(source)
    for i in grown:
        words[i] = f"h{i}", f"(h{i} r{i})"
    for i in shrunk:
        words[i] = f"i{i}", f"o{i}"
    x, y = map(" ".join, zip(*words, strict=True))
    notes = " ".join(f"h{i}:local r{i}:whole" for i in grown)
    sized = " ".join(f"{words[i][1]}:size(output_size.{i})" for i in (*grown, *shrunk))
    text = f"n c {x} -> n c {y} | n:local c:local {notes} {sized} {{0}}"
    if backward:
        sizes = {"n": 0, "c": 1} | {words[i][0]: i + 2 for i in (*grown, *shrunk)}
        text = " ".join([gradient_pattern(text), *(f"{f}:size(input_size.{i})" for f, i in sizes.items())])
    around = {f"h{i}": Reach.around("halo", f"h{i}", source[i], reach, reach) for i in grown if reach and source[i] > 1}
    around |= {f"o{i}": Reach.blocks(f"i{i}", source[i], target[i], window) for i, window in shrunk.items()}
    if not around:
        return pattern(text, emit=nonempty, flops=flops)(call)
    return pattern(text, stencil=Stencil(around, backward), flops=flops)(call)


@cache
def _has_equal_blocks(times: int, size: int) -> bool:
    """Returns whether torch, which multiplies by a scale and rounds down, repeats every element `times` times."""
    if not times:
        return False
    for dtype in (np.float32, np.float64):
        positions: Any = np.arange(size).astype(dtype)
        sources = (np.floor(x * dtype(1 / times)) for x in (positions, positions + dtype(0.5)))
        if not all(np.array_equal(x, np.arange(size) // times) for x in sources):
            return False
    return True


@cache
def _is_rounding_stable(small: int, large: int) -> bool:
    """Returns whether single and double precision select the same elements."""
    steps: Any = np.arange(large)
    positions = [steps.astype(dtype) * dtype(small / large) for dtype in (np.float32, np.float64)]
    return all(np.array_equal(*(np.floor(x + half * small / large) for x in positions)) for half in (0.0, 0.5))


def _grid(dims: int) -> RuleFn:
    text = f"n c {' '.join(['_'] * dims)}, n ... _ -> n c ... | n:local c:local ...:local {{0}}"
    forward = pattern(text, emit=nonempty, flops=lambda call, _: 2 * 2**dims * math.prod(result_shape(call)))
    # Gradients of the image, and of the grid.
    flops = lambda call, _: 4 * 2**dims * math.prod(call.operands[0].shape)
    backward = pattern(gradient_pattern(text, "0 1", wrt="0 1"), emit=nonempty, flops=flops)
    return lambda call: (backward if is_backward(call) else forward)(call)


_NEAREST = {f"{name}{d}d": d for d in (1, 2, 3) for name in ("upsample_nearest", "_upsample_nearest_exact")}

_ROWS: dict[str, RuleFn] = {
    **{name: _nearest(dims) for name, dims in _NEAREST.items()},
    "upsample_linear1d": _upsample(1, 2),
    "upsample_trilinear3d": _upsample(3, 2),
    "upsample_bilinear2d": _upsample(2, 2),
    "upsample_bicubic2d": _upsample(2, 4),
    "_upsample_bilinear2d_aa": _upsample(2, 2, smooth=True),
    "_upsample_bicubic2d_aa": _upsample(2, 4, smooth=True),
    "_upsample_lanczos2d_aa": _upsample(2, 6, smooth=True),
    "grid_sampler_2d": _grid(2),
    "grid_sampler_3d": _grid(3),
}

ROWS: dict[str, RuleFn | str] = {
    **{f"{name}{way}": rule for name, rule in _ROWS.items() for way in ("", "_backward")},
    "im2col": pattern("... c _ _ -> ... (c k) _ | ...:local c:local k:whole {0}", emit=nonempty),
    "col2im": pattern("... (c k) _ -> ... c _ _ | ...:local c:local k:whole {0}", emit=nonempty),
    "affine_grid_generator": pattern("n _ _ -> n ... _ | n:local n:size(size.0) {0}", emit=nonempty),
}

# Ops for one kind of device, as the op that exists on all.
DECOMPOSED: dict[str, Callable[..., Any]] = {
    "_grid_sampler_2d_cpu_fallback": aten.grid_sampler_2d,
    "_grid_sampler_2d_cpu_fallback_backward": lambda *args: aten.grid_sampler_2d_backward(*args, [True, True]),
    "cudnn_grid_sampler": lambda x, grid: aten.grid_sampler_2d(x, grid, 0, 0, True),
    "cudnn_grid_sampler_backward": lambda x, grid, grad: aten.grid_sampler_2d_backward(
        grad, x, grid, 0, 0, True, [True, True]
    ),
    "cudnn_affine_grid_generator": lambda theta, *size: aten.affine_grid_generator(theta, list(size), True),
    "cudnn_affine_grid_generator_backward": lambda grad, *size: aten.affine_grid_generator_backward(
        grad, list(size), True
    ),
}
