"""Layer and RMS normalisation, with or without the normalised dims cut.

Where they are, devices exchange the sums of every row: first of the values, then of the squares of what is left without
the mean, so that nothing cancels. Gradients of weight and bias add up over the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.internals import schema_of
from shardlib.rules.rule import Call, Local, Rule, RuleFn
from shardlib.rules.shards import Rows, cut, widely
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


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """x times the weight, plus the bias, where there are such."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(rows: Rows, x: Tensor, _: Any, w: Tensor | None, b: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    mean, centred, var = rows.moments(x)
    rstd = (var + eps).rsqrt()
    return affine(centred * rstd, w, b), mean, rstd


def _rms_norm(rows: Rows, x: Tensor, _: Any, w: Tensor | None, eps: float | None) -> tuple[Tensor, ...]:
    rstd = (rows.mean(x * x) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return affine(x * rstd, w), rstd


def _layer_norm_backward(
    rows: Rows, grad: Tensor, x: Tensor, _: Any, mean: Tensor, rstd: Tensor, w: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    unit, pull = (x - mean) * rstd, affine(grad, w)
    dx = pull - rows.mean(pull) - unit * rows.mean(pull * unit)
    return dx * rstd, _outer_sum(rows, grad * unit), _outer_sum(rows, grad)


def _rms_norm_backward(
    rows: Rows, grad: Tensor, x: Tensor, _: Any, rstd: Tensor, w: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    unit, pull = x * rstd, affine(grad, w)
    return (pull - unit * rows.mean(pull * unit)) * rstd, _outer_sum(rows, grad * unit)


def _outer_sum(rows: Rows, x: Tensor) -> Tensor:
    """The sum over this device's rows: other devices' are pending."""
    outer = list(range(rows.dims[0]))
    return x.sum(outer) if outer else x


_CUT: dict[str, Callable[..., tuple[Tensor, ...]]] = {
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
    dims: dict[str, list[Dim]] = {"x": x, "w": x[start:], "s": x[:start] + [()] * inner}
    operands = [dims[k] for k, a in zip(kinds, call.args, strict=False) if k != "-" and a is not None]
    results = [dims[k] if m is not None else [] for k, m in zip(outs, call.results, strict=True)]
    backward = outs[1] == "w"
    within, rows = ([f for d in part for f in d] for part in (x[start:], x[:start]))

    def local(local: Local) -> Any:
        if cut(local, within):
            return local.run(widely(_CUT[name], local.call), Rows.of(local, range(start, len(shape))), *local.args)
        # The kernels read statistics as if they were contiguous, which a slice of them is not.
        args = [local.op(aten.contiguous.default, a) if k == "s" else a for k, a in zip(kinds, local.args, strict=True)]
        return local.op(call.target, *args)

    return space.rule(
        operands,
        results,
        reduce=dict.fromkeys(within, "none") | (dict.fromkeys(rows, "sum") if backward else {}),
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
