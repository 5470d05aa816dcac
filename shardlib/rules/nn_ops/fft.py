"""Fourier transforms: the transformed dims stay whole, the others pass; all are linear.

The last of the transformed dims may change its size: real signals have half a spectrum.
"""

from __future__ import annotations

from shardlib.rules.iteration_space import arg, numel, result_shape
from shardlib.rules.local_forms.stencil import nonempty
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, RuleFn


def _flops(call: Call, _: int) -> int:
    shape, new = call.operands[0].shape, result_shape(call)
    steps: int = sum(max(shape[i], new[i]).bit_length() for i in arg(call, "dim"))
    return 5 * steps * max(numel(shape), numel(new))


# The libraries refuse empty batches. Complex numbers have as many frequencies: the dim before and behind is one, so
# that what is there and back again is cut as it was.
_HOW = "dim:whole ...:local {0}"
_TRANSFORM = pattern(f"[dim] -> [_] | {_HOW}", local=nonempty, flops=_flops)
_COMPLEX = pattern(f"[dim] -> [dim] | {_HOW}", local=nonempty, flops=_flops)

ROWS: dict[str, RuleFn | str] = {**dict.fromkeys(["_fft_r2c", "_fft_c2r"], _TRANSFORM), "_fft_c2c": _COMPLEX}
