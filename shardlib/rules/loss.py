"""Losses: cross-entropy over classes that may be cut, and losses element by element.

In a cross-entropy a device looks at the logits of its own classes, and logits never move. A mean is a local sum over
the global count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import shardlib.ops.ctc  # noqa: F401  (defines shardlib::ctc_loss)
from shardlib.internals import schema_of
from shardlib.manual.collectives import psum
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import checked, cut, located, positional, wide
from shardlib.rules.space import Space, arg, argument_named, broadcast, join, numel, result_dtype, result_shape

aten = torch.ops.aten

_NONE, _MEAN, _SUM = range(3)  # what the argument `reduction` says


def _classes(local: Local, target: Tensor, ignore: int) -> Tensor:
    """Targets as this shard of the classes counts; -1, which no class has, where they lie outside or are ignored."""
    mine, none = checked(target, local.rule.sizes["c"], ignore=ignore), target == ignore
    for factor in cut(local, ["c"]):
        mine, outside = located(mine, factor)
        none = outside | none
    return mine.masked_fill(none, -1)


def _nll(local: Local) -> Any:
    """A mean is the sum of all devices over the weight of all devices: a target may be ignored, so both travel."""
    op, shared = local.call.target, cut(local, local.rule.reduce)

    def form(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int) -> tuple[Tensor, Tensor]:
        mine, dtype = _classes(local, target, ignore), x.dtype
        if reduction != _MEAN:
            return op(x, mine, weight, reduction, -1)  # type: ignore[no-any-return]
        weight = None if weight is None else weight.to(wide(dtype))
        loss, total = psum(op(x.to(wide(dtype)), mine, weight, _SUM, -1), shared)
        return (loss / total).to(dtype), total.to(dtype)

    return local.run(form, *local.args)


def _nll_backward(local: Local) -> Any:
    op = local.call.target

    def form(
        grad: Tensor, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore: int, total: Tensor
    ) -> Tensor:
        return op(grad, x, _classes(local, target, ignore), weight, reduction, -1, total)  # type: ignore[no-any-return]

    return local.run(form, *local.args)


def _dims(shape: Sequence[int]) -> tuple[str, str]:
    """Words for the logits and the targets: the classes stand first, or behind the batch."""
    space = " ".join(f"s{i}" for i in range(len(shape) - 2))
    return ("c", "") if len(shape) == 1 else (f"n c {space}", f"n {space}")


def _nll_forward(call: Call) -> Rule:
    """Sums and single losses add up over rows and classes."""
    logits, target = _dims(call.operands[0].shape)
    reduction = arg(call, 3, "reduction")
    summed = ["c", *target.split()] if reduction != _NONE else ["c"]
    kinds = " ".join(f"{f}:{'none' if reduction == _MEAN else 'sum'}" for f in summed)
    kinds += " c:local" + " ".join(f" {f}:local" for f in target.split() if reduction == _MEAN)
    loss = target if reduction == _NONE else ""
    return pattern(f"{logits}, {target}, c -> {loss}, | {kinds}", local=_nll)(call)


def _nll_backward_rule(call: Call) -> Rule:
    logits, target = _dims(call.operands[1].shape)
    loss = target if arg(call, 4, "reduction") == _NONE else ""
    return pattern(f"{loss}, {logits}, {target}, c, -> {logits} | c:local {{0}}", local=_nll_backward)(call)


# Means over the elements or rows of the whole ------------------------------------------------------------------------


def _mean(reduction: int, count: int, *, apart: bool = False) -> Callable[[Local], Any]:
    """The local form of a mean: the sum of what is here over the count of all. Further results are as they are.

    `apart`: losses come one by one and are added up here, since the op's own sum of none is whatever memory holds.
    """

    def local(local: Local) -> Any:
        dtype, op = result_dtype(local.call), local.call.target
        how = _SUM if wide(dtype) == dtype and not apart else _NONE  # a sum may be too large for half precision

        def form(*args: Any) -> Any:
            found = op(*args[:reduction], how, *args[reduction + 1 :])
            total, *rest = found if isinstance(found, tuple) else (found,)
            total = total.sum(dtype=wide(dtype)) if how == _NONE else total
            return ((total / count).to(dtype), *rest)

        return local.run(form, *positional(local))

    return local


def _mean_backward(reduction: int, count: int) -> Callable[[Local], Any]:
    """The gradient of a mean is that of the sum, over the count of all."""

    def local(local: Local) -> Any:
        op = local.call.target
        form = lambda grad, *args: op(grad / count, *args[: reduction - 1], _SUM, *args[reduction:])
        return local.run(form, *positional(local))

    return local


def _elementwise(reduction: int) -> RuleFn:
    """`mse_loss(x, target, reduction)` and its like; the argument `reduction` stands at that position."""

    def rule(call: Call) -> Rule:
        how = arg(call, reduction, "reduction", _MEAN)
        space = Space()
        shape = join(m.shape for m in call.operands)
        dims = space.dims(shape)
        return space.rule(
            [broadcast(dims, m.shape) for m in call.operands],
            [[] if how else dims],
            reduce=dict.fromkeys(space.sizes, "sum") if how else {},
            local=_mean(reduction, numel(shape)) if how == _MEAN else None,
            local_factors=space.sizes if how == _MEAN else (),
            flops=numel(shape),
        )

    return rule


def _elementwise_backward(reduction: int) -> RuleFn:
    """`mse_loss_backward(grad, x, target, reduction)`."""

    def rule(call: Call) -> Rule:
        space = Space()
        shape = result_shape(call)
        dims = space.dims(shape)
        mean = arg(call, reduction, "reduction", _MEAN) == _MEAN
        return space.rule(
            [broadcast(dims, m.shape) for m in call.operands],
            [dims],
            linear=[{0}],
            local=_mean_backward(reduction, numel(shape)) if mean else None,
            local_factors=space.sizes if mean else (),
            flops=numel(shape),
        )

    return rule


def _rowwise(text: str, *, backward: bool = False) -> RuleFn:
    """Losses that look at all classes of a row: rows are independent, classes stay whole."""

    def rule(call: Call) -> Rule | None:
        at = [a.name for a in schema_of(call.target).arguments].index("reduction")
        if not (shape := call.operands[int(backward)].shape):
            return None  # one number has nothing to cut
        how = argument_named(call, "reduction")
        count = numel(shape[:-1]) if how == _MEAN else 1
        if how == _NONE or (how == _SUM and backward):
            return pattern(text)(call)
        local = _mean_backward(at, count) if backward else _mean(at, count, apart=True)
        return pattern(f"{text} ...:local", local=local)(call)

    return rule


# Sequences of labels --------------------------------------------------------------------------------------------------


def ctc_loss(
    x: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.ctc_loss`, whose own code reads the values of lengths that are tensors.

    One sequence may come without the dim of the batch.
    """
    how = {"none": _NONE, "mean": _MEAN, "sum": _SUM}.get(str(reduction), reduction)
    alone = x.dim() == 2
    lengths = [
        n if isinstance(n, Tensor) else torch.tensor(n, device=x.device) for n in (input_lengths, target_lengths)
    ]
    kept = lengths if isinstance(target_lengths, Tensor) else [input_lengths, target_lengths]
    if alone:
        x, targets = x.unsqueeze(1), targets.unsqueeze(0) if targets.dim() == 1 else targets
        kept = [n.reshape(1) if isinstance(n, Tensor) else list(n) for n in kept]
    loss, _ = aten._ctc_loss(x, targets, *kept, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0, loss)
    if how == _MEAN:
        loss = (loss / lengths[1].clamp(min=1)).mean()
    elif how == _SUM:
        loss = loss.sum()
    elif alone:
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
    """Targets as a row per sequence, lengths as tensors, and how long a target may be.

    Targets may come one behind the other, lengths as Python numbers.
    """
    if isinstance(lengths, Tensor):
        longest = targets.shape[-1]
    else:
        longest = max(lengths, default=0)
        inputs, lengths = (torch.tensor(n, dtype=torch.int64, device=targets.device) for n in (inputs, lengths))
    if targets.dim() == 1:
        starts = lengths.cumsum(0) - lengths
        places = starts[:, None] + torch.arange(longest, device=targets.device)
        targets = targets[places.clamp(max=max(len(targets) - 1, 0))]
    return targets, (inputs, lengths), longest


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["nll_loss_forward", "nll_loss2d_forward"], _nll_forward),
    **dict.fromkeys(["nll_loss_backward", "nll_loss2d_backward"], _nll_backward_rule),
    **dict.fromkeys(["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"], _elementwise(2)),
    **dict.fromkeys(
        ["mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "soft_margin_loss_backward"],
        _elementwise_backward(3),
    ),
    "binary_cross_entropy": _elementwise(3),
    "binary_cross_entropy_backward": _elementwise_backward(4),
    "binary_cross_entropy_with_logits": _elementwise(4),
    "multi_margin_loss": _rowwise("... c, ..., c -> ... | c:whole ...:sum"),
    "multi_margin_loss_backward": _rowwise("..., ... c, ..., c -> ... c | c:whole {0}", backward=True),
    "multilabel_margin_loss_forward": _rowwise("... c, ... c -> ..., ... c | c:whole ...:sum"),
    "multilabel_margin_loss_backward": _rowwise("..., ... c, ... c, ... c -> ... c | c:whole {0}", backward=True),
    "shardlib::ctc_loss": "t n _, n _, n, n -> n, n t _ | t:whole",
    "shardlib::ctc_loss_backward": "n, t n _, n _, n, n, n, n t _ -> t n _ | t:whole {0}",
}

DECOMPOSED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["_ctc_loss", "_ctc_loss.Tensor"], _ctc_loss),
    **dict.fromkeys(["_ctc_loss_backward", "_ctc_loss_backward.Tensor"], _ctc_loss_backward),
    # A choice by the values of lengths, which also asks for a certain device.
    **dict.fromkeys(["_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor"], lambda *_, **__: False),
}
