"""Single slices, parts and triangles of a value; ranges of a dim are in `shifting` and `moving`.

With I the gcd of its parts, a dim that is split is `(n I)` and each part `(m I)`: n and m stay whole, I may be cut. So
a fused `[768, 3 * 768]` weight is split without a look at how the 768 are cut.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from shardlib.rules.iteration_space import Space, arg, axis, result_shape
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.tensor_ops import flip_roll, slice_shift, splice

aten = torch.ops.aten


def _split(call: Call) -> Rule:
    """Parts that are multiples of a block. An empty shard has as many parts, so the local form slices one by one."""
    space = Space()
    shape = call.operands[0].shape
    at = axis(arg(call, "dim"), len(shape))
    parts = [m.shape[at] for m in call.results if m is not None]
    block = math.gcd(shape[at], *parts)
    inner = space.dim(block, "i") if block else ()
    whole, *short = ((*space.dim(n // block if block else n, "n", whole=True), *inner) for n in (shape[at], *parts))
    rest = space.dims([1 if i == at else n for i, n in enumerate(shape)])
    x, *out = ([d if i == at else r for i, r in enumerate(rest)] for d in (whole, *short))

    def local(local: Local) -> Any:
        size = local.size(inner[0])
        ends = [sum(parts[:i]) // block for i in range(len(parts) + 1)]
        slices = itertools.pairwise(ends)
        return tuple(local.op(aten.slice.Tensor, local.args[0], at, size * lo, size * hi) for lo, hi in slices)

    return space.rule([x], out, linear=[{0}], local=local, local_factors=inner)


def _stack(call: Call) -> Rule:
    space = Space()
    shape = result_shape(call)
    at = axis(arg(call, "dim"), len(shape))
    out = space.dims(shape, whole=[at])
    count = len(call.operands)
    return space.rule([out[:at] + out[at + 1 :]] * count, [out], linear=[range(count)])


def _triangle(local: Local) -> Any:
    """tril and triu keep `column - row` on one side of the diagonal, which offsets of rows and columns shift."""
    diagonal = local.offset("r") + arg(local.call, "diagonal") - local.offset("c")
    return local.op(local.call.target, local.args[0], diagonal)


_TRIANGLE = pattern("... r c -> ... r c | r:local c:local {0}", local=_triangle, flops=0)

ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["slice.Tensor", "slice_copy.Tensor", "slice_backward", "slice_scatter"], slice_shift.ranged),
    **dict.fromkeys(["select.int", "select_copy.int", "select_backward", "select_scatter"], slice_shift.ranged),
    **dict.fromkeys([f"{kind}split.Tensor" for kind in ("", "unsafe_")], _split),
    **dict.fromkeys([f"{kind}split_with_sizes" for kind in ("", "unsafe_")], _split),
    **dict.fromkeys(["split_copy.Tensor", "split_with_sizes_copy"], _split),
    "cat": splice.cat,
    "shardlib::splice": splice.splice,
    "stack": _stack,
    "constant_pad_nd": splice.pad,
    "flip": flip_roll.flip,
    "roll": splice.roll,
    "shardlib::send_rows": flip_roll.send_rows,
    "tril": _TRIANGLE,
    "triu": _TRIANGLE,
}
