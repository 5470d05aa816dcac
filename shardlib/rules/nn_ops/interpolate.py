"""Interpolation, sampling on grids, and sliding windows.

Batch and channels pass. Space stays whole, except that of a grid, whose points are looked up each for itself, and where
every element becomes a block (of equal ones, or of what is between it and those around it), or a block an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from shardlib.core.torch_private import schema_of
from shardlib.rules.iteration_space import arg, is_backward, numel, result_shape
from shardlib.rules.local_forms.stencil import Reach, Stencil, nonempty
from shardlib.rules.local_forms.window import Window
from shardlib.rules.notation import gradient
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Rule, RuleFn

aten = torch.ops.aten
Shape = Sequence[int]


def _upsample(dims: int, taps: int, *, smooth: bool = False) -> RuleFn:
    """Every element of the result (of a gradient: of the operand) is so many of each dim, weighted and added up; of so
    many blocks, where `smooth` makes less of them.

    Where a size grows by a whole number, the block that an element becomes reads those around it; where it shrinks by
    one, an element reads around the middle of its block.
    """

    def window(n: int) -> Window:
        half = taps // 2
        return Window(taps * n, n, half * n - (n + 1) // 2) if smooth else Window(taps, n, half - (n + 1) // 2)

    def rule(call: Call) -> Rule:
        change = _change(call, dims)
        corners = arg(call, "align_corners")
        grown = [i for i in change.kept if change.times[i] and not corners]
        shrunk = {i: window(change.over[i]) for i in change.kept if not change.times[i] and not corners}
        work = 2 * taps**dims * max(math.prod(change.given), math.prod(change.made))
        return _in_blocks(call, change, grown, taps // 2, shrunk, flops=lambda *_: work)

    return rule


def _nearest(dims: int) -> RuleFn:
    """Where a size grows by a whole number, an element is a block: `h -> (h r)`, unless rounding decides otherwise."""

    def rule(call: Call) -> Rule:
        change = _change(call, dims)
        given, made, times, over = change.given, change.made, change.times, change.over
        grown = [i for i in change.kept if _blocks(times[i], made[i + 2])]
        shrunk = {i: Window(over[i], over[i]) for i in change.kept if not times[i]}
        # In other dims torch has kernels that round otherwise, and chooses by shapes.
        if not all(i in change.said and _certain(given[i + 2], made[i + 2]) for i in range(dims) if i not in grown):
            grown, shrunk = [], {}
        return _in_blocks(call, change, grown, 0, shrunk)

    return rule


def repeated(call: Call) -> Sequence[int]:
    """How many equal elements, side by side, there are in each dim of a call's result of one of its operand; empty
    where that is not so."""
    dims = _NEAREST.get(schema_of(call.target).name.partition("::")[2], 0)
    if not dims or len(call.operands) != 1:
        return ()
    change = _change(call, dims)
    return (
        (1, 1, *change.times) if all(map(_blocks, change.times, change.made[2:])) and len(change.said) == dims else ()
    )


class _Change(NamedTuple):
    """The shape of what is given and of what it becomes; for each dim of space by which whole number it grows, or over
    which it is divided (0: none); the dims whose scale is what the sizes say."""

    given: Shape
    made: Shape
    times: list[int]
    over: list[int]
    said: list[int]

    @property
    def kept(self) -> list[int]:
        """The dims that change by a whole number."""
        return [i for i in self.said if self.times[i] or self.over[i]]


def _change(call: Call, dims: int) -> _Change:
    given, made = (m.shape for m in (*call.operands, *call.results) if m is not None)
    given, made = (made, given) if is_backward(call) else (given, made)
    sizes = [*zip(given[2:], made[2:], strict=True)]
    times, over = [[b // a if a and b % a == 0 else 0 for a, b in way] for way in (sizes, [x[::-1] for x in sizes])]
    names = [a.name for a in schema_of(call.target).arguments if a.name.startswith("scale")]
    # Torch divides by a scale.
    exact = [times[i] or (1 / over[i] if over[i] and 1 / (1 / over[i]) == over[i] else None) for i in range(dims)]
    return _Change(given, made, times, over, [i for i in range(dims) if arg(call, names[i]) in (None, exact[i])])


def _in_blocks(
    call: Call,
    change: _Change,
    grown: Sequence[int],
    reach: int,
    shrunk: Mapping[int, Window],
    flops: Any = None,
) -> Rule:
    """The rule where in the dims `grown` of space an element, and so many around it, become a block; in those that are
    `shrunk` a window an element."""
    given, made, backward = change.given[2:], change.made[2:], is_backward(call)
    shrunk = {i: window for i, window in shrunk.items() if 1 not in (given[i], made[i])}
    words = [("_", "_")] * len(given)
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
        text = " ".join([gradient(text), *(f"{f}:size(input_size.{i})" for f, i in sizes.items())])
    around = {f"h{i}": Reach.around("halo", f"h{i}", given[i], reach, reach) for i in grown if reach and given[i] > 1}
    around |= {f"o{i}": Reach.blocks(f"i{i}", given[i], made[i], window) for i, window in shrunk.items()}
    if not around:
        return pattern(text, local=nonempty, flops=flops)(call)
    return pattern(text, stencil=Stencil(around, backward), flops=flops)(call)


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


def _grid(dims: int) -> RuleFn:
    text = f"n c {' '.join(['_'] * dims)}, n ... _ -> n c ... | n:local c:local ...:local {{0}}"
    forward = pattern(text, local=nonempty, flops=lambda call, _: 2 * 2**dims * numel(result_shape(call)))
    # For the image, and for the grid.
    flops = lambda call, _: 4 * 2**dims * numel(call.operands[0].shape)
    backward = pattern(gradient(text, "0 1", of="0 1"), local=nonempty, flops=flops)
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
    "im2col": pattern("... c _ _ -> ... (c k) _ | ...:local c:local k:whole {0}", local=nonempty),
    "col2im": pattern("... (c k) _ -> ... c _ _ | ...:local c:local k:whole {0}", local=nonempty),
    "affine_grid_generator": pattern("n _ _ -> n ... _ | n:local n:size(size.0) {0}", local=nonempty),
}

# Kernels for one kind of device only: the op that is there on all.
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
