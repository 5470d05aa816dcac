"""Losses: cross-entropy over classes that may be cut, and losses element by element.

In a cross-entropy a device looks at the logits of its own classes, and logits never move. A mean is a local sum over
the global count.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import cast, localise, wide
from shardlib.rules.space import Space, arg, broadcast, join, numel, result_shape

aten = torch.ops.aten


def _classes(local: Local, target: Any, ignore: int) -> Any:
    """Targets as this shard of the classes counts; -1, which no class has, where they lie outside or are ignored."""
    mine, outside = localise(local, target, "c")
    ignored = local.op(aten.eq.Scalar, target, ignore)
    return local.op(aten.masked_fill.Scalar, mine, local.op(aten.bitwise_or.Tensor, outside, ignored), -1)


def _nll(local: Local) -> Any:
    x, target, weight, reduction, ignore = local.args
    return local.op(aten.nll_loss_forward.default, x, _classes(local, target, ignore), weight, reduction, -1)


def _nll_backward(local: Local) -> Any:
    grad, x, target, weight, reduction, ignore, total = local.args
    mine = _classes(local, target, ignore)
    return local.op(aten.nll_loss_backward.default, grad, x, mine, weight, reduction, -1, total)


def _nll_loss_forward(call: Call) -> Rule:
    """Sums and single losses add up over rows and classes; a mean divides by a count that no device has."""
    mean = arg(call, 3, "reduction") == 1
    kind = "n:whole c:whole" if mean else "n:sum c:sum c:local"
    row = "n" if len(call.operands[0].shape) == 2 else ""
    loss = row if arg(call, 3, "reduction") == 0 else ""
    kind = kind if row else kind.replace("n:sum", "").replace("n:whole", "")
    return pattern(f"{row} c, {row}, c -> {loss}, | {kind}", local=_nll)(call)


def _nll_loss_backward(call: Call) -> Rule:
    row = "n" if len(call.operands[1].shape) == 2 else ""
    loss = row if arg(call, 4, "reduction") == 0 else ""
    return pattern(f"{loss}, {row} c, {row}, c, -> {row} c | c:local {{0}}", local=_nll_backward)(call)


# Element by element ---------------------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = range(3)


def _others(local: Local) -> dict[str, Any]:
    """The keyword arguments that do not say how to reduce."""
    return {k: v for k, v in local.kwargs.items() if k != "reduction"}


def _elementwise(reduction: int) -> RuleFn:
    """`mse_loss(x, target, reduction)` and its like; the argument `reduction` stands at that position."""

    def rule(call: Call) -> Rule:
        how = arg(call, reduction, "reduction", _MEAN)
        space = Space()
        shape = join(m.shape for m in call.operands)
        dims = space.dims(shape)

        def local(local: Local) -> Any:
            out = call.results[0]
            assert out is not None
            acc = wide(out.dtype)
            before = [*local.args[:reduction], None][:reduction]
            behind = local.args[reduction + 1 :]
            if acc == out.dtype:
                total = local.op(call.target, *before, _SUM, *behind, **_others(local))
            else:  # a sum may be too large for half precision
                each = local.op(call.target, *before, _NONE, *behind, **_others(local))
                total = local.op(aten.sum.default, each, dtype=acc)
            return cast(local, local.op(aten.div.Scalar, total, numel(shape)), acc, out.dtype)

        return space.rule(
            [broadcast(dims, m.shape) for m in call.operands],
            [[] if how else dims],
            reduce=dict.fromkeys(space.sizes, "sum") if how else {},
            local=local if how == _MEAN else None,
            local_factors=space.sizes if how == _MEAN else (),
            flops=numel(shape),
        )

    return rule


def _elementwise_backward(reduction: int) -> RuleFn:
    """`mse_loss_backward(grad, x, target, reduction)`: the gradient of a mean is divided by the global count."""

    def rule(call: Call) -> Rule:
        space = Space()
        shape = result_shape(call)
        dims = space.dims(shape)
        mean = arg(call, reduction, "reduction", _MEAN) == _MEAN

        def local(local: Local) -> Any:
            grad, *rest = [*local.args[:reduction], None][:reduction]
            mine = local.op(aten.div.Scalar, grad, numel(shape))
            return local.op(call.target, mine, *rest, _SUM, *local.args[reduction + 1 :], **_others(local))

        return space.rule(
            [broadcast(dims, m.shape) for m in call.operands],
            [dims],
            linear=[{0}],
            local=local if mean else None,
            local_factors=space.sizes if mean else (),
            flops=numel(shape),
        )

    return rule


ROWS: dict[str, RuleFn | str] = {
    "nll_loss_forward": _nll_loss_forward,
    "nll_loss_backward": _nll_loss_backward,
    **dict.fromkeys(["mse_loss", "smooth_l1_loss", "huber_loss"], _elementwise(2)),
    **dict.fromkeys(["mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"], _elementwise_backward(3)),
    "binary_cross_entropy": _elementwise(3),
    "binary_cross_entropy_backward": _elementwise_backward(4),
}
