"""Softmax and its like, along a cut dim: devices exchange the maximum and the sum of a row, never its elements."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shardlib.rules.rule import Call, Rule, RuleFn
from shardlib.rules.shards import Rows, widely
from shardlib.rules.space import Space, arg, axes, axis, numel, result_shape


def _along(form: Callable[..., Tensor], dim: int, *, linear: bool = False) -> RuleFn:
    """The rule of an op along the dim whose argument stands at `dim`; `form` is for when it is cut."""

    def rule(call: Call) -> Rule:
        space = Space()
        shape = result_shape(call)
        x = space.dims(shape)
        at = axis(arg(call, dim, "dim"), len(shape))
        count = len(call.operands)
        return space.rule(
            [x] * count,
            [x],
            linear=[{0}] if linear else [],
            local=lambda local: local.run(widely(form, call), Rows.of(local, [at]), *local.args[:count]),
            local_factors=x[at] if shape else (),
            flops=4 * numel(shape),
        )

    return rule


def _shifted(rows: Rows, x: Tensor) -> tuple[Tensor, Tensor]:
    """`x - max`, so that no exponential overflows, and the maximum."""
    top = rows.max(x)
    return x - top, top


def _softmax(rows: Rows, x: Tensor) -> Tensor:
    exp = _shifted(rows, x)[0].exp()
    return exp / rows.sum(exp)


def _safe_softmax(rows: Rows, x: Tensor) -> Tensor:
    """A row in which everything is masked away gives zeros; its maximum is -inf."""
    shifted, top = _shifted(rows, x)
    exp = shifted.exp()
    return (exp / rows.sum(exp)).masked_fill(top == float("-inf"), 0)


def _log_softmax(rows: Rows, x: Tensor) -> Tensor:
    shifted, _ = _shifted(rows, x)
    return shifted - rows.sum(shifted.exp()).log()


def _softmax_backward(rows: Rows, grad: Tensor, y: Tensor) -> Tensor:
    product = grad * y
    return product - y * rows.sum(product)


def _log_softmax_backward(rows: Rows, grad: Tensor, y: Tensor) -> Tensor:
    return grad - y.exp() * rows.sum(grad)


def _logsumexp(call: Call) -> Rule:
    space = Space()
    shape = call.operands[0].shape
    reduced = axes(arg(call, 1, "dim"), len(shape))
    ordered = not call.operands[0].dtype.is_complex  # others have no maximum to shift by
    x = space.dims(shape, whole=() if ordered else reduced)
    kept = len(result_shape(call)) == len(shape)
    row = [f for i in reduced if shape for f in x[i]]

    def form(rows: Rows, x: Tensor) -> Tensor:
        top = rows.max(x)
        # Rows of nothing but -inf (or with +inf) are shifted by nothing, as torch does.
        top = top.masked_fill(top.abs() == float("inf"), 0)
        total = rows.sum((x - top).exp()).log() + top
        return total if kept else total.squeeze(reduced)

    return space.rule(
        [x],
        [[() if i in reduced else d for i, d in enumerate(x) if kept or i not in reduced]],
        reduce=dict.fromkeys(row, "none") if ordered else {},
        local=lambda local: local.run(widely(form, call), Rows.of(local, reduced), local.args[0]),
        local_factors=row,
        flops=3 * numel(shape),
    )


def _masked(call: Call) -> Rule:
    """`_masked_softmax(x, mask, dim, kind)`: the mask is one of queries and keys (kind 0), of a batch's keys (1), or
    shaped like x; its backward sees the last kind only."""
    *_, x_meta, mask = call.operands
    backward = len(call.operands) == 3
    shape = x_meta.shape
    space = Space()
    dim = arg(call, 3 if backward else 2, "dim")
    at = axis(-1 if dim is None else dim, len(shape))
    x = space.dims(shape, whole=[at])
    kind = None if backward else arg(call, 3, "mask_type")
    if kind in (0, 1):
        space.whole |= set(x[-2])  # the kernel wants a square
    by = x[-2:] if kind == 0 else [x[0], x[-1]] if kind == 1 else x
    fits = [space.size(d) for d in by] == list(mask.shape)
    if not fits:
        space.whole |= space.sizes.keys()
    return space.rule(
        [x] * (len(call.operands) - 1) + [list(by) if fits else space.dims(mask.shape, whole=range(len(mask.shape)))],
        [x],
        linear=[{0}] if backward else [],
        flops=4 * numel(shape),
    )


ROWS: dict[str, RuleFn | str] = {
    "_softmax": _along(_softmax, 1),
    "_log_softmax": _along(_log_softmax, 1),
    "_safe_softmax": _along(_safe_softmax, 1),
    # `out=` leaves the composite ops as they are.
    "softmax.int": _along(_softmax, 1),
    "log_softmax.int": _along(_log_softmax, 1),
    "_softmax_backward_data": _along(_softmax_backward, 2, linear=True),
    "_log_softmax_backward_data": _along(_log_softmax_backward, 2, linear=True),
    "logsumexp": _logsumexp,
    **dict.fromkeys(["_masked_softmax", "_masked_softmax_backward"], _masked),
}
