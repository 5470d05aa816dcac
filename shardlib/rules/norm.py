"""Normalisations: what is normalised over stays whole; gradients of weight and bias add up over the rest."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.rules.rule import Call, Local, Rule, RuleFn
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


def _norm(call: Call) -> Rule:
    kinds, outs = _LAYOUTS[call.target._schema.name.removeprefix("aten::")]
    inner = len(arg(call, kinds.index("-"), "normalized_shape"))
    shape = call.operands[0].shape
    start = len(shape) - inner
    space = Space()
    x = space.dims(shape, whole=range(start, len(shape)))
    dims: dict[str, list[Dim]] = {"x": x, "w": x[start:], "s": x[:start] + [()] * inner}
    operands = [dims[k] for k, a in zip(kinds, call.args, strict=False) if k != "-" and a is not None]
    results = [dims[k] if m is not None else [] for k, m in zip(outs, call.results, strict=True)]
    backward = outs[1] == "w"

    def local(local: Local) -> Any:
        # The kernels read statistics as if they were contiguous, which a slice of them is not.
        args = [local.op(aten.contiguous.default, a) if k == "s" else a for k, a in zip(kinds, local.args, strict=True)]
        return local.op(call.target, *args)

    return space.rule(
        operands,
        results,
        reduce=dict.fromkeys((f for d in x[:start] for f in d), "sum") if backward else {},
        linear=[{0}] if backward else [],
        local=local if backward else None,
        local_factors=[f for d in x for f in d] if backward else (),
        flops=(8 if backward else 5) * numel(shape),
    )


ROWS: dict[str, RuleFn | str] = dict.fromkeys(_LAYOUTS, _norm)
