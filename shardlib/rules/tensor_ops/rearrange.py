"""Splits, stacks, flips and triangles of a value, and rows sent from device to device.

With I the gcd of its parts, a dim that is split is `(n I)` and each part `(m I)`: n and m stay whole, I may be sharded.
So a fused `[768, 3 * 768]` weight is split however the 768 are sharded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.primitives.collectives import piece, ppermute
from shardlib.rules.iteration_space import Space, arg, normalize_dim, result_shape
from shardlib.rules.local_forms.halo import fetch, shard_range
from shardlib.rules.local_forms.helpers import from_torch_code, gather_shards, shard_sizes, sharded_factors
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn

aten = torch.ops.aten


def _split(call: Call) -> Rule:
    """The sizes of parts are multiples of a block. The local form slices one by one: an empty shard has all parts."""
    space = Space()
    shape = call.operands[0].shape
    at = normalize_dim(arg(call, "dim"), len(shape))
    parts = [m.shape[at] for m in call.results if m is not None]
    block = math.gcd(shape[at], *parts)
    inner = space.dim(block, "i") if block else ()
    whole, *short = ((*space.dim(n // block if block else n, "n", whole=True), *inner) for n in (shape[at], *parts))
    rest = space.dims([1 if i == at else n for i, n in enumerate(shape)])
    x, *out = ([d if i == at else r for i, r in enumerate(rest)] for d in (whole, *short))

    def local(local: LocalBuilder) -> Any:
        size = local.size(inner[0])
        ends = [sum(parts[:i]) // block for i in range(len(parts) + 1)]
        slices = itertools.pairwise(ends)
        return tuple(local.op(aten.slice.Tensor, local.args[0], at, size * lo, size * hi) for lo, hi in slices)

    return space.rule([x], out, linear=[{0}], emit=local, local_factors=inner)


def _stack(call: Call) -> Rule:
    space = Space()
    shape = result_shape(call)
    at = normalize_dim(arg(call, "dim"), len(shape))
    out = space.dims(shape, whole=[at])
    count = len(call.operands)
    return space.rule([out[:at] + out[at + 1 :]] * count, [out], linear=[range(count)])


def _triangle(local: LocalBuilder) -> Any:
    """Shifts the diagonal by the offsets of rows and columns."""
    diagonal = local.offset("r") + arg(local.call, "diagonal") - local.offset("c")
    return local.op(local.call.target, local.args[0], diagonal)


def _flip(local: LocalBuilder, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Exchanges shards with the opposite device, in one message if all shards have equal sizes."""
    for at in {normalize_dim(d, x.dim()) for d in dims if x.dim()}:
        for f in sharded_factors(local, local.rule.operands[0][at]):
            sizes, size = shard_sizes(f), local.rule.sizes[f]
            if len({*sizes}) == 1:
                x = ppermute(x, f, [(i, len(sizes) - 1 - i) for i in range(len(sizes))])
            else:
                start, stop = shard_range((f,), size)
                (x,) = fetch(x, at, (f,), [(size - stop, size - start)], name="input")
    return torch.flip(x, tuple(dims))


def _send_rows(call: Call) -> Rule:
    """`send_rows(x, sources, rows)`: devices with one row each send it; other shardings gather all rows."""
    space, (n, *_) = Space(), call.operands[0].shape
    x, pairs = space.dims(call.operands[0].shape, "n"), list(zip(*call.args[1:], strict=True))

    def form(_: LocalBuilder, value: Tensor, *args: Any) -> Tensor:
        (factor,) = x[0]
        if shard_sizes(factor) == [1] * n:
            out: Tensor = ppermute(value, factor, pairs)
            return out
        offset, size, whole = piece(factor)
        rows: Tensor = call.target(gather_shards(value, factor, 0, whole), *args)
        return rows.narrow(0, offset, size)

    sent = {*x[0]} if pairs else ()  # without pairs, all rows become zeros
    return space.rule([x], [x], linear=[{0}], emit=from_torch_code(form), local_factors=sent)


_TRIANGLE = pattern("... r c -> ... r c | r:local c:local {0}", emit=_triangle, flops=0)
_SPLITS = ["split.Tensor", "unsafe_split.Tensor", "split_with_sizes", "unsafe_split_with_sizes"]

ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys([*_SPLITS, "split_copy.Tensor", "split_with_sizes_copy"], _split),
    "stack": _stack,
    **dict.fromkeys(["tril", "triu"], _TRIANGLE),
    "flip": pattern("[dims] -> [dims] | dims:local {0}", form=_flip, flops=0),
    "shardlib::send_rows": _send_rows,
}
