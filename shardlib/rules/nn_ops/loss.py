"""Losses: cross-entropy over classes that may be sharded, and losses of single elements.

In a cross-entropy a device reads the logits of its own classes, and logits are never sent. A mean is a local sum over
the global count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import shardlib.ops.ctc
import shardlib.ops.scores  # noqa: F401  (they define ops)
from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.primitives.collectives import psum
from shardlib.rules.iteration_space import arg, is_backward
from shardlib.rules.local_forms.helpers import (
    accumulation_dtype,
    check_index,
    in_accumulation_dtype,
    locate_index,
    sharded_factors,
)
from shardlib.rules.notation import gradient_pattern, parse
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn

aten = torch.ops.aten

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # torch's numbers of the argument `reduction`
_NONE, _MEAN, _SUM = REDUCTIONS.values()


def _classes(local: LocalBuilder, target: Tensor, ignore: int) -> Tensor:
    """Targets as indices into this shard of the classes; -1 for those outside of it, and for ignored targets."""
    mine, none = check_index(target, local.rule.sizes["c"], ignore=ignore), target == ignore
    for factor in sharded_factors(local, ["c"]):
        mine, outside = locate_index(mine, factor)
        none = outside | none
    return mine.masked_fill(none, -1)


def _nll(
    local: LocalBuilder, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Tensor, Tensor]:
    """A mean divides the sum of all devices by the weight of all devices; ignored targets change both."""
    op, mine, dtype = local.call.target, _classes(local, target, ignore), x.dtype
    if reduction != _MEAN:
        loss, total = op(x, mine, weight, reduction, -1)
        return loss, (target != ignore).sum().to(total.dtype) if local.rule.complete else total
    weight = None if weight is None else weight.to(accumulation_dtype(dtype))
    loss, total = psum(
        op(x.to(accumulation_dtype(dtype)), mine, weight, _SUM, -1), sharded_factors(local, local.rule.reduce)
    )
    return (loss / total).to(dtype), total.to(dtype)


def _nll_backward(
    local: LocalBuilder,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Any,
    reduction: int,
    ignore: int,
    total: Tensor,
) -> Tensor:
    out: Tensor = local.call.target(grad, x, _classes(local, target, ignore), weight, reduction, -1, total)
    return out


def _nll_rule(call: Call) -> Rule:
    """Sums and single losses add up over rows and classes. The op reads one logit per target."""
    backward = is_backward(call)
    logits, target = ("n c ...", "n ...") if call.operands[int(backward)].rank > 1 else ("c", "")
    reduction = arg(call, "reduction")
    summed = ["c", *target.split()] if reduction != _NONE else ["c"]
    kinds = " ".join(f"{f}:{'none' if reduction == _MEAN else 'sum'}" for f in summed)
    kinds += " c:local" + " ".join(f" {f}:local" for f in target.split() if reduction == _MEAN)
    kinds += " ".join(f" {f}:none" for f in target.split() if reduction == _NONE)  # the total weight is 0
    loss = target if reduction == _NONE else ""
    text = f"{logits}, {target}, c -> {loss}, | "
    if backward:
        return pattern(gradient_pattern(f"{text} c:local", "0 1 2 r1"), form=_nll_backward)(call)
    # The number of targets does not depend on the sharding of the classes, but their weight does.
    counted = reduction == _SUM and arg(call, "weight") is None
    flops, complete = 2 * math.prod(call.operands[1].shape), frozenset([(1, "c")] if counted else [])
    return pattern(f"{text} {kinds}", form=_nll, complete=complete, flops=lambda *_: flops)(call)


def _scores_backward(local: LocalBuilder, *args: Any) -> Any:
    """Each device has the sum of a row's gradients."""
    form = lambda grad, scores, total, dim: grad - scores.exp() * total.unsqueeze(dim)
    return in_accumulation_dtype(form, local.call)(*args)


# Losses of elements, or of rows whose classes stay whole --------------------------------------------------------------


def _loss(text: str) -> RuleFn:
    """Returns the rule of an op with a loss per element of `...`, or their sum or mean, by the argument `reduction`."""

    def rule(call: Call) -> Rule | None:
        backward = is_backward(call)
        if max(m.rank for m in call.operands) < parse(text).operands[int(backward)].rank:
            return None  # there is no dim to shard
        reduction = arg(call, "reduction")
        notes = "...:local" if reduction == _MEAN or (reduction == _SUM and not backward) else ""
        return pattern(f"{text} {notes}", form=_reduced, flops=1)(call)

    return rule


def _reduced(local: LocalBuilder, *args: Any) -> Any:
    """Returns the sum of the shard's losses, for a mean divided by the global count; for a gradient, its gradient.

    The op returns single losses, since its own sum may overflow in half precision and is undefined for an empty shard.
    """
    op = local.call.target
    at = [a.name for a in schema_of(op).arguments].index("reduction")
    losses = (n for f, n in local.rule.sizes.items() if f.startswith("*"))
    count = math.prod(losses) if args[at] == _MEAN else 1
    before, after = args[:at], args[at + 1 :]
    if is_backward(local.call):
        return op(before[0] / count, *before[1:], _SUM, *after)
    results = op(*before, _NONE, *after)
    each, *rest = results if isinstance(results, tuple) else (results,)
    total = each.sum(dtype=accumulation_dtype(each.dtype))
    return ((total / count if count > 1 else total).to(each.dtype), *rest)


# Sequences of labels --------------------------------------------------------------------------------------------------


def ctc_loss(
    x: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.ctc_loss` without reading the values of lengths that are tensors.

    A single sequence may have no batch dim.
    """
    kind = REDUCTIONS.get(str(reduction), reduction)
    single = x.dim() == 2
    lengths = [
        n if isinstance(n, Tensor) else torch.tensor(n, device=x.device) for n in (input_lengths, target_lengths)
    ]
    arguments = lengths if isinstance(target_lengths, Tensor) else [input_lengths, target_lengths]
    if single:
        x, targets = x.unsqueeze(1), targets.unsqueeze(0) if targets.dim() == 1 else targets
        arguments = [n.reshape(1) if isinstance(n, Tensor) else list(n) for n in arguments]
    loss, _ = aten._ctc_loss(x, targets, *arguments, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0, loss)
    if kind == _MEAN:
        loss = (loss / lengths[1].clamp(min=1)).mean()
    elif kind == _SUM:
        loss = loss.sum()
    elif single:
        loss = loss.squeeze(0)
    return loss  # type: ignore[no-any-return]


def _ctc_loss(
    x: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, zero_infinity: bool = False
) -> tuple[Tensor, Tensor]:
    rows, lengths, longest = _sequences(targets, input_lengths, target_lengths)
    return torch.ops.shardlib.ctc_loss(x, rows, *lengths, blank, zero_infinity, longest)  # type: ignore[no-any-return]


def _ctc_loss_backward(
    grad: Tensor, x: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, loss: Tensor, alpha: Tensor,
    blank: int, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    rows, lengths, _ = _sequences(targets, input_lengths, target_lengths)
    back = torch.ops.shardlib.ctc_loss_backward
    return back(grad, x, rows, *lengths, loss, alpha, blank, zero_infinity)  # type: ignore[no-any-return]


def _sequences(targets: Tensor, inputs: Any, lengths: Any) -> tuple[Tensor, tuple[Tensor, Tensor], int]:
    """Returns targets as one row per sequence, lengths as tensors, and the largest possible length of a target.

    `targets` may be concatenated, and lengths may be Python numbers.
    """
    if isinstance(lengths, Tensor):
        longest = targets.shape[-1]
    else:
        longest = max(lengths, default=0)
        inputs, lengths = (torch.tensor(n, dtype=torch.int64, device=targets.device) for n in (inputs, lengths))
    if targets.dim() == 1:
        starts = lengths.cumsum(0) - lengths
        positions = starts[:, None] + torch.arange(longest, device=targets.device)
        targets = targets[positions.clamp(max=max(len(targets) - 1, 0))]
    return targets, (inputs, lengths), longest


_PAIRED = ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"]
_PAIR = "..., ... -> ... | ...:sum"
_TRIPLE = "..., ..., ... -> ... | ...:sum"
_MARGIN = "... c, ..., c -> ... | c:whole ...:sum"
_MARGINS = "... c, ... c -> ..., ... c | c:whole ...:sum"
_CTC = "t n _, n _, n, n -> n, n t _ | t:whole"

ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys([f"nll_loss{dims}_{way}" for dims in ("", "2d") for way in ("forward", "backward")], _nll_rule),
    "shardlib::scores_backward": pattern(
        "[dim], [dim], ... -> [dim] | dim:local {0,2}", form=_scores_backward, flops=4
    ),
    **dict.fromkeys(_PAIRED, _loss(_PAIR)),
    **dict.fromkeys([f"{name}_backward" for name in _PAIRED], _loss(gradient_pattern(_PAIR, "0 1"))),
    "binary_cross_entropy": _loss(_TRIPLE),
    "binary_cross_entropy_backward": _loss(gradient_pattern(_TRIPLE, "0 1 2")),
    "binary_cross_entropy_with_logits": _loss("..., ..., ..., ... -> ... | ...:sum"),
    "multi_margin_loss": _loss(_MARGIN),
    "multi_margin_loss_backward": _loss(gradient_pattern(_MARGIN, "0 1 2")),
    "multilabel_margin_loss_forward": _loss(_MARGINS),
    "multilabel_margin_loss_backward": _loss(gradient_pattern(_MARGINS, "0 1 r1")),
    "shardlib::ctc_loss": _CTC,
    "shardlib::ctc_loss_backward": gradient_pattern(_CTC, "0 1 2 3 r0 r1"),
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["_ctc_loss", "_ctc_loss.Tensor"], _ctc_loss),
    **dict.fromkeys(["_ctc_loss_backward", "_ctc_loss_backward.Tensor"], _ctc_loss_backward),
    # Torch chooses by the values of lengths, and by the device.
    **dict.fromkeys(["_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor"], lambda *_, **__: False),
}
