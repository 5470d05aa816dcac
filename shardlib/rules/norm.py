"""Layer and RMS normalisation, with or without the normalised dims cut.

Where they are, devices exchange the sums of every row: first of the values, then of the squares of what is left without
the mean, so that nothing cancels. Gradients of weight and bias add up over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardlib.internals import schema_of
from shardlib.rules.rule import Call, Labels, Local, Rule, RuleFn
from shardlib.rules.shards import cast, cut, wide
from shardlib.rules.space import Dim, Space, arg, numel

aten = torch.ops.aten

# A normalisation's arguments and results: "x" is shaped like the input, "w" like the normalised dims, "s" like the
# statistics (the normalised dims are 1), "-" is no tensor.
_LAYOUTS = {
    "native_layer_norm": ("x-ww-", "xss"),
    "native_layer_norm_backward": ("xx-ssww-", "xww"),
    "_fused_rms_norm": ("x-w-", "xs"),
    "_fused_rms_norm_backward": ("xx-sw-", "xw"),
}


class Rows:
    """Sums over the dims that a normalisation reduces, on all devices that share a row.

    `factors` are what these dims are made of, `labels` those of the sums, which keep the dims with size 1.
    """

    def __init__(self, local: Local, dims: Sequence[int], factors: Sequence[str], labels: Labels, count: int) -> None:
        self.local, self.dims, self.factors, self.labels, self.count = local, list(dims), factors, labels, count

    def sum(self, x: Any) -> Any:
        local = self.local
        out = local.op(aten.sum.dim_IntList, x, self.dims, True) if self.dims else x
        for factor in cut(local, self.factors):
            out = local.all_reduce(out, factor, "sum", self.labels)
        return out

    def mean(self, x: Any) -> Any:
        return self.local.op(aten.div.Scalar, self.sum(x), self.count)

    def moments(self, x: Any) -> tuple[Any, Any, Any]:
        """The mean, x without it, and the mean square of that."""
        mean = self.mean(x)
        centred = self.local.op(aten.sub.Tensor, x, mean)
        return mean, centred, self.mean(self.local.op(aten.mul.Tensor, centred, centred))


def scaled(local: Local, x: Any, *others: Any) -> Any:
    """x times whatever of `others` there is."""
    for other in others:
        x = x if other is None else local.op(aten.mul.Tensor, x, other)
    return x


def rsqrt(local: Local, x: Any, eps: float) -> Any:
    return local.op(aten.rsqrt.default, local.op(aten.add.Scalar, x, eps))


def narrowed(local: Local, values: Sequence[Any], acc: torch.dtype) -> tuple[Any, ...]:
    """Results that were computed in `acc`, each in its own dtype."""
    pairs = zip(values, local.call.results, strict=True)
    return tuple(None if m is None else cast(local, x, acc, m.dtype) for x, m in pairs)


def widened(local: Local, x: Any, position: int, acc: torch.dtype) -> Any:
    """The argument at `position`, of which x is the local value, in `acc`."""
    given = local.call.args[position]
    return None if given is None else cast(local, x, given.dtype, acc)


def _layer_norm(local: Local, rows: Rows, acc: torch.dtype) -> tuple[Any, ...]:
    x, w, b = (widened(local, local.args[i], i, acc) for i in (0, 2, 3))
    mean, centred, var = rows.moments(x)
    rstd = rsqrt(local, var, local.args[4])
    out = scaled(local, centred, rstd, w)
    return out if b is None else local.op(aten.add.Tensor, out, b), mean, rstd


def _rms_norm(local: Local, rows: Rows, acc: torch.dtype) -> tuple[Any, ...]:
    x, w = (widened(local, local.args[i], i, acc) for i in (0, 2))
    eps = local.args[3] if local.args[3] is not None else torch.finfo(acc).eps
    rstd = rsqrt(local, rows.mean(scaled(local, x, x)), eps)
    return scaled(local, x, rstd, w), rstd


def _layer_norm_backward(local: Local, rows: Rows, acc: torch.dtype) -> tuple[Any, ...]:
    grad, x, mean, rstd, w = (widened(local, local.args[i], i, acc) for i in (0, 1, 3, 4, 5))
    unit = scaled(local, local.op(aten.sub.Tensor, x, mean), rstd)
    pull = scaled(local, grad, w)
    along = scaled(local, unit, rows.mean(scaled(local, pull, unit)))
    dx = local.op(aten.sub.Tensor, local.op(aten.sub.Tensor, pull, rows.mean(pull)), along)
    return scaled(local, dx, rstd), _outer_sum(local, rows, scaled(local, grad, unit)), _outer_sum(local, rows, grad)


def _rms_norm_backward(local: Local, rows: Rows, acc: torch.dtype) -> tuple[Any, ...]:
    grad, x, rstd, w = (widened(local, local.args[i], i, acc) for i in (0, 1, 3, 4))
    unit = scaled(local, x, rstd)
    pull = scaled(local, grad, w)
    along = scaled(local, unit, rows.mean(scaled(local, pull, unit)))
    dx = scaled(local, local.op(aten.sub.Tensor, pull, along), rstd)
    return dx, _outer_sum(local, rows, scaled(local, grad, unit))


def _outer_sum(local: Local, rows: Rows, x: Any) -> Any:
    """The sum over this device's rows: other devices' are pending."""
    outer = list(range(rows.dims[0]))
    return local.op(aten.sum.dim_IntList, x, outer) if outer else x


_CUT: dict[str, Callable[[Local, Rows, torch.dtype], tuple[Any, ...]]] = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
}


def _norm(call: Call) -> Rule:
    name = schema_of(call.target).name.removeprefix("aten::")
    kinds, outs = _LAYOUTS[name]
    inner = len(arg(call, kinds.index("-"), "normalized_shape"))
    shape = call.operands[0].shape
    start = len(shape) - inner
    space = Space()
    x = space.dims(shape)
    statistics = x[:start] + [()] * inner
    dims: dict[str, list[Dim]] = {"x": x, "w": x[start:], "s": statistics}
    operands = [dims[k] for k, a in zip(kinds, call.args, strict=False) if k != "-" and a is not None]
    results = [dims[k] if m is not None else [] for k, m in zip(outs, call.results, strict=True)]
    backward = outs[1] == "w"
    within, rows = ([f for d in part for f in d] for part in (x[start:], x[:start]))

    def local(local: Local) -> Any:
        if cut(local, within):
            acc = wide(call.operands[0].dtype)
            sums = Rows(local, range(start, len(shape)), within, tuple(statistics), numel(shape[start:]))
            return narrowed(local, _CUT[name](local, sums, acc), acc)
        # The kernels read statistics as if they were contiguous, which a slice of them is not.
        args = [local.op(aten.contiguous.default, a) if k == "s" else a for k, a in zip(kinds, local.args, strict=True)]
        return local.op(call.target, *args)

    return space.rule(
        operands,
        results,
        reduce=dict.fromkeys(within, "none") | dict.fromkeys(rows, "sum")
        if backward
        else dict.fromkeys(within, "none"),
        linear=[{0}] if backward else [],
        local=local,
        local_factors=[*within, *rows] if backward else within,
        flops=(8 if backward else 5) * numel(shape),
    )


# Weight normalisation: w = g v / |v|, with one norm for every index of `dim`. -----------------------------------------


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    norm = torch.linalg.vector_norm(v, 2, _others(v, dim), keepdim=True, dtype=_norm_dtype(g))
    return v * (g / norm.to(g.dtype)), norm


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norm: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    norm = norm.to(g.dtype)
    along = (grad * v).sum(_others(v, dim), keepdim=True) if _others(v, dim) else grad * v
    return (g / norm) * (grad - v * (along / (norm * norm))), along / norm


def _others(v: torch.Tensor, dim: int) -> list[int]:
    return [d for d in range(v.dim()) if d != dim]


def _norm_dtype(g: torch.Tensor) -> torch.dtype | None:
    """Torch keeps the norms of bfloat16 in single precision."""
    return torch.float32 if g.dtype == torch.bfloat16 else None


ROWS: dict[str, RuleFn | str] = dict.fromkeys(_LAYOUTS, _norm)

DECOMPOSED: dict[str, Callable[..., Any]] = {
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm_backward,
}
