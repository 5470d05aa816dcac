"""Bags and segments: rows of a table added up in groups.

Bags are given by where they start, so that indices stay whole. Along a cut vocabulary every device adds up the rows
that it has: what lies on the others is looked up in one row of zeros behind its last.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.internals import schema_of
from shardlib.rules.nonempty import nonempty
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Meta, Rule, RuleFn
from shardlib.rules.shards import check, cut, localise, never_empty, positional
from shardlib.rules.space import Space, arg, axis, numel

aten = torch.ops.aten

_SUM, _MEAN, _MAX = range(3)


def _spare(local: Local, index: Any, padding: int = -1) -> Any:
    """Indices as this shard counts; those on other devices, and the padding, are one behind the shard's last."""
    mine, outside = localise(local, index, "v")
    if padding >= 0:
        outside = local.op(aten.bitwise_or.Tensor, outside, local.op(aten.eq.Scalar, index, padding))
        mine = local.op(aten.masked_fill.Scalar, mine, outside, 0)
    return local.op(aten.add.Tensor, mine, local.op(aten.mul.Scalar, outside, local.size("v")))


def _bag(local: Local) -> Any:
    if not cut(local, ["v"]):
        return nonempty(local)
    table, index, offsets, by_count, mode, sparse, weights, last, padding = positional(local)
    # Where bags begin and what they count has nothing to do with the table: 1 is the padding, 0 what is none.
    kinds = local.op(aten.mul.Scalar, local.op(aten.eq.Scalar, index, padding), 1)
    kinds = local.op(aten._to_copy.default, kinds, dtype=local.call.operands[1].dtype)
    tiny = local.op(aten.new_zeros.default, table, [2, 1])
    other = 1 if padding >= 0 else -1
    _, *counts = local.op(local.call.target, tiny, kinds, offsets, by_count, mode, sparse, weights, last, other)
    table = local.op(aten.constant_pad_nd.default, never_empty(local, table, 0, ["d"]), [0, 0, 0, 1], 0)
    mine = _spare(local, check(local, index, local.call.operands[0].shape[0]), padding)
    out, *_ = local.op(local.call.target, table, mine, offsets, False, _SUM, False, weights, last, -1)
    out = local.op(aten.slice.Tensor, out, 1, 0, local.size("d"))
    if mode == _MEAN:
        pooled = local.call.results[0]
        assert pooled is not None
        size = local.op(aten.slice.Tensor, counts[1], 0, 0, pooled.shape[0])  # a GPU counts one more behind the last
        size = local.op(aten.unsqueeze.default, local.op(aten.clamp_min.default, size, 1), 1)
        out = local.op(aten.div.Tensor, out, size)
    return (local.all_reduce(out, "v", "sum", local.rule.results[0]), *counts)


def _embedding_bag(call: Call) -> Rule:
    """The other results hold integers about the bags, and for a maximum where it was found, which asks for all rows."""
    most = arg(call, 4, "mode", _SUM) == _MAX
    kinds = "v:whole d:local d:none" if most else "v:none v:local d:local d:none"
    weights = ", _" if len(call.operands) == 4 else ""
    text = f"v d, _, _{weights} -> _ d, _, _, {'_ d' if most else '_'} | {kinds}"
    return pattern(text, local=_bag)(call)


def _bag_backward(first: int) -> RuleFn:
    """`(grad, indices, ..., bag sizes, maxima, size of the vocabulary, ...)`, the size at position `first`."""

    def local(local: Local) -> Any:
        if not cut(local, ["v"]):
            return nonempty(local)
        args = positional(local)
        padding = args[-1]
        args[1] = _spare(local, args[1], padding)
        if args[first + 2] == _MAX:
            args[first - 1] = _spare(local, args[first - 1])
        args[first] = local.size("v") + 1
        args[-1] = -1
        rows = local.op(local.call.target, *args)
        return local.op(aten.slice.Tensor, rows, 0, 0, local.size("v"))

    def rule(call: Call) -> Rule:
        most = arg(call, first + 2, "mode") == _MAX
        between = ", ".join(["_"] * (first - 2))
        weights = ", _" if len(call.operands) > first else ""
        # Torch's kernel on CPU scales by the counts of other indices than the row's: which, only the whole list tells.
        rows = "v:whole" if call.args[first + 1] else "v:local"
        text = f"_ d, {between}, {'_ d' if most else '_'}{weights} -> v d | {rows} d:local {{0}}"
        return pattern(text, local=local, ints={(first,): "v"})(call)

    return rule


def _weights_backward(local: Local) -> Any:
    """The gradient of a weight is the product of a row and the bag's gradient: 0 where the row is elsewhere."""
    grad, table, index, offsets, bags, mode, padding = positional(local)
    mine, outside = localise(local, index, "v")
    table = never_empty(local, table, 1, ["v", "d"])
    grad = never_empty(local, grad, 0, ["d"])
    if padding >= 0:
        outside = local.op(aten.bitwise_or.Tensor, outside, local.op(aten.eq.Scalar, index, padding))
    each = local.op(local.call.target, grad, table, mine, offsets, bags, mode, -1)
    return local.op(aten.masked_fill.Scalar, each, outside, 0)


def _renorm(local: Local) -> Any:
    """The row of zeros has no norm to speak of."""
    table, index, *rest = local.args
    table = local.op(aten.constant_pad_nd.default, table, [0, 0, 0, 1], 0)
    out = local.op(local.call.target, table, _spare(local, index), *rest)
    return local.op(aten.slice.Tensor, out, 0, 0, local.size("v"))


def _segments(call: Call) -> Rule:
    """Lengths (or offsets) lie along one dim of the data: dims before it have their own, dims behind share them."""
    backward = "backward" in schema_of(call.target).name
    data, out = (call.operands[2], call.operands[0]) if backward else (call.operands[0], call.results[0])
    assert out is not None
    at = axis(arg(call, 7, "axis", 0), len(data.shape))
    space = Space()
    x = space.dims(data.shape, whole=[at])
    reduced = [*x[:at], space.dim(out.shape[at], "segments", whole=True), *x[at + 1 :]]
    bounds = [
        [*x[:at], *space.dims(m.shape[at:], "bounds", whole=[0])] for m in call.kwargs.values() if type(m) is Meta
    ]
    operands = [reduced, reduced, x] if backward else [x]
    return space.rule(
        [*operands, *bounds],
        [x if backward else reduced],
        local=lambda local: nonempty(local, **({} if backward else {"unsafe": True})),
        local_factors=[f for d in x[:at] for f in d],
        flops=numel(data.shape),
    )


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["_embedding_bag", "_embedding_bag_forward_only"], _embedding_bag),
    "_embedding_bag_backward": _bag_backward(6),
    "_embedding_bag_dense_backward": _bag_backward(5),
    "_embedding_bag_per_sample_weights_backward": pattern(
        "_ d, v d, _, _, _ -> _ | d:sum d:local v:sum v:local {0} {1}", local=_weights_backward
    ),
    "embedding_renorm": pattern("v _, ... -> v _ | v:local ...:whole", local=_renorm),
    **dict.fromkeys(["segment_reduce", "_segment_reduce_backward"], _segments),
}
