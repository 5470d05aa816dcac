"""Cross-entropy over classes that may be cut: a device knows the logits of its own classes, and logits never move."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import localise
from shardlib.rules.space import arg

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


ROWS: dict[str, RuleFn | str] = {
    "nll_loss_forward": _nll_loss_forward,
    "nll_loss_backward": _nll_loss_backward,
}
