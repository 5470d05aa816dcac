"""Fourier transforms: the transformed dims stay whole, the others pass; all are linear."""

from __future__ import annotations

from shardlib.rules.nonempty import nonempty
from shardlib.rules.rule import Call, Rule, RuleFn
from shardlib.rules.space import Space, arg, axis, numel, result_shape


def _transform(call: Call) -> Rule:
    """The last of the transformed dims may change its size (real signals have half a spectrum)."""
    shape, new = call.operands[0].shape, result_shape(call)
    changed = {axis(d, len(shape)) for d in arg(call, 1, "dim")}
    space = Space()
    x = space.dims(shape, whole=changed)
    out = [space.dim(n, "o", whole=True) if i in changed else x[i] for i, n in enumerate(new)]
    steps = sum(max(shape[i], new[i]).bit_length() for i in changed)
    return space.rule(
        [x],
        [out],
        linear=[{0}],
        local=nonempty,  # the libraries refuse empty batches
        local_factors=[f for i, d in enumerate(x) if i not in changed for f in d],
        flops=5 * steps * max(numel(shape), numel(new)),
    )


ROWS: dict[str, RuleFn | str] = dict.fromkeys(["_fft_r2c", "_fft_c2r", "_fft_c2c"], _transform)
